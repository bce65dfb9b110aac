"""Files that are no code and lie beside the modules of a run: those of its packages, and those that a module names.

A package's data comes along with any of its modules. A module outside of a package has beside it whatever its folder
holds, so of that only files count that it names in its text, if it also asks where it lies itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.core.places import MODULES
from pipeline.keys.readings import Reading

LARGEST_BYTES = 1 << 20
_MOST = 200  # files in a folder of a package: more are a data set
_NO_DATA = (".py", ".pyc", ".pyi", ".so", ".dylib", ".pyd", ".md", ".rst", ".ipynb", ".log")
_FOLDERS_LEFT = ("__pycache__", "checkpoints", "logs", "outputs", "runs", "wandb", "mlruns", "lightning_logs")


class PackageData(NamedTuple):
    """``files`` by their paths in the snapshot; ``left_out``: those that are too large, as messages name them."""

    files: dict[str, Path]
    left_out: tuple[str, ...]


def of_modules(found: Mapping[str, Reading], lying: Mapping[str, str]) -> PackageData:
    """The data of modules, by their paths in the snapshot; ``lying``: where each lies. Raises OSError."""
    candidates: dict[str, Path] = {}
    for name, reading in sorted(found.items()):
        if name.partition("/")[0].removesuffix(".py") in MODULES or not name.endswith(".py"):
            continue
        folder, inside = Path(lying[name]).parent, name.rpartition("/")[0]
        if inside and name.endswith("/__init__.py"):
            candidates |= {f"{inside}/{path.relative_to(folder).as_posix()}": path for path in _below(folder)}
        for path in _named(reading, folder):
            candidates[os.path.normpath(f"{inside}/{path.relative_to(folder).as_posix()}").lstrip("/")] = path
    sizes = {name: path.stat().st_size for name, path in candidates.items()}
    return PackageData(
        files={name: path for name, path in candidates.items() if sizes[name] <= LARGEST_BYTES},
        left_out=tuple(f"{name} ({size:,} bytes)" for name, size in sorted(sizes.items()) if size > LARGEST_BYTES),
    )


def _below(folder: Path) -> Iterator[Path]:
    """The data in a package's folder and in those of its folders that are no packages themselves."""
    entries = sorted(folder.iterdir())
    files = [path for path in entries if _is_data(path)]
    yield from files if len(files) <= _MOST else ()
    for path in entries:
        is_left = path.name.startswith(".") or path.name in _FOLDERS_LEFT or path.is_symlink()
        if not is_left and path.is_dir() and not (path / "__init__.py").exists():
            yield from _below(path)


def _named(reading: Reading, folder: Path) -> Iterator[Path]:
    for name in reading.files:
        path = folder / name
        if ".." not in path.parts and _is_data(path):
            yield path


def _is_data(path: Path) -> bool:
    return not path.name.startswith(".") and not path.name.endswith(_NO_DATA) and path.is_file()
