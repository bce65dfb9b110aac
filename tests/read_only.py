"""A folder that can't be written to, not even by root: a read-only mount of it somewhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, at: Path) -> Iterator[Path]:
    """``folder``, readable at ``at``; skips the test where that isn't allowed."""
    at.mkdir()
    bind = ["mount", "--bind", str(folder), str(at)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(bind, check=False).returncode:
        pytest.skip("a read-only folder needs root and the right to mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(at)], check=True)
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)
