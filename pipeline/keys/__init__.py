"""Of what a run is made: the content key, the import closure of its code, the environment that it is computed in.

Public face: ``content_key.content_key``, ``import_closure.import_closure``, ``diff.differences``, ``rank_environment``.
"""

ABSENT = "absent"
"""In a key's environment: in place of the version of a module that is missing and that the code can do without."""
