"""Record what a Python process reads besides its arguments: files, folder listings, variables and modules.

``trainers.core.observation`` writes this file, plus a last line that calls ``begin``, as ``sitecustomize.py`` into a
folder that is first on PYTHONPATH. So it runs before all other code in each Python process of a script, a step or a
user-defined data set; ranks of the built-in trainer import it. Standard library only and Python >= 3.8, as a script
may start another interpreter. Nothing here may raise: an exception in an audit hook would abort the observed operation.

A file is hashed when it is first opened, so that a later edit of it is detected. The events are those of the table
"Audit events" in Python's documentation. An event is raised before the file is opened. It is one file, although it is
long, because it runs where nothing of Paceline can be imported.
"""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH100, PTH109, PTH112, PTH114, PTH115, PTH117, PTH118, PTH119, PTH120, PTH208, SIM105
from __future__ import annotations

import os
import stat
import sys
from _imp import extension_suffixes  # importlib.machinery has a public name for it and is slower to import
from _thread import get_ident
from time import monotonic_ns

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would take longer than this whole module
    import hashlib
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

# Where a path lies: the kind of its zone.
# WORK: the copy of the project in which the program runs. PROJECT: the checkout.
# ORIGIN: the folder of a script outside of the checkout. OUTSIDE: elsewhere.
# SKIP: not observed, such as the run folder and the data.
WORK, PROJECT, ORIGIN, OUTSIDE, SKIP = "work", "project", "origin", "outside", "skip"

# How a file was used.
# READ: opened, outside of the copy. TEXT: a source that was opened other than by an import.
# WRITTEN: opened for writing. MADE: a folder that was created outside of the copy.
# THERE: os.stat of an existing file of the checkout.
READ, TEXT, WRITTEN, MADE, THERE = "read", "text", "written", "made", "there"

# What was looked for in vain.
# ABSENT: an open of a file that isn't there. NO_STAT: an os.stat of one, which opens nothing (os.path.exists).
# OWN_STAT: the same by the program's own code, besides NO_STAT; libraries also look for files that they will write.
# MODULE: the files of an import that was not found. WORD: a file named on a command line, which the copy lacks.
ABSENT, NO_STAT, OWN_STAT, MODULE, WORD = "absent", "no-stat", "own-stat", "module", "word"

# What was listed.
# FOLDER: one that the copy lacks. PACKAGE: one of the copy, which may lack some of its modules.
# PATTERN: the names that match a pattern. NAMES: all names in a folder outside of the copy.
FOLDER, PACKAGE, PATTERN, NAMES = "folder", "package", "pattern", "names"

# What else was used.
# VARIABLE: a variable of the environment that was read by name. IMPORTED: a module, by its top-level name.
VARIABLE, IMPORTED = "variable", "imported"

HASHED_BYTES = 64 << 20  # a larger file is identified by size and modification time
_ALL_HASHED_BYTES = 512 << 20  # total per process; later files are identified by size and modification time, too
_MOST = 20_000  # largest number of notes of one process
_MOST_CACHED = 20_000  # largest number of paths in each of its sets and caches
_MOST_ABSENT = 1000  # of these, notes of absent files outside of the project
_MOST_READS = 1000  # reads of one variable whose reader is determined, which takes 8 µs each
_MAGIC = "*?["
_IMPORTING = "<frozen importlib._bootstrap_external>"
_METADATA = ("/importlib/metadata/", "/importlib_metadata/")  # standard library; package on PyPI, which MLflow uses
_OF_ENVIRON = (
    *(os.__file__, "<frozen os>"),
    *(os.path.dirname(os.__file__) + "/_collections_abc.py", "<frozen _collections_abc>"),
)
_SHOW_SOURCES = ("traceback.py", "warnings.py", "runpy.py", "<frozen runpy>")
_STANDARD = frozenset(getattr(sys, "stdlib_module_names", ()))
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# depth of the observed code's frame, as sys._getframe counts
_ABOVE_HANDLER = 2  # of a handler, which the hook calls
_ABOVE_METHOD = 3  # of a method of Watch, which a handler (called by the hook) or ``looked`` (called by ``stat``) calls
_stat, _open = os.stat, os.open  # the originals, which watch_stat and watch_open replace


def digest_of(path: str, as_stamp: bool = False) -> str:
    """Return the sha256 of a regular file, or ``SIZE:MTIME_NS`` if it is large or ``as_stamp``. Raises OSError."""
    seen = _stat(path)
    if as_stamp or seen.st_size > HASHED_BYTES:
        return f"{seen.st_size}:{seen.st_mtime_ns}"
    hashed, file = _sha256(b""), _open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        while part := os.read(file, 1 << 20):
            hashed.update(part)
    finally:
        os.close(file)
    return hashed.hexdigest()


def digest_of_names(folder: str, without: Iterable[str] = ()) -> str:
    """Return the sha256 of the names in a folder, except ``__pycache__`` and ``without``. Raises OSError."""
    names = sorted(name for name in os.listdir(folder) if name != "__pycache__" and name not in without)
    return _sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()


def _sha256(content: bytes) -> hashlib._Hash:
    import hashlib  # only when needed: it loads OpenSSL, which would delay the start of every script

    return hashlib.sha256(content)


class Unobserved:
    """Context in which this thread's own operations are not recorded."""

    def __init__(self, busy: set[int]) -> None:
        self._busy = busy

    def __enter__(self) -> None:
        self._busy.add(get_ident())

    def __exit__(self, *_: Any) -> None:
        self._busy.discard(get_ident())


class Watch:
    """State of the observation in one process. ``zones``: (kind, real path of a folder); the innermost zone counts."""

    def __init__(self, zones: Iterable[tuple[str, str]], report: str) -> None:
        self.zones = sorted(
            ((folder.rstrip("/") or "/", kind) for kind, folder in zones), key=lambda zone: -len(zone[0])
        )
        self.skipped = tuple(folder + "/" for folder, kind in self.zones if kind == SKIP and not self._holds(folder))
        self.files = {folder for folder, kind in self.zones if kind == SKIP}  # a data set may be a single file
        self.report = report
        self.noted: set[str] = set()
        self.written: set[str] = set()  # real paths that this process opened for writing
        self.made: tuple[str, ...] = ()  # folders that it made
        self.folders: dict[str, tuple[str, str]] = {}
        self.busy: set[int] = set()  # threads whose events are this module's own
        self.unobserved = Unobserved(self.busy)
        self.hashed_bytes = 0
        self.absent_outside = 0
        self.tops: set[str] = set()  # names of modules

    def _holds(self, folder: str) -> bool:
        """Return True if a recorded zone lies inside ``folder``."""
        return any(other.startswith(folder + "/") for other, kind in self.zones if kind != SKIP)

    def zone(self, folder: str) -> tuple[str, str]:
        """Return (kind, path inside the zone) of a folder."""
        if folder not in self.folders:
            if len(self.folders) > _MOST_CACHED:
                self.folders.clear()
            self.folders[folder] = self._zone(os.path.realpath(folder))
        return self.folders[folder]

    def _zone(self, real: str) -> tuple[str, str]:
        for top, kind in self.zones:
            if real == top or real.startswith(top + "/"):
                return kind, real[len(top) + 1 :]
        return OUTSIDE, real

    def look(self, path: str, missing: str, is_link: bool = False) -> None:
        """Note a file that is read.

        Args:
            missing: the ``how`` with which an absent file is noted; '' for no note.
        """
        folder, name = os.path.split(path)
        if path in self.files or not name or os.path.basename(folder) == "__pycache__":
            return
        kind, inside = self.zone(folder)
        # a link counts as its target, unless both link and target lie outside of the project
        if not is_link and kind in (WORK, OUTSIDE, SKIP) and os.path.islink(path):
            real = os.path.realpath(path)
            kind_of_target, _ = self.zone(os.path.dirname(real))
            if kind != OUTSIDE or kind_of_target not in (OUTSIDE, SKIP):
                self.look(real, missing, is_link=True)
                return
        if kind == SKIP:
            return
        inside = os.path.join(inside, name)
        if kind == WORK:
            if missing and not _exists(os.path.join(folder, name)):
                self.note(missing, kind, inside)
            return
        try:
            seen = _stat(path)
        except OSError:
            if missing in (ABSENT, NO_STAT) and (kind != OUTSIDE or self.absent_outside < _MOST_ABSENT):
                self.absent_outside += kind == OUTSIDE
                self.note(missing, kind, inside)
            return
        if stat.S_ISREG(seen.st_mode) and not self.is_own(path):
            self.note(READ, kind, inside, lambda: self.digest(path, seen.st_size))

    def own_look(self, path: str) -> None:
        """Note that the program's own code looked in vain for a file of the run's copy."""
        folder, name = os.path.split(path)
        kind, inside = self.zone(folder)
        file = _caller_outside_standard_library(sys._getframe(_ABOVE_METHOD)) if kind == WORK else ""
        if file and self.zone_of_reader(file) in (WORK, ORIGIN):
            self.note(OWN_STAT, WORK, os.path.join(inside, name))

    def is_own(self, path: str) -> bool:
        """Return True if this process wrote the file, or created a folder that contains it."""
        if not self.written and not self.made:
            return False
        real = os.path.realpath(path)
        return real in self.written or real.startswith(self.made)

    def digest(self, path: str, size_bytes: int) -> str:
        """Return ``digest_of`` the file as it is now, within the limit of bytes that a process hashes."""
        self.hashed_bytes += size_bytes if size_bytes <= HASHED_BYTES else 0
        with self.unobserved:
            return digest_of(path, as_stamp=self.hashed_bytes > _ALL_HASHED_BYTES)

    def wrote(self, path: str, keeps: bool = False) -> None:
        """Note a file that this process opens for writing; with ``keeps``, its content counts as read, too."""
        folder, name = os.path.split(path)
        kind, inside = self.zone(folder)
        real = os.path.join(os.path.realpath(folder), name)
        if kind == SKIP or real in self.written:
            return
        if keeps and _exists(path):
            self.look(path, "")
        if len(self.written) < _MOST_CACHED:
            self.written.add(real)
        inside = os.path.join(inside, name)
        if kind != WORK or not self.noted.isdisjoint(f"{how} {WORK} {inside}" for how in (ABSENT, NO_STAT)):
            self.note(WRITTEN, kind, inside)

    def opened(self, path: str, flags: int) -> None:
        """Handle a file that is about to be opened."""
        if flags & _CHANGES:
            self.wrote(path, keeps=not flags & os.O_TRUNC and flags & 3 != os.O_WRONLY)
        elif not flags & getattr(os, "O_DIRECTORY", 0):
            self.look(path, ABSENT)

    def note(self, how: str, kind: str, inside: str, digest: Callable[[], str] | None = None) -> None:
        """Append a line to this process's file of notes."""
        key = how + " " + kind + " " + inside
        if key in self.noted or len(self.noted) >= _MOST:
            return
        self.noted.add(key)
        at_ns = monotonic_ns()  # all processes of a host share this clock
        line = f"{at_ns} {how} {kind} {digest() if digest else '-'} {inside!a}\n"
        # open the file for each line: a script may close descriptors that it did not open
        with self.unobserved:
            file = _open(os.path.join(self.report, str(os.getpid())), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    def lacks_module(self, name: str, folders: Iterable[str]) -> None:
        """Note a module that ``folders`` lack; the checkout may have it."""
        last = name.rpartition(".")[2]
        ends = (".py", "/__init__.py", *extension_suffixes(), "/")
        for folder in folders:
            kind, inside = self.zone(folder or os.getcwd())
            if kind in (WORK, PROJECT):
                for end in ends:
                    self.note(MODULE, kind, os.path.join(inside, last + end))

    def imports(self, module: str) -> None:
        """Note the top-level name of an imported module."""
        top, dot, rest = module.partition(".")
        if top in _STANDARD:
            return
        if dot and getattr(sys.modules.get(top), "__file__", None) is None:  # a namespace: several share it
            top += "." + rest.partition(".")[0]
        if top not in self.tops:
            self.tops.add(top)
            self.note(IMPORTED, OUTSIDE, top)

    def listed(self, path: Any, caller: str, whole: bool) -> None:
        """Note a folder that the program lists. The run's copy may lack it, or some of its modules, such as plug-ins.

        Args:
            caller: file of the calling code; searches for a pattern have an event of their own.
            whole: listed by os.listdir, which code that copies trees does not use.
        """
        if isinstance(path, int):
            return
        folder = _place(path or ".")
        kind, inside = self.zone(folder)
        if kind == SKIP:
            return
        if kind != WORK:
            searches = kind == PROJECT and os.path.basename(caller) == "glob.py"
            if not searches and not self.is_own(folder) and os.path.isdir(folder):
                self.note(NAMES, kind, inside, lambda: self._names(folder))
        elif inside and not _exists(folder):
            self.note(FOLDER, WORK, inside + "/")
        elif inside and whole and _exists(os.path.join(folder, "__init__.py")):
            self.note(PACKAGE, WORK, inside + "/")

    def _names(self, folder: str) -> str:
        with self.unobserved:
            return digest_of_names(folder)

    def matched(self, pattern: str) -> None:
        """Note a search for names that match a pattern."""
        parts = os.path.normpath(_place(pattern)).split("/")
        at = next((at for at, part in enumerate(parts) if any(sign in part for sign in _MAGIC)), 0)
        folder = "/".join(parts[:at]) or "/"
        kind, inside = self.zone(folder)
        if kind not in (WORK, PROJECT) or not at:
            return
        if inside or "**" not in parts:  # a recursive search of the whole checkout would take long
            self.note(PATTERN, kind, os.path.join(inside, *parts[at:]))

    def started_with(self, values: Any, cwd: Any) -> None:
        """Note the files on the command line of a started program: it reads them, and has no hook."""
        base = _place(cwd or "")
        values = [values] if isinstance(values, (str, bytes)) or hasattr(values, "__fspath__") else values
        for value in values:
            text = _text(value)
            for word in {text, *(part.strip("'\"<>;|&()") for part in text.split())}:
                if word and not word.startswith("-"):
                    self.look(os.path.join(base, word.rpartition("=")[2] or word), WORD)

    def zone_of_reader(self, source: str) -> str:
        """Return the kind of zone of the source file that reads a variable; OUTSIDE for libraries and Paceline."""
        if _is_standard(source):
            return OUTSIDE
        kind, inside = self.zone(os.path.dirname(os.path.abspath(source)))
        return OUTSIDE if kind == SKIP or (inside + "/").startswith("trainers/") else kind

    def opened_as_text(self, path: str) -> None:
        """Note a source file of the run's copy that is opened other than by an import.

        Code that reads its own text sees comments, which the key does not include. Reads by libraries and by traceback
        modules do not count.
        """
        folder, name = os.path.split(path)
        kind, inside = self.zone(folder)
        file = _caller_outside_standard_library(sys._getframe(_ABOVE_METHOD), _SHOW_SOURCES)
        if not file or kind == SKIP:
            return
        kind_of_reader, of_reader = self.zone(os.path.dirname(os.path.abspath(file)))
        is_pacelines = kind_of_reader == WORK and (of_reader + "/").startswith("trainers/")
        if kind_of_reader != SKIP and not is_pacelines:
            self.note(TEXT, kind, os.path.join(inside, name))


def _is_standard(file: str) -> bool:
    return file.startswith((os.path.dirname(os.__file__) + "/", "<frozen ")) and "/site-packages/" not in file


def _caller_outside_standard_library(frame: Any, but: tuple[str, ...] = ()) -> str:
    """Return the file of the innermost frame outside of the standard library.

    '' if there is none, or if a module of the standard library in ``but`` is nearer.
    """
    while frame is not None and _is_standard(frame.f_code.co_filename):
        if os.path.basename(frame.f_code.co_filename) in but:
            return ""
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except OSError:
        return False
    return True


def _text(value: Any) -> str:
    return value if type(value) is str else os.fsdecode(value)


def _place(path: Any) -> str:
    """Return an absolute path."""
    return os.path.join(os.getcwd(), _text(path))


def hook_of(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """Return the audit hook. For a path that was seen before or is not observed, the hook only looks into a set."""
    seen: set[str] = set()
    skipped, busy, handlers = watch.skipped, watch.busy, _handlers(watch)

    def opened(path: Any, flags: int) -> None:
        if type(path) is not str:
            path = os.fsdecode(path)
        if path[:1] != "/":
            path = os.getcwd() + "/" + path
        if path.startswith(skipped) and "/../" not in path:
            return
        if not flags & (_CHANGES | getattr(os, "O_DIRECTORY", 0)):
            kind, _ = watch.zone(os.path.dirname(path))
            is_source = kind in (WORK, PROJECT) and path.endswith(".py")
            is_text = is_source and sys._getframe(_ABOVE_HANDLER).f_code.co_filename != _IMPORTING and _exists(path)
            if is_text:
                watch.opened_as_text(path)
            if is_text or not is_source:  # a source that was only imported may later be opened as text
                if len(seen) > _MOST_CACHED:
                    seen.clear()
                seen.add(path)
        watch.opened(path, flags)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        try:
            if event == "open":
                path, _, flags = args
                if path in seen and not flags & _CHANGES:
                    return
                if isinstance(path, int) or (busy and get_ident() in busy):
                    return
                opened(path, flags)
            elif event in handlers and (not busy or get_ident() not in busy):
                handlers[event](*args)
        except Exception:
            pass

    return hook


def _handlers(watch: Watch) -> dict[str, Callable[..., None]]:
    """Return the handlers of all events but "open", by the events' names."""

    def imported(module: str, filename: Any, *_: Any) -> None:
        if filename is not None:  # an extension module; source files raise "open"
            watch.look(_place(filename), "")
        watch.imports(module)
        if "torch.serialization" in sys.modules:
            watch_torch(watch)

    def started(executable: Any, words: Any, cwd: Any = None, *_: Any) -> None:
        is_list = not isinstance(words, (str, bytes)) and not hasattr(words, "__fspath__")
        program = _text(executable or (words[0] if is_list else words))
        kind = watch.zone(os.path.dirname(_place(program)))[0]
        if kind not in (OUTSIDE, SKIP):  # programs outside of the project belong to the host
            watch.started_with([program], cwd)
        if not os.path.basename(program).startswith("python"):  # a Python process has its own hook
            watch.started_with(words[1:] if is_list else words, cwd)

    def connected(database: Any) -> None:
        name = _text(database)
        name = name[5:].partition("?")[0] if name.startswith("file:") else name
        if name and name != ":memory:":
            watch.look(_place(name), WORD)
            watch.wrote(_place(name))

    def loaded(name: Any) -> None:
        if name is not None and "/" in _text(name):
            watch.look(_place(name), WORD)

    return {
        **_folder_handlers(watch),
        "import": imported,
        "subprocess.Popen": started,
        "os.posix_spawn": lambda path, words, *_: started(path, words),
        "os.exec": lambda path, words, *_: started(path, words),
        "os.system": lambda command: watch.started_with([command], None),
        "sqlite3.connect": connected,
        "ctypes.dlopen": loaded,
    }


def _folder_handlers(watch: Watch) -> dict[str, Callable[..., None]]:
    """Return the handlers of events that list, search, rename or create names in folders."""

    def listed(path: Any) -> None:
        caller = sys._getframe(_ABOVE_HANDLER).f_code.co_filename
        if caller != _IMPORTING and not any(part in caller for part in _METADATA):
            watch.listed(path, caller, whole=True)

    def scanned(path: Any) -> None:
        caller = sys._getframe(_ABOVE_HANDLER).f_code.co_filename
        if not os.path.basename(caller).startswith(("pathlib", "_local")):  # iterdir uses os.listdir
            watch.listed(path, caller, whole=False)

    def globbed(pattern: Any, recursive: bool, root: Any, folder: Any) -> None:
        if folder is None:
            watch.matched(os.path.join(_text(root or ""), _text(pattern)))

    def renamed(before: Any, path: Any, *folders: Any) -> None:
        if folders == (-1, -1):
            source, target = (_place(one) for one in (before, path))
            if not watch.is_own(source):
                watch.look(source, "")
            watch.wrote(target)

    def made(path: Any, _: Any = None, folder: Any = -1) -> None:
        place = _place(path)
        if folder == -1 and not _exists(place):
            real = os.path.realpath(place)
            if not real.startswith(watch.made):
                watch.made = (*watch.made[-_MOST_CACHED:], real + "/")
                kind, inside = watch.zone(os.path.dirname(real))
                if kind not in (WORK, SKIP):
                    watch.note(MADE, kind, os.path.join(inside, os.path.basename(real)))

    return {
        "os.listdir": listed,
        "os.scandir": scanned,
        "glob.glob/2": globbed,
        "pathlib.Path.glob": lambda path, pattern: watch.matched(os.path.join(str(path), pattern)),
        "pathlib.Path.rglob": lambda path, pattern: watch.matched(os.path.join(str(path), "**", pattern)),
        "os.rename": renamed,
        "os.mkdir": made,
    }


class Finder:
    """Entry of ``sys.meta_path`` that records the names of imported modules and finds none."""

    def __init__(self, see: Callable[[str, Any], None]) -> None:
        self._see = see

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Record the name."""
        try:
            self._see(name, path)
        except Exception:
            return


def watch_stat(watch: Watch) -> None:
    """Record checks for files by ``os.stat``: absent files, and existing files of the checkout.

    ``os.path.exists`` calls ``os.stat``, opens nothing and raises no audit event, but its result may change what the
    program computes.
    """
    known: set[Any] = set()

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        try:
            status = _stat(path, *args, **options)
        except FileNotFoundError:
            looked(path, options, NO_STAT)
            raise
        if type(path) is not int and path not in known:
            looked(path, options, THERE)
        return status

    def looked(path: Any, options: dict[str, Any], how: str) -> None:
        try:
            if path in known or options.get("dir_fd") is not None or get_ident() in watch.busy:
                return
            if len(known) > _MOST_CACHED:
                known.clear()
            known.add(path)
            place = _place(path)
            if how == NO_STAT:
                watch.look(place, NO_STAT)
                watch.own_look(place)
                return
            folder, name = os.path.split(place)
            kind, inside = watch.zone(folder)
            if kind != PROJECT or not {place, os.path.realpath(place)}.isdisjoint(watch.files):
                return
            if name and not watch.is_own(place):
                watch.note(THERE, PROJECT, os.path.join(inside, name))
        except Exception:
            known.clear()

    _replace("stat", stat)


def watch_open(watch: Watch) -> None:
    """Record ``os.open(name, dir_fd=…)``, whose audit event lacks the folder."""

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None or os.path.isabs(path):
            return _open(path, flags, mode, dir_fd=dir_fd)
        try:
            with watch.unobserved:
                place = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), _text(path))
            watch.opened(place, flags)
        except Exception:
            pass
        with watch.unobserved:
            return _open(path, flags, mode, dir_fd=dir_fd)

    _replace("open", opened)


def _replace(name: str, function: Any) -> None:
    """Replace a function of ``os``."""
    before = getattr(os, name)
    function.__module__, function.__name__, function.__qualname__ = "os", name, name
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if before in able:
            able.add(function)
    setattr(os, name, function)


def watch_variables(watch: Watch) -> None:
    """Record the variables that are read by name, and whether the program's own code reads them.

    A copy of the whole environment reads no variable.
    """
    environ: Any = type(os.environ)
    get, names_of = environ.__getitem__, environ.__iter__
    # dict(os.environ) asks for all names and then reads each in turn: reads in this order are those of a copy
    left_to_copy: list[str] = []
    known: set[Any] = set()
    reads: dict[Any, int] = {}

    def read(self: Any, name: Any) -> Any:
        if left_to_copy and left_to_copy[-1] == name:
            left_to_copy.pop()
            return get(self, name)
        reads[name] = count = reads.get(name, 0) + 1
        if count > _MOST_READS:
            return get(self, name)
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _OF_ENVIRON:  # get, os.getenv
            frame = frame.f_back
        source = "" if frame is None else frame.f_code.co_filename
        if (name, source) not in known:
            del left_to_copy[:]
            known.add((name, source))
            try:
                watch.note(VARIABLE, watch.zone_of_reader(source) if source else OUTSIDE, _text(name))
            except Exception:
                known.clear()
        return get(self, name)

    def names(self: Any) -> Iterator[Any]:
        variables = [*names_of(self)]
        left_to_copy[:] = variables[::-1]
        return iter(variables)

    environ.__getitem__, environ.__iter__ = read, names


def watch_torch(watch: Watch) -> None:
    """Record the files that ``torch.save`` writes in C++ by path, which raises no audit event."""
    writer: Any = getattr(sys.modules["torch.serialization"], "_open_zipfile_writer_file", None)
    if writer is None or hasattr(writer, "paceline"):
        return
    begin = writer.__init__

    def begun(self: Any, name: Any, *args: Any, **options: Any) -> None:
        try:
            watch.wrote(_place(name))
        except Exception:
            pass
        begin(self, name, *args, **options)

    writer.__init__, writer.paceline = begun, True


def leave_project(zones: Iterable[tuple[str, str]]) -> None:
    """Remove the project's folders from ``sys.path``.

    An editable install puts them there on one host and not on another, and a module that the snapshot lacks would be
    imported from them.
    """
    watch = Watch(zones, "")

    def stays(entry: str) -> bool:
        return not entry or watch.zone(os.path.realpath(entry))[0] in (WORK, OUTSIDE, SKIP)

    sys.path[:] = [entry for entry in sys.path if stays(entry)]
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in _owner(one).__module__]


def _owner(finder: Any) -> Any:
    return finder if isinstance(finder, type) else type(finder)


def chain(folder: str) -> None:
    """Run the installation's own sitecustomize, which the one in ``folder`` hides."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("site" + "customize")  # a computed name, so that it does not count as an import of this run
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


def compile_anew() -> None:
    """Compile modules of source trees from their sources on each import, without byte code files.

    Byte code identifies its source by size and time in seconds, so an edit within the same second would run the old
    code.
    """
    loader: Any = sys.modules["_frozen_importlib_external"].SourceFileLoader
    stats, standard = loader.path_stats, os.path.dirname(os.__file__) + "/"

    def path_stats(self: Any, path: str) -> Any:
        if path.startswith(standard) or "/site-packages/" in path or "/dist-packages/" in path:
            return stats(self, path)
        raise OSError(path)  # the loader then neither reads nor writes byte code

    loader.path_stats = path_stats


def start(zones: Iterable[tuple[str, str]], report: str) -> None:
    """Start to record. ``report`` is the folder of the notes."""
    watch = Watch(zones, report)
    sys.addaudithook(hook_of(watch))
    watch_stat(watch)
    watch_open(watch)
    watch_variables(watch)
    # first finder: importlib.import_module, which loads plug-ins, raises no audit event
    sys.meta_path.insert(0, Finder(lambda name, _: watch.imports(name)))
    # last finder: sees the modules that are missing for all others
    sys.meta_path.append(Finder(lambda name, path: watch.lacks_module(name, sys.path if path is None else path)))


def begin(*, folder: str, zones: list[tuple[str, str]], report: str, watches: bool, in_copy: bool) -> None:
    """Set up the observation at the start of a process.

    Args:
        folder: contains the sitecustomize that calls this.
        in_copy: the process works in a copy of the project, and must import nothing from the project itself.
    """
    if in_copy:
        leave_project(zones)
    compile_anew()
    if watches:
        start(zones, report)
    chain(folder)
