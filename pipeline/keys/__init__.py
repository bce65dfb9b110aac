"""Content keys of runs: the key itself (``content_key``), the import closure of the code, the environment of the
ranks."""

ABSENT = "absent"
"""Version that a key's environment records for an optional module that isn't installed."""
IMAGE = "container image"
"""Name in a key's environment for the digest of the image that ranks run in."""
