"""The exception for errors that the user can fix, and the command that installs a missing package."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from pathlib import Path


class TrainerError(Exception):
    """Training cannot start or continue. The message says what failed, the value seen and what would work."""


def install(what: str) -> str:
    """Return the shell command that installs ``what`` into this interpreter's environment, by pip if it has pip."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {what}" if _has_pip() else f"uv pip install --python {python} {what}"


def _has_pip() -> bool:
    # look for the folder: a search by importlib would let setuptools replace distutils in this process
    return Path(sysconfig.get_path("purelib"), "pip").is_dir()
