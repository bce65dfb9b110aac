"""Content keys of runs: the key itself, the import closure of the code, and the environment of the ranks.

Entry points: ``content_key.content_key``, ``import_closure.import_closure``, ``content_key.differences``,
``rank_environment``.
"""

ABSENT = "absent"
"""Version that a key's environment records for an optional module that isn't installed."""
IMAGE = "container image"
"""Name in a key's environment for the digest of the image that ranks run in."""
