"""Content keys of runs: the key itself (``content_key``), the code that a run imports (``import_closure``), the
environment of the ranks (``rank_environment``)."""

ABSENT = "absent"
"""The version that a key records for an optional module that isn't installed."""
IMAGE = "container image"
"""The name under which a key's environment has the digest of the image that ranks run in."""
