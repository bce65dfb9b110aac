"""A verb's own ``name=value`` words."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.core.errors import UsageError


def is_on(options: Mapping[str, str], name: str) -> bool:
    """A switch: ``name=1``, off where it isn't given. Raises UsageError: neither yes nor no."""
    value = options.get(name, "0")
    if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise UsageError(f"{name}={value} must be 1 or 0")
    return value.lower() in ("1", "true", "yes")
