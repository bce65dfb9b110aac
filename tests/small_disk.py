"""A file system of 2 MiB, for what happens on a disk that fills."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """``folder``, made and mounted; skips the test where that isn't allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", ",".join(["size=2m", *options]), "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
