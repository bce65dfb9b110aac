"""How something is installed into this environment: by pip where it has it, else by uv, which made it without."""

from __future__ import annotations

import shlex
import sys
import sysconfig
from pathlib import Path


def install(what: str) -> str:
    """The command that installs ``what`` into the environment of this interpreter."""

    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {what}" if _has_pip() else f"uv pip install --python {python} {what}"


def _has_pip() -> bool:
    """Looked for as a folder: a search by importlib would let setuptools change how this process imports distutils."""

    return Path(sysconfig.get_path("purelib"), "pip").is_dir()
