"""Files that a command can't read, also where root runs the tests: it is started without root's rights to any file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""Stands before a command (setpriv is of util-linux)."""


@contextmanager
def unreadable(*paths: Path) -> Iterator[None]:
    """Nobody may read, write or enter them; afterwards they can be removed again."""
    for path in paths:
        path.chmod(0)
    try:
        yield
    finally:
        for path in paths:
            path.chmod(0o700)
