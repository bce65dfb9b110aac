"""The start of an observed process: its import path, compilation from sources, and what the watch is told by."""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH120
from __future__ import annotations

import os
import sys

from . import OUTSIDE, SKIP, WORK
from .audit_hook import hook_of
from .replacements import replace_environ, replace_open, replace_stat
from .watch import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


def begin(*, folder: str, zones: list[tuple[str, str]], notes: str, is_noting: bool, in_copy: bool) -> None:
    """Set up a process that was started with ``folder``, and a ``sitecustomize.py`` in it, first on PYTHONPATH.

    Args:
        zones: (zone, real path of a folder).
        notes: folder for the notes.
        is_noting: note what the process reads.
        in_copy: the process works in a copy of the project, and must import nothing from the project itself.
    """
    if in_copy:
        leave_project(zones)
    compile_anew()
    if is_noting:
        start(zones, notes)
    run_own_sitecustomize(folder)


def start(zones: Iterable[tuple[str, str]], notes: str) -> None:
    """Begin to note what this process reads, in the folder ``notes``."""
    watch = Watch(zones, notes)
    sys.addaudithook(hook_of(watch))
    replace_stat(watch)
    replace_open(watch)
    replace_environ(watch)
    # first finder: importlib.import_module, which loads plug-ins, raises no audit event
    sys.meta_path.insert(0, _Finder(lambda module, _: watch.module_imported(module)))
    # last finder: sees the modules that are missing for all others
    sys.meta_path.append(
        _Finder(lambda module, folders: watch.module_missing(module, sys.path if folders is None else folders))
    )


class _Finder:
    """Entry of ``sys.meta_path`` that passes on the names of imported modules and finds none."""

    def __init__(self, note: Callable[[str, Any], None]) -> None:
        self._note = note

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        try:
            self._note(name, path)
        except Exception:
            return


def compile_anew() -> None:
    """Compile modules of source trees from their sources on each import, without byte code files.

    Byte code identifies its source by size and time in seconds, so an edit within the same second would run the old
    code.
    """
    loader: Any = sys.modules["_frozen_importlib_external"].SourceFileLoader
    original_path_stats, standard = loader.path_stats, os.path.dirname(os.__file__) + "/"

    def path_stats(self: Any, path: str) -> Any:
        if path.startswith(standard) or "/site-packages/" in path or "/dist-packages/" in path:
            return original_path_stats(self, path)
        raise OSError(path)  # the loader then neither reads nor writes byte code

    loader.path_stats = path_stats


def leave_project(zones: Iterable[tuple[str, str]]) -> None:
    """Remove the project's folders from ``sys.path``.

    An editable install puts them there on one host and not on another, and a module that the snapshot lacks would be
    imported from them.
    """
    watch = Watch(zones, "")

    def stays(entry: str) -> bool:
        # the run's copy, folders outside of the project, and those that are never noted (Python, its packages)
        return not entry or watch.locate(os.path.realpath(entry))[0] in (WORK, OUTSIDE, SKIP)

    def is_of_editable_install(finder: Any) -> bool:
        return "editable" in (finder if isinstance(finder, type) else type(finder)).__module__

    sys.path[:] = [entry for entry in sys.path if stays(entry)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not is_of_editable_install(finder)]


def run_own_sitecustomize(folder: str) -> None:
    """Run the installation's own sitecustomize, which the one in ``folder`` hides."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    hiding = sys.modules.pop("sitecustomize", None)
    try:
        __import__("site" + "customize")  # a computed name, so that it does not count as an import of this run
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if hiding is not None:
            sys.modules.setdefault("sitecustomize", hiding)
