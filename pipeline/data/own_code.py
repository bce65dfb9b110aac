"""What a function that makes a data set runs and reads, where the pack's name can't hold it: its modules as they were
imported by this process, files of the project that it opens besides its source, and names that it looks for there."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.core import masking, places
from pipeline.core.files import sha256_file, sha256_text, write_json
from pipeline.keys.readings import module_of

READ = "read.json"
"""In a pack, by paths in the project: what the function read besides (see ``_digest``)."""

_IMPORTING = "<frozen importlib._bootstrap_external>"
_NO_INPUTS = ("site-packages", "__pycache__")
_OURS = ("runs", *places.MODULES)
_imported: dict[str, str] = {}  # digests of sources, by path, when this process imported them
_opened: set[str] | None = None
_hooked = False
_besides: set[str] = set()  # files that a function read besides, modules that it imported by a computed name among them


def forget_edited(digests: Mapping[str, str]) -> None:
    """Have modules imported anew whose sources were edited since this process did: a search makes packs for hours."""
    if any(_imported.get(path, digest) != digest for path, digest in digests.items()):
        names = {module_of(path) for path in digests}
        tops = {name.partition(".")[0] for name in names} - {*places.MODULES}
        for name, module in [*sys.modules.items()]:
            # a package without __init__.py goes too: it asks for its parent, which may have gone
            if name.partition(".")[0] in tops and (name in names or getattr(module, "__file__", None) is None):
                del sys.modules[name]
        importlib.invalidate_caches()
    _imported.update(digests)


@contextmanager
def watched() -> Iterator[set[str]]:
    """The paths that this process opens for reading within the block, whether they are there or not, folders whose
    names it asks for, and the modules that it imports there; a process that it starts isn't seen."""
    global _opened, _hooked
    if not _hooked:
        sys.addaudithook(_note)  # there is no way to take one away
        _hooked = True
    for name, module in [*sys.modules.items()] if _besides else ():
        if _file_of(module) in _besides:  # of an earlier pack, and maybe edited since
            del sys.modules[name]
    before = {*sys.modules}
    found: set[str] = set()
    _opened = found
    try:
        yield found
    finally:
        _opened = None
        found.update(_file_of(sys.modules[name]) for name in {*sys.modules} - before)


def _file_of(module: object) -> str:
    place = getattr(module, "__file__", None)
    return os.path.realpath(place) if isinstance(place, str) else ""


def _note(event: str, args: tuple[object, ...]) -> None:
    opened = _opened  # once: another thread may open a file while the block ends
    if opened is None or event not in ("open", "os.listdir", "os.scandir"):
        return
    path, flags = args[0] or ".", args[2] if event == "open" else 0
    if event != "open" and sys._getframe(1).f_code.co_filename == _IMPORTING:
        return
    if isinstance(path, str | bytes) and isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_CREAT):
        opened.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100


def read_besides(opened: Collection[str], known: Collection[Path], root: Path, data_dir: Path) -> list[Path]:
    """Of the paths that were opened those of the project that nothing in the pack's name stands for, sorted."""
    counted = {os.path.realpath(path) for path in known}
    real, data = Path(os.path.realpath(root)), os.path.realpath(data_dir)
    found = set[Path]()
    for path in {os.path.realpath(name) for name in opened} - counted:
        if not path.startswith(f"{real}/") or f"{path}/".startswith(f"{data}/"):
            continue
        parts = Path(path).relative_to(real).parts
        if not any(part.startswith(".") or part in _NO_INPUTS for part in parts) and Path(parts[0]).stem not in _OURS:
            found.add(Path(path))
    _besides.update(map(str, found))
    return sorted(found)


def keep(folder: Path, files: Collection[Path], root: Path) -> list[str]:
    """Note in a pack what was read besides; the files, by their paths in the project. Raises OSError."""
    names = {path.relative_to(os.path.realpath(root)).as_posix(): path for path in files}
    found = {name: _digest(path) for name, path in names.items() if masking.shown(name) == name}  # no secret in a file
    if found:
        write_json(folder / READ, found)
    return [name for name in found if (root / name).is_file()]


def _digest(path: Path) -> str:
    """Of a file's content, of a folder's names; '' where there is neither. Raises OSError."""
    if path.is_dir():
        shown = (name for name in os.listdir(path) if not name.startswith(".") and name not in _NO_INPUTS)  # noqa: PTH208
        return sha256_text("\n".join(sorted(shown)))
    return sha256_file(path) if path.exists() else ""


def is_current(folder: Path, root: Path) -> bool:
    """Whether what was read besides, when the pack in ``folder`` was made, is what it was."""
    try:
        noted = json.loads((folder / READ).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        return False
    try:
        return all(_digest(root / name) == digest for name, digest in noted.items())
    except (OSError, AttributeError):
        return False
