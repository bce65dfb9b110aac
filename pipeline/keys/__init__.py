"""Of what a run is made: the content key, the import closure of its code, the environment that it is computed in.

Public face: ``content_key.content_key``, ``import_closure.import_closure``, ``diff.differences``, ``rank_environment``.
"""
