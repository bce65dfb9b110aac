"""User-defined preparation steps: commands or functions with inputs, outputs and a content key, run once.

Results lie below ``runs/steps/``. ``declared`` reads the steps, ``key`` computes their keys, ``graph`` holds their
dependencies and states, ``making`` runs them, ``source`` passes their outputs to a run as its data.
"""
