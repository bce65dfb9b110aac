"""Notes which files of a project a run opens although they aren't in its snapshot.

``trainers.script.seal`` writes this file, with a last line that calls ``begin``, as ``sitecustomize.py`` into a folder
that comes first on PYTHONPATH: so it runs in each Python process of the run before anything else. Standard library
only and Python >= 3.8, as a script may start another interpreter. Nothing here may raise: an exception of an audit
hook ends what the script was doing.

Source of the events: the table "Audit events" of Python's documentation. An event comes before the file is opened.
"""

# It runs at the start of each process: os.path is loaded by then, pathlib isn't.
# ruff: noqa: PTH109, PTH114, PTH118, PTH119, PTH120
from __future__ import annotations

import os
import stat
import sys
from _imp import extension_suffixes  # importlib.machinery, which names them, takes longer

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a small process longer than all of this
    from collections.abc import Callable, Iterable
    from typing import Any

WORK, PROJECT, ORIGIN, SKIP = "work", "project", "origin", "skip"
READ, ABSENT, ASKED, MODULE, WORD = "read", "absent", "asked", "module", "word"
FOLDER, PACKAGE, PATTERN = "folder", "package", "pattern"
_MAGIC = "*?["
_IMPORTING = "<frozen importlib._bootstrap_external>"
_stat = os.stat  # as it was: see watch_stat
_WRITES = os.O_TRUNC | os.O_CREAT | os.O_DIRECTORY


class Watch:
    """What is known in one process. ``zones``: (kind, real path of a folder), the innermost one counts."""

    def __init__(self, zones: Iterable[tuple[str, str]], report: str, since_ns: int) -> None:
        self.zones = sorted(
            ((folder.rstrip("/") or "/", kind) for kind, folder in zones), key=lambda zone: -len(zone[0])
        )
        self.skipped = tuple(folder + "/" for folder, kind in self.zones if kind == SKIP and not self._holds(folder))
        self.files = {folder for folder, kind in self.zones if kind == SKIP}  # data may be a file
        self.report, self.since_ns = report, since_ns
        self.noted: set[str] = set()
        self.folders: dict[str, tuple[str, str] | None] = {}

    def _holds(self, folder: str) -> bool:
        """Whether a zone that counts lies inside: its paths begin alike."""
        return any(other.startswith(folder + "/") for other, kind in self.zones if kind != SKIP)

    def zone(self, folder: str) -> tuple[str, str] | None:
        """(kind, path inside of it) of a folder; None where nobody looks."""
        if folder not in self.folders:
            self.folders[folder] = self._zone(os.path.realpath(folder))
        return self.folders[folder]

    def _zone(self, real: str) -> tuple[str, str] | None:
        for top, kind in self.zones:
            if real == top or real.startswith(top + "/"):
                return None if kind == SKIP else (kind, real[len(top) + 1 :])
        return None

    def look(self, path: str, missing: str, is_link: bool = False) -> None:
        """Note a file; ``missing`` is what to call it where the run's own copy of the project lacks it, or ''."""
        folder, name = os.path.split(path)
        if path in self.files or not name:
            return
        if os.path.basename(folder) == "__pycache__":
            folder, name = os.path.dirname(folder), name.split(".")[0] + ".py"
        found = self.zone(folder)
        if found is None:
            if not is_link and os.path.islink(path):
                self.look(os.path.realpath(path), missing, is_link=True)
            return
        kind, inside = found
        inside = inside + "/" + name if inside else name
        if kind == WORK:
            if missing and not _exists(os.path.join(folder, name)):
                self.note(missing, kind, inside)
            elif not is_link and os.path.islink(path):
                self.look(os.path.realpath(path), missing, is_link=True)
            return
        try:
            seen = _stat(os.path.join(folder, name))
        except OSError:
            if missing in (ABSENT, ASKED):
                self.note(missing, kind, inside)
            return
        if stat.S_ISREG(seen.st_mode) and seen.st_ctime_ns < self.since_ns:  # later: the run itself wrote it
            self.note(READ, kind, inside)

    def note(self, how: str, kind: str, inside: str) -> None:
        """Append a line to this process's file: opened each time, as a script may close what it didn't open."""
        line = f"{how} {kind} {inside!a}\n"
        if line in self.noted:
            return
        self.noted.add(line)
        file = os.open(os.path.join(self.report, str(os.getpid())), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def module(self, name: str, folders: Iterable[str]) -> None:
        """A module that no finder found in ``folders``: the checkout may have it."""
        last = name.rpartition(".")[2]
        ends = (".py", "/__init__.py", *extension_suffixes(), "/")
        for folder in folders:
            found = self.zone(folder or os.getcwd())
            if found is not None and found[0] in (WORK, PROJECT):
                for end in ends:
                    self.note(MODULE, found[0], os.path.join(found[1], last + end))

    def listed(self, path: Any, whole: bool) -> None:
        """The names in a folder are asked for. The copy may lack it, or modules of a package (plug-ins are found so);
        ``whole``: by os.listdir, which no copy of a tree uses."""
        if isinstance(path, int):
            return
        folder = os.path.join(os.getcwd(), _text(path or "."))
        found = self.zone(folder)
        if found is None or found[0] != WORK or not found[1]:
            return
        if not _exists(folder):
            self.note(FOLDER, WORK, found[1] + "/")
        elif whole and _exists(os.path.join(folder, "__init__.py")):
            self.note(PACKAGE, WORK, found[1] + "/")

    def matched(self, pattern: str) -> None:
        """The names that match a pattern are asked for."""
        parts = os.path.normpath(os.path.join(os.getcwd(), pattern)).split("/")
        at = next((at for at, part in enumerate(parts) if any(sign in part for sign in _MAGIC)), 0)
        folder = "/".join(parts[:at]) or "/"
        found = self.zone(folder)
        if found is None or found[0] not in (WORK, PROJECT) or not at:
            return
        if found[1] or "**" not in parts:  # of the whole checkout it takes long
            self.note(PATTERN, found[0], os.path.join(found[1], *parts[at:]))

    def words(self, values: Any, cwd: Any) -> None:
        """Files that the command line of a started program names: it reads them, and no hook is in it."""
        base = os.path.join(os.getcwd(), _text(cwd)) if cwd else os.getcwd()
        values = [values] if isinstance(values, (str, bytes)) or hasattr(values, "__fspath__") else values
        for value in values:
            text = _text(value)
            for word in {text, *(part.strip("'\"<>;|&()") for part in text.split())}:
                if word and not word.startswith("-"):
                    self.look(os.path.join(base, word.rpartition("=")[2] or word), WORD)


def _exists(path: str) -> bool:
    try:
        _stat(path)
    except OSError:
        return False
    return True


def _text(value: Any) -> str:
    return value if type(value) is str else os.fsdecode(value)


def hook_of(watch: Watch) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook. What is asked for again, or lies where nobody looks, costs a look into a set."""
    seen: set[str] = set()
    skipped = watch.skipped

    def hook(event: str, args: tuple[Any, ...]) -> None:
        try:
            if event == "open":
                path, _, flags = args
                if path in seen or isinstance(path, int) or flags & 3 == os.O_WRONLY or flags & _WRITES:
                    return
                if type(path) is not str:
                    path = os.fsdecode(path)
                if path[:1] != "/":
                    path = os.getcwd() + "/" + path
                if path in seen or (path.startswith(skipped) and "/../" not in path):
                    return
                if watch.zone(os.path.dirname(path)) is not None:
                    watch.look(path, ABSENT)
                    seen.add(path)
                elif os.path.islink(path):
                    watch.look(path, "")
            elif event in others:
                others[event](*args)
        except Exception:
            pass

    others = _others(watch)
    return hook


def _others(watch: Watch) -> dict[str, Callable[..., None]]:
    def imported(module: str, filename: Any, *_: Any) -> None:
        if filename is not None:  # a compiled one; sources come by "open"
            watch.look(os.path.join(os.getcwd(), _text(filename)), "")

    def started(executable: Any, words: Any, cwd: Any = None, *_: Any) -> None:
        program = _text(executable or words[0])
        watch.words([program], cwd)
        if not os.path.basename(program).startswith("python"):  # that one has this hook too
            watch.words(words, cwd)

    def connected(database: Any) -> None:
        name = _text(database)
        name = name[5:].partition("?")[0] if name.startswith("file:") else name
        watch.look(os.path.join(os.getcwd(), name), WORD)

    def loaded(name: Any) -> None:
        if name is not None and "/" in _text(name):
            watch.look(os.path.join(os.getcwd(), _text(name)), WORD)

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
    """Events of who asks for names in folders."""

    def listed(path: Any) -> None:
        if sys._getframe(2).f_code.co_filename != _IMPORTING:
            watch.listed(path, whole=True)

    def globbed(pattern: Any, recursive: bool, root: Any, folder: Any) -> None:
        if folder is None:
            watch.matched(os.path.join(_text(root or ""), _text(pattern)))

    return {
        "os.listdir": listed,
        "os.scandir": lambda path: watch.listed(path, whole=False),
        "glob.glob/2": globbed,
        "pathlib.Path.glob": lambda path, pattern: watch.matched(os.path.join(str(path), pattern)),
        "pathlib.Path.rglob": lambda path, pattern: watch.matched(os.path.join(str(path), "**", pattern)),
    }


class LastFinder:
    """The last of ``sys.meta_path``: it is asked for modules that are nowhere, however they are imported."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Finds nothing."""
        try:
            self._watch.module(name, sys.path if path is None else path)
        except Exception:
            return


def watch_stat(watch: Watch) -> None:
    """``os.path.exists`` opens nothing and raises no event; a script that goes on without a file that the checkout has
    would come to other results. So ``os.stat``, which it calls, notes what isn't there."""
    missed: set[Any] = set()

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        try:
            return _stat(path, *args, **options)
        except FileNotFoundError:
            try:
                if path not in missed and options.get("dir_fd") is None:
                    missed.add(path)
                    watch.look(os.path.join(os.getcwd(), _text(path)), ASKED)
            except Exception:
                missed.clear()
            raise

    stat.__module__, stat.__qualname__ = "os", "stat"
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if _stat in able:
            able.add(stat)
    os.stat = stat


def leave_project(zones: Iterable[tuple[str, str]]) -> None:
    """Take the project's folders from ``sys.path``: an editable install puts them there, on one host and not on
    another, and what the snapshot lacks would come from them."""
    watch = Watch(zones, "", 0)

    def stays(entry: str) -> bool:
        found = watch.zone(os.path.realpath(entry)) if entry else None
        return found is None or found[0] == WORK

    sys.path[:] = [entry for entry in sys.path if stays(entry)]
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in _owner(one).__module__]


def _owner(finder: Any) -> Any:
    return finder if isinstance(finder, type) else type(finder)


def chain(folder: str) -> None:
    """Run the installation's own sitecustomize, which the one in ``folder`` hides."""
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("site" + "customize")  # not by its name: it would count as an import of this run
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


def begin(
    folder: str,
    zones: list[tuple[str, str]],
    report: str,
    since_ns: int,
    watches: bool,
) -> None:
    """What a process does first: see the functions above. ``folder`` holds the sitecustomize that calls this."""
    leave_project(zones)
    if watches:
        watch = Watch(zones, report, since_ns)
        sys.addaudithook(hook_of(watch))
        watch_stat(watch)
        sys.meta_path.append(LastFinder(watch))
    chain(folder)
