"""The writer of one process's notes: it decides which accesses count, and appends a line for each to the process's
file.

A file is hashed when it is first opened, so that a later edit of it is detected."""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH100, PTH109, PTH112, PTH114, PTH118, PTH119, PTH120
from __future__ import annotations

import os
import stat
import sys
from _imp import extension_suffixes  # importlib.machinery has a public name for it and is slower to import
from _thread import get_ident
from time import monotonic_ns

from . import (
    ARGUMENT_MISSING,
    EXISTS,
    FOLDER_LISTED,
    FOLDER_MISSING,
    HASHED_BYTES,
    IMPORTED,
    MADE_FOLDER,
    MODULE_MISSING,
    OPEN_FAILED,
    ORIGIN,
    OUTSIDE,
    OWN_PATTERN_EMPTY,
    OWN_STAT_FAILED,
    PACKAGE_LISTED,
    PATTERN_SEARCHED,
    PROJECT,
    READ,
    SKIP,
    STAT_FAILED,
    TEXT,
    VARIABLE,
    WORK,
    WRITTEN,
    digest_of,
    digest_of_names,
    original_open,
    original_stat,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would take longer than this whole module
    from collections.abc import Callable, Iterable
    from typing import Any

MOST_CACHED = 20_000  # largest number of paths in each set and cache of the observer
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC  # flags of an open that may change the file
IMPORT_SYSTEM = "<frozen importlib._bootstrap_external>"

_ALL_HASHED_BYTES = 512 << 20  # total of one process; later files are identified by size and modification time, too
_MOST_NOTES = 20_000  # of one process
_MOST_MISSING_OUTSIDE = 1000  # of these, notes of missing files outside of the project
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_PATTERN_SIGNS = "*?["
_READERS_FOR_DISPLAY = ("traceback.py", "warnings.py", "runpy.py", "<frozen runpy>")  # they show or run a source
_STANDARD_MODULES = frozenset(getattr(sys, "stdlib_module_names", ()))
_OBSERVED_CODE = 3
"""Depth of the observed code's frame for ``sys._getframe`` in a method of Watch, which a handler of the audit hook (or
a function called by a replacement) calls."""


class Unobserved:
    """Context in which this thread's own operations are not noted."""

    def __init__(self, threads: set[int]) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._threads.add(get_ident())

    def __exit__(self, *_: Any) -> None:
        self._threads.discard(get_ident())


class Watch:
    """Notes the accesses of this process. Paths that are passed to its methods are absolute."""

    def __init__(self, zones: Iterable[tuple[str, str]], notes: str) -> None:
        """``zones``: (zone, real path of a folder), of which the innermost counts; ``notes``: folder for the notes."""
        self.zones = sorted(
            ((folder.rstrip("/") or "/", zone) for zone, folder in zones), key=lambda entry: -len(entry[0])
        )
        # prefixes that are skipped without a further look: no observed zone lies inside
        self.skipped = tuple(
            folder + "/"
            for folder, zone in self.zones
            if zone == SKIP and not any(path.startswith(folder + "/") for path, other in self.zones if other != SKIP)
        )
        self.skipped_files = {path for path, zone in self.zones if zone == SKIP}  # a data set may be a single file
        self.notes = notes
        self.noted: set[str] = set()
        self.written: set[str] = set()  # real paths that this process opened for writing
        self.made: tuple[str, ...] = ()  # folders that it made, with a slash at their end
        self.unobserved_threads: set[int] = set()
        self.unobserved = Unobserved(self.unobserved_threads)
        self._location_of: dict[str, tuple[str, str]] = {}
        self._hashed_bytes = 0
        self._missing_outside = 0
        self._imported: set[str] = set()  # top-level names

    def locate(self, folder: str) -> tuple[str, str]:
        """Return the zone of a folder, and its path inside the zone (outside of all zones: its real path)."""
        if folder not in self._location_of:
            if len(self._location_of) > MOST_CACHED:
                self._location_of.clear()
            real = os.path.realpath(folder)
            tops = ((zone, top) for top, zone in self.zones if real == top or real.startswith(top + "/"))
            zone, top = next(tops, (OUTSIDE, ""))
            self._location_of[folder] = zone, real[len(top) + 1 :] if top else real
        return self._location_of[folder]

    def note(self, access: str, zone: str, inside: str, digest: Callable[[], str] | None = None) -> None:
        """Append a line to this process's notes, once. ``inside``: path inside the zone, or a name."""
        key = access + " " + zone + " " + inside
        if key in self.noted or len(self.noted) >= _MOST_NOTES:
            return
        self.noted.add(key)
        at_ns = monotonic_ns()  # all processes of a host share this clock
        line = f"{at_ns} {access} {zone} {digest() if digest else '-'} {inside!a}\n"
        # open the file for each line: a script may close descriptors that it did not open
        with self.unobserved:
            path = os.path.join(self.notes, str(os.getpid()))
            file = original_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)

    # Files.

    def file_opened(self, path: str, flags: int) -> None:
        if flags & CHANGES:
            self.file_written(path, is_read_too=not flags & os.O_TRUNC and flags & 3 != os.O_WRONLY)
        elif not flags & _DIRECTORY:
            self.file_read(path, OPEN_FAILED)

    def file_read(self, path: str, if_missing: str = "", is_link_target: bool = False) -> None:
        """Note a file that is read. ``if_missing``: the access to note if there is no such file."""
        folder, name = os.path.split(path)
        if path in self.skipped_files or not name or os.path.basename(folder) == "__pycache__":
            return
        zone, inside = self.locate(folder)
        # a link counts as its target, unless both link and target lie outside of the project
        if not is_link_target and zone in (WORK, OUTSIDE, SKIP) and os.path.islink(path):
            target = os.path.realpath(path)
            zone_of_target, _ = self.locate(os.path.dirname(target))
            if zone != OUTSIDE or zone_of_target not in (OUTSIDE, SKIP):
                self.file_read(target, if_missing, is_link_target=True)
                return
        if zone == SKIP:
            return
        inside = os.path.join(inside, name)
        if zone == WORK:  # its files are those of the key, so only missing ones matter
            if if_missing and not exists(path):
                self.note(if_missing, zone, inside)
            return
        try:
            state = original_stat(path)
        except OSError:
            if if_missing in (OPEN_FAILED, STAT_FAILED):
                if zone == OUTSIDE and self._missing_outside >= _MOST_MISSING_OUTSIDE:
                    return
                self._missing_outside += zone == OUTSIDE
                self.note(if_missing, zone, inside)
            return
        if stat.S_ISREG(state.st_mode) and not self.is_own(path):
            self.note(READ, zone, inside, lambda: self._digest(path, state.st_size))

    def _digest(self, path: str, size_bytes: int) -> str:
        """Return ``digest_of`` the file as it is now, within the limit of bytes that a process hashes."""
        self._hashed_bytes += size_bytes if size_bytes <= HASHED_BYTES else 0
        with self.unobserved:
            return digest_of(path, as_stamp=self._hashed_bytes > _ALL_HASHED_BYTES)

    def source_opened_as_text(self, path: str) -> None:
        """Note a source that a program's code reads as text, with its comments, which the key does not include."""
        folder, name = os.path.split(path)
        zone, inside = self.locate(folder)
        reader = _caller_outside_standard_library(sys._getframe(_OBSERVED_CODE), _READERS_FOR_DISPLAY)
        if not reader or zone == SKIP:
            return
        zone_of_reader, reader_inside = self.locate(os.path.dirname(os.path.abspath(reader)))
        is_pacelines = zone_of_reader == WORK and (reader_inside + "/").startswith("trainers/")
        if zone_of_reader != SKIP and not is_pacelines:
            self.note(TEXT, zone, os.path.join(inside, name))

    def file_written(self, path: str, is_read_too: bool = False) -> None:
        """Note a file that this process opens for writing; ``is_read_too``: its content so far counts as read."""
        folder, name = os.path.split(path)
        zone, inside = self.locate(folder)
        real = os.path.join(os.path.realpath(folder), name)
        if zone == SKIP or real in self.written:
            return
        if is_read_too and exists(path):
            self.file_read(path)
        if len(self.written) < MOST_CACHED:
            self.written.add(real)
        inside = os.path.join(inside, name)
        # in the copy, only a file that was looked for before: it is no input then
        was_missing = not self.noted.isdisjoint(f"{access} {WORK} {inside}" for access in (OPEN_FAILED, STAT_FAILED))
        if zone != WORK or was_missing:
            self.note(WRITTEN, zone, inside)

    def folder_made(self, path: str) -> None:
        """Note a folder that this process creates now; in the copy it is only remembered as the process's own."""
        real = os.path.realpath(path)
        if real.startswith(self.made):
            return
        self.made = (*self.made[-MOST_CACHED:], real + "/")
        zone, inside = self.locate(os.path.dirname(real))
        if zone not in (WORK, SKIP):
            self.note(MADE_FOLDER, zone, os.path.join(inside, os.path.basename(real)))

    def is_own(self, path: str) -> bool:
        """Return True for a file that this process has written, or that lies in a folder which it made."""
        if not self.written and not self.made:
            return False
        real = os.path.realpath(path)
        return real in self.written or real.startswith(self.made)

    def stat_failed(self, path: str) -> None:
        """Note a file that ``os.stat`` did not find, and whether the program's own code looked for it."""
        self.file_read(path, STAT_FAILED)
        folder, name = os.path.split(path)
        zone, inside = self.locate(folder)
        if zone == WORK and self.is_own_code(sys._getframe(_OBSERVED_CODE)):
            self.note(OWN_STAT_FAILED, WORK, os.path.join(inside, name))

    def is_own_code(self, frame: Any) -> bool:
        """Return whether the program's own code calls the standard library here, and not a library that it uses."""
        caller = _caller_outside_standard_library(frame)
        return bool(caller) and self.zone_of_code(caller) in (WORK, ORIGIN)

    def stat_succeeded(self, path: str) -> None:
        """Note an existing file of the checkout that ``os.stat`` found."""
        folder, name = os.path.split(path)
        zone, inside = self.locate(folder)
        if zone != PROJECT or not {path, os.path.realpath(path)}.isdisjoint(self.skipped_files):
            return
        if name and not self.is_own(path):
            self.note(EXISTS, PROJECT, os.path.join(inside, name))

    def program_started(self, words: Any, cwd: Any) -> None:
        """Note the files on the command line of a started program: it reads them, and has no hook."""
        folder = absolute(cwd or "")
        words = [words] if isinstance(words, (str, bytes)) or hasattr(words, "__fspath__") else words
        for value in words:
            word = as_text(value)
            for part in {word, *(part.strip("'\"<>;|&()") for part in word.split())}:
                if part and not part.startswith("-"):
                    self.file_read(os.path.join(folder, part.rpartition("=")[2] or part), ARGUMENT_MISSING)

    # Names in folders.

    def folder_listed(self, path: Any, caller: str, all_names: bool) -> None:
        """Note a listed folder. ``caller``: the source file; ``all_names``: by os.listdir, else by os.scandir."""
        if isinstance(path, int):
            return
        folder = absolute(path or ".")
        zone, inside = self.locate(folder)
        if zone == SKIP:
            return
        if zone != WORK:
            is_search = zone == PROJECT and os.path.basename(caller) == "glob.py"
            if not is_search and not self.is_own(folder) and os.path.isdir(folder):
                self.note(FOLDER_LISTED, zone, inside, lambda: self._digest_of_names(folder))
        elif inside and not exists(folder):
            self.note(FOLDER_MISSING, WORK, inside + "/")
        elif inside and all_names and exists(os.path.join(folder, "__init__.py")):
            self.note(PACKAGE_LISTED, WORK, inside + "/")

    def _digest_of_names(self, folder: str) -> str:
        with self.unobserved:
            return digest_of_names(folder)

    def pattern_searched(self, pattern: str) -> None:
        """Note a search for names that match a pattern, which may be relative to the working directory."""
        parts = os.path.normpath(absolute(pattern)).split("/")
        begin = next((at for at, part in enumerate(parts) if any(sign in part for sign in _PATTERN_SIGNS)), 0)
        zone, inside = self.locate("/".join(parts[:begin]) or "/")
        if zone not in (WORK, PROJECT) or not begin:
            return
        if not inside and "**" in parts:  # a recursive search of the whole checkout would take long
            return
        below = os.path.join(inside, *parts[begin:])
        is_first = f"{PATTERN_SEARCHED} {zone} {below}" not in self.noted
        self.note(PATTERN_SEARCHED, zone, below)
        # a program that looks for its newest checkpoint finds none at first
        if is_first and zone == WORK and self.is_own_code(sys._getframe(_OBSERVED_CODE)):
            with self.unobserved:
                import glob  # not at the start of each process, most of which search nothing

                is_empty = next(glob.iglob("/".join(parts), recursive=True), None) is None  # noqa: PTH207  (no pathlib)
            if is_empty:
                self.note(OWN_PATTERN_EMPTY, WORK, below)

    # Modules and variables.

    def module_imported(self, module: str) -> None:
        """Note the top-level name of an imported module; of a namespace, which packages share, also the next name."""
        name, dot, below = module.partition(".")
        if name in _STANDARD_MODULES:
            return
        if dot and getattr(sys.modules.get(name), "__file__", None) is None:
            name += "." + below.partition(".")[0]
        if name not in self._imported:
            self._imported.add(name)
            self.note(IMPORTED, OUTSIDE, name)

    def module_missing(self, module: str, folders: Iterable[str]) -> None:
        """Note a module that ``folders`` lack; the checkout may have it."""
        name = module.rpartition(".")[2]
        endings = (".py", "/__init__.py", *extension_suffixes(), "/")
        for folder in folders:
            zone, inside = self.locate(folder or os.getcwd())
            if zone in (WORK, PROJECT):
                for ending in endings:
                    self.note(MODULE_MISSING, zone, os.path.join(inside, name + ending))

    def variable_read(self, name: Any, source: str) -> None:
        self.note(VARIABLE, self.zone_of_code(source) if source else OUTSIDE, as_text(name))

    def zone_of_code(self, source: str) -> str:
        """Return the zone of a source file; OUTSIDE for libraries and Paceline's own code."""
        if _is_standard(source):
            return OUTSIDE
        zone, inside = self.locate(os.path.dirname(os.path.abspath(source)))
        return OUTSIDE if zone == SKIP or (inside + "/").startswith("trainers/") else zone


def _is_standard(source: str) -> bool:
    return source.startswith((os.path.dirname(os.__file__) + "/", "<frozen ")) and "/site-packages/" not in source


def _caller_outside_standard_library(frame: Any, excluded: tuple[str, ...] = ()) -> str:
    """Return the innermost source file outside of the standard library; '' if an ``excluded`` module is nearer."""
    while frame is not None and _is_standard(frame.f_code.co_filename):
        if os.path.basename(frame.f_code.co_filename) in excluded:
            return ""
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else ""


def exists(path: str) -> bool:
    """Return whether there is such a file or folder; not noted as an access."""
    try:
        original_stat(path)
    except OSError:
        return False
    return True


def as_text(value: Any) -> str:
    """Return a word or path as text, which Python allows to be bytes or a path object."""
    return value if type(value) is str else os.fsdecode(value)


def absolute(path: Any) -> str:
    return os.path.join(os.getcwd(), as_text(path))
