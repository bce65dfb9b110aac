"""The interception of a process's accesses, which are passed on to its ``Watch``: by an audit hook (sys.addaudithook),
and by replacing functions that raise no audit event."""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH109, PTH115, PTH117, PTH118, PTH119, PTH120, SIM105
from __future__ import annotations

import os
import sys
from _thread import get_ident

from . import ARGUMENT_MISSING, OUTSIDE, PROJECT, SKIP, WORK, original_open, original_stat
from .watch import CHANGES, IMPORT_SYSTEM, MOST_CACHED, Watch, absolute, as_text, exists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

_METADATA = ("/importlib/metadata/", "/importlib_metadata/")  # standard library; package on PyPI, which MLflow uses
_CHANGES_OR_DIRECTORY = CHANGES | getattr(os, "O_DIRECTORY", 0)
_OBSERVED_CODE = 2  # depth of the observed code's frame for ``sys._getframe`` in a handler, which the hook calls


def hook_of(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the audit hook. It is called at each ``open``, so for a path seen before it only looks into a set."""
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
            # an import reads sources, too; other code that opens a source also sees its comments
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
        # the program itself and the files on its command line are read, by a process that isn't observed
        is_list = not isinstance(words, (str, bytes)) and not hasattr(words, "__fspath__")
        program = as_text(executable or (words[0] if is_list else words))
        zone = watch.locate(os.path.dirname(absolute(program)))[0]
        if zone not in (OUTSIDE, SKIP):  # programs outside of the project belong to the host
            watch.program_started([program], cwd)
        if not os.path.basename(program).startswith("python"):  # a Python process has its own hook
            watch.program_started(words[1:] if is_list else words, cwd)

    def connected(database: Any) -> None:  # to SQLite, which takes a path or an address file:PATH?OPTIONS
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
            if not watch.is_own(source):  # its content becomes that of a file of the program
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


_MOST_READS = 1000  # reads of one variable whose reader is determined, which takes 8 µs each
_CODE_OF_ENVIRON = (
    *(os.__file__, "<frozen os>"),
    *(os.path.dirname(os.__file__) + "/_collections_abc.py", "<frozen _collections_abc>"),
)


def replace_stat(watch: Watch) -> None:
    """Note what ``os.stat`` doesn't find, or finds in the checkout: it (and os.path.exists) raises no audit event."""
    seen: set[Any] = set()

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        try:
            status = original_stat(path, *args, **options)
        except FileNotFoundError:
            note(path, options, watch.stat_failed)
            raise
        if type(path) is not int and path not in seen:
            note(path, options, watch.stat_succeeded)
        return status

    def note(path: Any, options: dict[str, Any], noted_by: Callable[[str], None]) -> None:
        try:
            if path in seen or options.get("dir_fd") is not None or get_ident() in watch.unobserved_threads:
                return
            if len(seen) > MOST_CACHED:
                seen.clear()
            seen.add(path)
            noted_by(absolute(path))
        except Exception:  # not noted: note it when it comes again
            seen.clear()

    _replace("stat", stat)


def replace_open(watch: Watch) -> None:
    """Note ``os.open(name, dir_fd=…)``, whose audit event lacks the folder."""

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None or os.path.isabs(path):
            return original_open(path, flags, mode, dir_fd=dir_fd)
        try:
            with watch.unobserved:
                full_path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), as_text(path))
            watch.file_opened(full_path, flags)
        except Exception:
            pass
        with watch.unobserved:
            return original_open(path, flags, mode, dir_fd=dir_fd)

    _replace("open", opened)


def _replace(name: str, function: Any) -> None:
    """Put a function into os in place of the one of that name, and of what os says about that one."""
    original = getattr(os, name)
    function.__module__, function.__name__, function.__qualname__ = "os", name, name
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in able:
            able.add(function)
    setattr(os, name, function)


def replace_environ(watch: Watch) -> None:
    """Note the variables that are read by name, and the code that reads them; a copy of all variables reads none."""
    environ: Any = type(os.environ)
    original_getitem, original_iter = environ.__getitem__, environ.__iter__
    # dict(os.environ) asks for all names and then reads each in turn: reads in this order are those of a copy
    left_to_copy: list[str] = []
    seen: set[tuple[Any, str]] = set()
    reads: dict[Any, int] = {}

    def read(self: Any, name: Any) -> Any:
        if left_to_copy and left_to_copy[-1] == name:
            left_to_copy.pop()
            return original_getitem(self, name)
        reads[name] = count = reads.get(name, 0) + 1
        if count > _MOST_READS:
            return original_getitem(self, name)
        # find the code that asked, beyond the methods of os.environ
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _CODE_OF_ENVIRON:  # get, os.getenv
            frame = frame.f_back
        source = "" if frame is None else frame.f_code.co_filename
        if (name, source) not in seen:
            del left_to_copy[:]
            seen.add((name, source))
            try:
                watch.variable_read(name, source)
            except Exception:
                seen.clear()
        return original_getitem(self, name)

    def names(self: Any) -> Iterator[Any]:
        variables = [*original_iter(self)]
        left_to_copy[:] = variables[::-1]
        return iter(variables)

    environ.__getitem__, environ.__iter__ = read, names


def replace_torch_writer(watch: Watch) -> None:
    """Note the files that ``torch.save`` writes in C++ by path, which raises no audit event."""
    writer: Any = getattr(sys.modules["torch.serialization"], "_open_zipfile_writer_file", None)
    if writer is None or hasattr(writer, "paceline"):
        return
    original_init = writer.__init__

    def init(self: Any, name: Any, *args: Any, **options: Any) -> None:
        try:
            watch.file_written(absolute(name))
        except Exception:
            pass
        original_init(self, name, *args, **options)

    writer.__init__, writer.paceline = init, True


def begin(*, folder: str, zones: list[tuple[str, str]], notes: str, is_noting: bool, in_copy: bool) -> None:
    """Set up a process with ``folder`` first on PYTHONPATH. ``in_copy``: nothing of the project may be imported."""
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
    """Import sources without byte code, which would also fit a source that was edited within the same second."""
    loader: Any = sys.modules["_frozen_importlib_external"].SourceFileLoader
    original_path_stats, standard = loader.path_stats, os.path.dirname(os.__file__) + "/"

    def path_stats(self: Any, path: str) -> Any:
        if path.startswith(standard) or "/site-packages/" in path or "/dist-packages/" in path:
            return original_path_stats(self, path)
        raise OSError(path)  # the loader then neither reads nor writes byte code

    loader.path_stats = path_stats


def leave_project(zones: Iterable[tuple[str, str]]) -> None:
    """Remove the project's folders (of an editable install) from ``sys.path``: only the run's copy may be imported."""
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
