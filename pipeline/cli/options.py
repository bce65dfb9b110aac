"""A verb's own ``name=value`` words."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from pipeline.core.errors import UsageError


def is_on(options: Mapping[str, str], name: str) -> bool:
    """A switch: ``name=1``, off where it isn't given. Raises UsageError: neither yes nor no."""
    value = options.get(name, "0")
    if value.lower() not in ("0", "1", "true", "false", "yes", "no"):
        raise UsageError(f"{name}={value} must be 1 or 0")
    return value.lower() in ("1", "true", "yes")


def at_once() -> int:
    """How many steps may run side by side: doit's own option -n, 1 without it."""
    told = re.search(r"(?:^|\0)(?:-n|--process)[\0=]?(\d+)(?:\0|$)", "\0".join(sys.argv[1:]))
    return max(1, int(told[1])) if told else 1
