"""Limit a rank's imports to the code snapshot, PYTHONPATH, the standard library and installed distributions.

A .pth file of the environment (an editable install, a line with a working tree) puts sources on ``sys.path`` that
are not part of the run key. A module missing from the snapshot would be imported from there, on one host and not on
another.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def leave_snapshot_and_installed() -> None:
    """Remove all other entries from ``sys.path``, and the finders of editable installs from ``sys.meta_path``."""
    snapshot = str(Path(__file__).parents[2])
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    folders = installation()
    kept = [entry for entry in sys.path if _is_installed(entry, folders) or _is_any(entry, given)]
    sys.path[:] = [snapshot, *(entry for entry in kept if not _is_any(entry, [snapshot]))]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_editable(finder)]


def installation() -> list[str]:
    """Return the folders of the standard library and of installed distributions, with user site-packages if enabled."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*(sysconfig.get_path(name) for name in names), *site.getsitepackages(), *user]


def _is_installed(entry: str, folders: Sequence[str]) -> bool:
    """Return True for a path in ``folders``, the zipped standard library, or another folder with distributions."""
    path = Path(entry).resolve()
    if path.suffix == ".zip" and path.parent in [Path(folder).resolve().parent for folder in folders[:2]]:
        return True
    if any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
        return True
    return bool(entry) and any(path.glob("*.dist-info"))


def _is_any(entry: str, others: Sequence[str]) -> bool:
    return Path(entry).resolve() in [Path(other).resolve() for other in others]


def _is_editable(finder: object) -> bool:
    """Return True for a finder of an editable install: setuptools, hatchling, scikit-build and meson all name it so."""
    owner = finder if isinstance(finder, type) else type(finder)
    return "editable" in owner.__module__
