"""The audit hook: a handler for each event of the table "Audit events" in Python's documentation that shows a read.

An event is raised before the operation that it names, such as the opening of a file.
"""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH109, PTH118, PTH119, PTH120
from __future__ import annotations

import os
import sys
from _thread import get_ident

from . import ARGUMENT_MISSING, OUTSIDE, PROJECT, SKIP, WORK
from .replacements import replace_torch_writer
from .watch import CHANGES, IMPORT_SYSTEM, MOST_CACHED, Watch, absolute, as_text, exists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_METADATA = ("/importlib/metadata/", "/importlib_metadata/")  # standard library; package on PyPI, which MLflow uses
_CHANGES_OR_DIRECTORY = CHANGES | getattr(os, "O_DIRECTORY", 0)
_OBSERVED_CODE = 2  # depth of the observed code's frame for ``sys._getframe`` in a handler, which the hook calls


def hook_of(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the audit hook. For a path that was seen before or is not observed, the hook only looks into a set."""
    seen: set[str] = set()
    skipped, unobserved_threads = watch.skipped, watch.unobserved_threads
    handlers = {**_handlers_of_names(watch), **_handlers_of_programs(watch)}

    def opened(path: Any, flags: int) -> None:
        if type(path) is not str:
            path = os.fsdecode(path)
        if path[:1] != "/":
            path = os.getcwd() + "/" + path
        if path.startswith(skipped) and "/../" not in path:
            return
        if not flags & _CHANGES_OR_DIRECTORY:
            zone, _ = watch.locate(os.path.dirname(path))
            is_source = zone in (WORK, PROJECT) and path.endswith(".py")
            is_text = is_source and sys._getframe(_OBSERVED_CODE).f_code.co_filename != IMPORT_SYSTEM and exists(path)
            if is_text:
                watch.source_opened_as_text(path)
            if is_text or not is_source:  # a source that was only imported may later be opened as text
                if len(seen) > MOST_CACHED:
                    seen.clear()
                seen.add(path)
        watch.file_opened(path, flags)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        try:
            if event == "open":
                path, _, flags = args
                if path in seen and not flags & CHANGES:
                    return
                if isinstance(path, int) or (unobserved_threads and get_ident() in unobserved_threads):
                    return
                opened(path, flags)
            elif event in handlers and (not unobserved_threads or get_ident() not in unobserved_threads):
                handlers[event](*args)
        except Exception:
            pass

    return hook


def _handlers_of_programs(watch: Watch) -> dict[str, Callable[..., None]]:
    """Return event → handler of imports, started programs, and files that C code opens by itself."""

    def imported(module: str, filename: Any, *_: Any) -> None:
        if filename is not None:  # an extension module; source files raise "open"
            watch.file_read(absolute(filename))
        watch.module_imported(module)
        if "torch.serialization" in sys.modules:
            replace_torch_writer(watch)

    def started(executable: Any, words: Any, cwd: Any = None, *_: Any) -> None:
        is_list = not isinstance(words, (str, bytes)) and not hasattr(words, "__fspath__")
        program = as_text(executable or (words[0] if is_list else words))
        zone = watch.locate(os.path.dirname(absolute(program)))[0]
        if zone not in (OUTSIDE, SKIP):  # programs outside of the project belong to the host
            watch.program_started([program], cwd)
        if not os.path.basename(program).startswith("python"):  # a Python process has its own hook
            watch.program_started(words[1:] if is_list else words, cwd)

    def connected(database: Any) -> None:
        name = as_text(database)
        name = name[5:].partition("?")[0] if name.startswith("file:") else name
        if name and name != ":memory:":
            watch.file_read(absolute(name), ARGUMENT_MISSING)
            watch.file_written(absolute(name))

    def loaded(library: Any) -> None:
        if library is not None and "/" in as_text(library):
            watch.file_read(absolute(library), ARGUMENT_MISSING)

    return {
        "import": imported,
        "subprocess.Popen": started,
        "os.posix_spawn": lambda path, words, *_: started(path, words),
        "os.exec": lambda path, words, *_: started(path, words),
        "os.system": lambda command: watch.program_started([command], None),
        "sqlite3.connect": connected,
        "ctypes.dlopen": loaded,
    }


def _handlers_of_names(watch: Watch) -> dict[str, Callable[..., None]]:
    """Return event → handler of operations that list, search, rename or create names in folders."""

    def listed(path: Any) -> None:
        caller = sys._getframe(_OBSERVED_CODE).f_code.co_filename
        if caller != IMPORT_SYSTEM and not any(part in caller for part in _METADATA):
            watch.folder_listed(path, caller, all_names=True)

    def scanned(path: Any) -> None:
        caller = sys._getframe(_OBSERVED_CODE).f_code.co_filename
        if not os.path.basename(caller).startswith(("pathlib", "_local")):  # iterdir uses os.listdir
            watch.folder_listed(path, caller, all_names=False)

    def globbed(pattern: Any, recursive: bool, root: Any, folder: Any) -> None:
        if folder is None:
            watch.pattern_searched(os.path.join(as_text(root or ""), as_text(pattern)))

    def renamed(before: Any, after: Any, *folders: Any) -> None:
        if folders == (-1, -1):  # neither path is relative to an open folder
            source, target = absolute(before), absolute(after)
            if not watch.is_own(source):
                watch.file_read(source)
            watch.file_written(target)

    def made(path: Any, _: Any = None, folder: Any = -1) -> None:
        if folder == -1 and not exists(absolute(path)):
            watch.folder_made(absolute(path))

    return {
        "os.listdir": listed,
        "os.scandir": scanned,
        "glob.glob/2": globbed,
        "pathlib.Path.glob": lambda path, pattern: watch.pattern_searched(os.path.join(str(path), pattern)),
        "pathlib.Path.rglob": lambda path, pattern: watch.pattern_searched(os.path.join(str(path), "**", pattern)),
        "os.rename": renamed,
        "os.mkdir": made,
    }
