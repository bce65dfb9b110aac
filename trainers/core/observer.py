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

WORK, PROJECT, ORIGIN, OUTSIDE, SKIP = "work", "project", "origin", "outside", "skip"
# ABSENT: an open of a file that isn't there; NO_STAT: an os.stat of one, which opens nothing (os.path.exists);
# OWN_STAT: the same by the program's own code, besides NO_STAT; libraries also look for files that they will write
READ, TEXT, WRITTEN, MADE, THERE, ABSENT = "read", "text", "written", "made", "there", "absent"
NO_STAT, OWN_STAT = "no-stat", "own-stat"
MODULE, WORD, FOLDER, PACKAGE, PATTERN, NAMES = "module", "word", "folder", "package", "pattern", "names"
VARIABLE, IMPORTED = "variable", "imported"
HASHED_BYTES = 64 << 20  # a larger file is identified by size and modification time
_ALL_HASHED_BYTES = 512 << 20  # total per process; later files are identified by size and modification time, too
_MOST = 20_000  # largest number of notes of one process
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
        self.folders: dict[str, tuple[str, str] | None] = {}
        self.busy: set[int] = set()  # threads whose events are this module's own
        self.unobserved = Unobserved(self.busy)
        self.hashed_bytes = 0
        self.absent_outside = 0
        self.tops: set[str] = set()  # names of modules

    def _holds(self, folder: str) -> bool:
        """Return True if a recorded zone lies inside ``folder``."""
        return any(other.startswith(folder + "/") for other, kind in self.zones if kind != SKIP)

    def zone(self, folder: str) -> tuple[str, str] | None:
        """Return (kind, path inside the zone) of a folder; None if it is not observed."""
        if folder not in self.folders:
            if len(self.folders) > _MOST:
                self.folders.clear()
            self.folders[folder] = self._zone(os.path.realpath(folder))
        return self.folders[folder]

    def _zone(self, real: str) -> tuple[str, str] | None:
        for top, kind in self.zones:
            if real == top or real.startswith(top + "/"):
                return None if kind == SKIP else (kind, real[len(top) + 1 :])
        return OUTSIDE, real

    def look(self, path: str, missing: str, is_link: bool = False) -> None:
        """Note a file that is read.

        Args:
            missing: kind of note if the run's copy of the project lacks the file; '' for none.
        """
        folder, name = os.path.split(path)
        if path in self.files or not name or os.path.basename(folder) == "__pycache__":
            return
        zone = self.zone(folder)
        # a link counts as its target, unless both link and target lie outside of the project
        if not is_link and (zone is None or zone[0] in (WORK, OUTSIDE)) and os.path.islink(path):
            real = os.path.realpath(path)
            at = self.zone(os.path.dirname(real))
            if zone is None or zone[0] == WORK or (at is not None and at[0] != OUTSIDE):
                self.look(real, missing, is_link=True)
                return
        if zone is None:
            return
        kind, inside = zone
        inside = inside + "/" + name if inside else name
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
        zone, file = self.zone(os.path.dirname(path)), _caller_outside_standard_library(sys._getframe(3))
        if zone is not None and zone[0] == WORK and file and self.reader(file) in (WORK, ORIGIN):
            self.note(OWN_STAT, WORK, os.path.join(zone[1], os.path.basename(path)))

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
        zone = self.zone(folder)
        real = os.path.join(os.path.realpath(folder), name)
        if zone is None or real in self.written:
            return
        if keeps and _exists(path):
            self.look(path, "")
        if len(self.written) < _MOST:
            self.written.add(real)
        inside = zone[1] + "/" + name if zone[1] else name
        if zone[0] != WORK or not self.noted.isdisjoint(f"{how} {WORK} {inside}" for how in (ABSENT, NO_STAT)):
            self.note(WRITTEN, zone[0], inside)

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

    def module(self, name: str, folders: Iterable[str]) -> None:
        """Note a module that ``folders`` lack; the checkout may have it."""
        last = name.rpartition(".")[2]
        ends = (".py", "/__init__.py", *extension_suffixes(), "/")
        for folder in folders:
            zone = self.zone(folder or os.getcwd())
            if zone is not None and zone[0] in (WORK, PROJECT):
                for end in ends:
                    self.note(MODULE, zone[0], os.path.join(zone[1], last + end))

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
        zone = self.zone(folder)
        if zone is None:
            return
        if zone[0] != WORK:
            searches = zone[0] == PROJECT and os.path.basename(caller) == "glob.py"
            if not searches and not self.is_own(folder) and os.path.isdir(folder):
                self.note(NAMES, zone[0], zone[1], lambda: self._names(folder))
        elif zone[1] and not _exists(folder):
            self.note(FOLDER, WORK, zone[1] + "/")
        elif zone[1] and whole and _exists(os.path.join(folder, "__init__.py")):
            self.note(PACKAGE, WORK, zone[1] + "/")

    def _names(self, folder: str) -> str:
        with self.unobserved:
            return digest_of_names(folder)

    def matched(self, pattern: str) -> None:
        """Note a search for names that match a pattern."""
        parts = os.path.normpath(_place(pattern)).split("/")
        at = next((at for at, part in enumerate(parts) if any(sign in part for sign in _MAGIC)), 0)
        folder = "/".join(parts[:at]) or "/"
        zone = self.zone(folder)
        if zone is None or zone[0] not in (WORK, PROJECT) or not at:
            return
        if zone[1] or "**" not in parts:  # a recursive search of the whole checkout would take long
            self.note(PATTERN, zone[0], os.path.join(zone[1], *parts[at:]))

    def words(self, values: Any, cwd: Any) -> None:
        """Note the files on the command line of a started program: it reads them, and has no hook."""
        base = _place(cwd or "")
        values = [values] if isinstance(values, (str, bytes)) or hasattr(values, "__fspath__") else values
        for value in values:
            text = _text(value)
            for word in {text, *(part.strip("'\"<>;|&()") for part in text.split())}:
                if word and not word.startswith("-"):
                    self.look(os.path.join(base, word.rpartition("=")[2] or word), WORD)

    def reader(self, source: str) -> str:
        """Return the kind of zone of the source file that reads a variable; OUTSIDE for libraries and Paceline."""
        if _is_standard(source):
            return OUTSIDE
        zone = self.zone(os.path.dirname(os.path.abspath(source)))
        return OUTSIDE if zone is None or (zone[1] + "/").startswith("trainers/") else zone[0]

    def source(self, path: str) -> None:
        """Note a source file of the run's copy that is opened other than by an import.

        Code that reads its own text sees comments, which the key does not include. Reads by libraries and by traceback
        modules do not count.
        """
        zone, file = self.zone(os.path.dirname(path)), _caller_outside_standard_library(sys._getframe(3), _SHOW_SOURCES)
        if not file or zone is None:
            return
        who = self.zone(os.path.dirname(os.path.abspath(file)))
        if who is not None and not (who[0] == WORK and (who[1] + "/").startswith("trainers/")):
            self.note(TEXT, zone[0], os.path.join(zone[1], os.path.basename(path)))


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
    skipped, busy = watch.skipped, watch.busy

    def opened(path: Any, flags: int) -> None:
        if type(path) is not str:
            path = os.fsdecode(path)
        if path[:1] != "/":
            path = os.getcwd() + "/" + path
        if path.startswith(skipped) and "/../" not in path:
            return
        if not flags & (_CHANGES | getattr(os, "O_DIRECTORY", 0)):
            zone = watch.zone(os.path.dirname(path))
            is_source = zone is not None and zone[0] in (WORK, PROJECT) and path.endswith(".py")
            is_text = is_source and sys._getframe(2).f_code.co_filename != _IMPORTING and _exists(path)
            if is_text:
                watch.source(path)
            if is_text or not is_source:  # a source that was only imported may later be opened as text
                if len(seen) > _MOST:
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
            elif event in others and (not busy or get_ident() not in busy):
                others[event](*args)
        except Exception:
            pass

    others = _others(watch)
    return hook


def _others(watch: Watch) -> dict[str, Callable[..., None]]:
    def imported(module: str, filename: Any, *_: Any) -> None:
        if filename is not None:  # an extension module; source files raise "open"
            watch.look(_place(filename), "")
        watch.imports(module)
        if "torch.serialization" in sys.modules:
            watch_torch(watch)

    def started(executable: Any, words: Any, cwd: Any = None, *_: Any) -> None:
        is_list = not isinstance(words, (str, bytes)) and not hasattr(words, "__fspath__")
        program = _text(executable or (words[0] if is_list else words))
        at = watch.zone(os.path.dirname(_place(program)))
        if at is not None and at[0] != OUTSIDE:  # programs outside of the project belong to the host
            watch.words([program], cwd)
        if not os.path.basename(program).startswith("python"):  # a Python process has its own hook
            watch.words(words[1:] if is_list else words, cwd)

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
        **_of_names(watch),
        "import": imported,
        "subprocess.Popen": started,
        "os.posix_spawn": lambda path, words, *_: started(path, words),
        "os.exec": lambda path, words, *_: started(path, words),
        "os.system": lambda command: watch.words([command], None),
        "sqlite3.connect": connected,
        "ctypes.dlopen": loaded,
    }


def _of_names(watch: Watch) -> dict[str, Callable[..., None]]:
    """Return the handlers of events that list, search, rename or create names in folders."""

    def listed(path: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename
        if caller != _IMPORTING and not any(part in caller for part in _METADATA):
            watch.listed(path, caller, whole=True)

    def scanned(path: Any) -> None:
        caller = sys._getframe(2).f_code.co_filename
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
            if not real.startswith(watch.made) or not watch.made:
                watch.made = (*watch.made[-_MOST:], real + "/")
                zone = watch.zone(os.path.dirname(real))
                if zone is not None and zone[0] != WORK:
                    watch.note(MADE, zone[0], os.path.join(zone[1], os.path.basename(real)))

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
            if len(known) > _MOST:
                known.clear()
            known.add(path)
            place = _place(path)
            if how == NO_STAT:
                watch.look(place, NO_STAT)
                watch.own_look(place)
                return
            zone = watch.zone(os.path.dirname(place))
            if zone is None or zone[0] != PROJECT or not {place, os.path.realpath(place)}.isdisjoint(watch.files):
                return
            if os.path.basename(place) and not watch.is_own(place):
                watch.note(THERE, PROJECT, os.path.join(zone[1], os.path.basename(place)))
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
    copied: list[str] = []
    known: set[Any] = set()
    reads: dict[Any, int] = {}

    def read(self: Any, name: Any) -> Any:
        if copied and copied[-1] == name:
            copied.pop()
            return get(self, name)
        reads[name] = count = reads.get(name, 0) + 1
        if count > _MOST_READS:
            return get(self, name)
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _OF_ENVIRON:  # get, os.getenv
            frame = frame.f_back
        source = "" if frame is None else frame.f_code.co_filename
        if (name, source) not in known:
            del copied[:]
            known.add((name, source))
            try:
                watch.note(VARIABLE, watch.reader(source) if source else OUTSIDE, _text(name))
            except Exception:
                known.clear()
        return get(self, name)

    def names(self: Any) -> Iterator[Any]:
        variables = [*names_of(self)]
        copied[:] = variables[::-1]
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
        zone = watch.zone(os.path.realpath(entry)) if entry else None
        return zone is None or zone[0] in (WORK, OUTSIDE)

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


def watch(zones: Iterable[tuple[str, str]], report: str) -> None:
    """Start to record. ``report`` is the folder of the notes."""
    watcher = Watch(zones, report)
    sys.addaudithook(hook_of(watcher))
    watch_stat(watcher)
    watch_open(watcher)
    watch_variables(watcher)
    # first finder: importlib.import_module, which loads plug-ins, raises no audit event
    sys.meta_path.insert(0, Finder(lambda name, _: watcher.imports(name)))
    # last finder: sees the modules that are missing for all others
    sys.meta_path.append(Finder(lambda name, path: watcher.module(name, sys.path if path is None else path)))


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
        watch(zones, report)
    chain(folder)
