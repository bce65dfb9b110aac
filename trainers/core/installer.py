"""The command that installs a package into this environment: pip, or uv where the environment has no pip."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from pathlib import Path


def install(what: str) -> str:
    """Return the shell command that installs ``what`` into the environment of this interpreter."""

    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {what}" if _has_pip() else f"uv pip install --python {python} {what}"


def _has_pip() -> bool:
    # look for the folder: a search by importlib would let setuptools replace distutils in this process
    return Path(sysconfig.get_path("purelib"), "pip").is_dir()
