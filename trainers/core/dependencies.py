"""The inputs of a run, step or data set that its key does not include, from the notes of its processes (``observer``).

Standard library only, as the controller reads them, too.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import itertools
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainers.contract import run_folder
from trainers.core import observer
from trainers.core.observer import (
    ABSENT,
    FOLDER,
    IMPORTED,
    MADE,
    MODULE,
    NAMES,
    NO_STAT,
    ORIGIN,
    OUTSIDE,
    OWN_STAT,
    PACKAGE,
    PATTERN,
    PROJECT,
    READ,
    TEXT,
    THERE,
    VARIABLE,
    WORD,
    WORK,
    WRITTEN,
)  # fmt: skip

NOTES = "seen"
"""Folder of an attempt for the notes of its processes."""
COPIED = f"{run_folder.SCRIPT_OUTSIDE}/"
"""Folder of the run's copy for the files of a script that lies outside of the project."""
_RECORDS = (".git", ".hg")  # a folder or, in a worktree, a file that names the folder
_NAMES_SECRET = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_PACELINE = {"trainers", "pipeline", "paceline"}  # the key includes their sources
_SETTLED_NS = 2_500_000_000  # a younger file may be edited without a change of its times and size


class Note(NamedTuple):
    """A line of a process's notes; ``observer`` defines the values of ``how`` and ``kind``."""

    at_ns: int
    how: str
    kind: str
    digest: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of one attempt on this host."""

    run_dir: Path  # nothing in it but ``work`` is looked at
    snapshot: Path  # the files that the key holds
    work: Path  # the copy in which the program runs; the snapshot itself for the built-in trainer
    data: tuple[str, ...] = ()  # what {data}, {data2}, … stand for
    project: Path | None = None  # the checkout, where it lies on this host
    origin: Path | None = None  # the folder of a script that lies outside of the project, where it lies on this host
    whole: Sequence[str] = ()  # patterns of files that count byte for byte, relative to the project or to ``folder``
    folder: str = ""  # the script's own, in the copy


@dataclass(frozen=True)
class Unkeyed:
    """A file by its path in the project that the key lacks; ``was_read``, or else was looked for in vain."""

    path: str
    was_read: bool


def as_json(unkeyed: Iterable[Unkeyed]) -> dict[str, str]:
    """Return path → "read" or "looked for", for summary.json."""
    return {item.path: "read" if item.was_read else "looked for" for item in unkeyed}


class Seen:
    """All notes in a folder, except those of files that the processes themselves wrote before."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self.notes = [*_of_others(sorted(note for path in folder.iterdir() for note in _parsed(path)))]

    def of(self, *hows: str, kinds: Collection[str] = ()) -> Iterator[Note]:
        """Return the notes of these kinds of access."""
        return (note for note in self.notes if note.how in hows and (not kinds or note.kind in kinds))

    @property
    def variables(self) -> list[str]:
        """The variables that were read by name, sorted."""
        return sorted({note.path for note in self.of(VARIABLE)})

    @property
    def own_variables(self) -> list[str]:
        """Those variables that the program's own code read, sorted."""
        return sorted({note.path for note in self.of(VARIABLE, kinds=(WORK, PROJECT, ORIGIN))})

    def unkeyed(self, places: Places, *, ended_well: bool) -> list[Unkeyed]:
        """Return the files of the project that the run's copy lacks, by path.

        If the project doesn't lie on this host, an absent file can't be attributed to the project. It is then reported
        only if the run failed.
        """
        keyed = {path.relative_to(places.snapshot).as_posix() for path in places.snapshot.rglob("*")}
        was_read_by_name: dict[str, bool] = {}
        written = {note.path for note in self.of(WRITTEN, kinds=(WORK,))}
        for note in self.notes:
            is_look = note.kind == WORK and note.how in (ABSENT, NO_STAT, FOLDER)
            if note.how in (OWN_STAT, WRITTEN) or (is_look and _is_made(note.path, places, written)):
                continue  # what a run by hand has left of its results in the project is no input
            for name in _names(note, places, ended_well):
                as_text = note.how == TEXT and not _is_whole(name, places)
                if (as_text or name.rstrip("/") not in keyed) and not _is_record(name):
                    was_read_by_name[name] = was_read_by_name.get(name, False) or note.how in (READ, TEXT)
        parents = {f"{path}/" for name in was_read_by_name if not name.endswith("/") for path in Path(name).parents}
        return [Unkeyed(name, was_read) for name, was_read in sorted(was_read_by_name.items()) if name not in parents]

    def record(
        self,
        root: Path | None = None,
        keyed: Collection[str] = (),
        whole: Collection[str] = (),
        places: Places | None = None,
    ) -> dict[str, Any]:
        """Return the inputs that decide whether a result is up to date.

        These are files with digest and stamp, absent files, folders, names, modules and variables.

        Args:
            root: the project, in which the program ran: its files count. Without it, files outside of it count.
            keyed: absolute real paths of files that the key includes.
            whole: those of them that count byte for byte; for others, code may have read the comments.
            places: of a program that ran in a copy of the project: a file absent there may appear in the project.
        """
        inside = "" if root is None else os.path.realpath(root)
        kinds = (OUTSIDE,) if root is None else (OUTSIDE, PROJECT)
        files: dict[str, list[Any]] = {}
        for note in self.of(READ, TEXT, kinds=kinds):
            path = _absolute(note, inside)
            counts = whole if note.how == TEXT else keyed
            if os.path.realpath(path) not in counts and not _is_record(note.path):
                digest = _digest(path, "") if note.how == TEXT else note.digest
                files.setdefault(_shown(path, inside), [digest, _stamp(path, digest)])
        fields = {
            "host": host(),
            "prefix": sys.prefix,
            "files": dict(sorted(files.items())),
            "absent": self._absent(places),
            "folders": dict(sorted(self._folders(inside, kinds).items())),
            "imported": (imported := sorted({note.path for note in self.of(IMPORTED)})),
            "installed": installed(imported, sys.path),
            "variables": self.variables,
            "own_variables": self.own_variables,
        }
        return {**fields, "looked_for": self._looked_for(Path(inside), keyed)} if inside else fields

    def changed_meanwhile(self, root: Path, keyed: Mapping[str, str]) -> list[str]:
        """Return the files of the key that had another content when they were opened than the key includes.

        Args:
            keyed: absolute real path → sha256 at the start; at the end, the files have this content again.
        """
        inside, altered = os.path.realpath(root), set[str]()
        for note in self.of(READ, kinds=(PROJECT, OUTSIDE)):
            path = os.path.realpath(_absolute(note, inside))
            if path in keyed and note.digest != keyed[path] and note.digest != _digest(path, note.digest):
                altered.add(_shown(path, inside))
        return sorted(altered)

    def _folders(self, inside: str, kinds: Collection[str]) -> dict[str, list[Any]]:
        """Return the digest of the names in each listed folder, and the names that the program itself created there."""
        own: dict[str, set[str]] = {}
        for note in self.of(WRITTEN, MADE, kinds=kinds):
            folder, _, name = _absolute(note, inside).rpartition("/")
            own.setdefault(folder, set()).add(name)
        folders: dict[str, list[Any]] = {}
        for note in self.of(NAMES, kinds=kinds):
            path = _absolute(note, inside)
            if not _is_record(f"{note.path}/"):
                mine = sorted(own.get(path, ()))
                without = mine if _names_digest(path, mine) == note.digest else []
                folders.setdefault(_shown(path, inside), [note.digest, without])
        return folders

    def _absent(self, places: Places | None) -> list[str]:
        """Return absolute paths that were looked for in vain and that another program may create."""
        # Leave out temporary folders, hidden folders of the home (caches and settings, which libraries look for), the
        # folders of PATH, runs, secrets that were taken for a path, and files that the program itself created later,
        # which each later run would find.
        home = os.path.expanduser("~")  # noqa: PTH111
        passing = [f"{os.path.realpath(folder)}/" for folder in (tempfile.gettempdir(), *os.get_exec_path())]
        elsewhere = (*passing, f"{os.path.realpath(home)}/.")
        secrets = [text for name, text in os.environ.items() if _NAMES_SECRET.search(name.upper()) and len(text) >= 8]
        runs = f"{os.path.realpath(places.run_dir.parent)}/" if places else "/"
        made = {_in_checkout(note, places) for note in self.of(WRITTEN, MADE)}
        absent = set[str]()
        for note in self.of(ABSENT, NO_STAT):
            path = _in_checkout(note, places)
            is_made = places is not None and note.kind == WORK and (places.work / note.path).exists()
            is_passing = path.startswith(elsewhere if note.kind == OUTSIDE else runs)
            is_shown = not any(secret in path for secret in secrets) and not _is_record(path)
            if path and is_shown and not (is_made or is_passing or path in made or os.path.lexists(path)):
                absent.add(path)
        return sorted(absent)

    def _looked_for(self, root: Path, keyed: Collection[str]) -> dict[str, list[str]]:
        """Return patterns of names below the project, each with the names that match now."""
        names_by_pattern: dict[str, list[str]] = {}
        for note in self.of(PATTERN, ABSENT, NO_STAT, MODULE, WORD, THERE, kinds=(PROJECT,)):
            if note.how == PATTERN:
                names_by_pattern[note.path] = names(root, note.path)
            elif (note.how != MODULE or note.path.endswith(".py")) and not _is_record(note.path):
                escaped = glob.escape(note.path)
                there = names(root, escaped)
                if note.how == THERE and there and str(root / note.path) not in keyed:
                    names_by_pattern[escaped] = there
                elif note.how != THERE and not there:  # else it was created meanwhile
                    names_by_pattern[escaped] = []
        return dict(sorted(names_by_pattern.items()))


def changed(record: Mapping[str, Any], root: Path | None = None, keyed: Collection[str] = ()) -> str | None:
    """Describe the first difference between a record and the present state; None if there is none.

    Files are hashed only if their stamps differ.

    Args:
        root: the project, if its files count.
        keyed: distributions whose versions the key includes.
    """
    for node in record.get("nodes") or ():
        if (other := changed(node, root, keyed)) is not None:
            return other
    if record.get("host") != host():
        return None  # a record of another host's files
    for name, (digest, stamp) in (record.get("files") or {}).items():
        path = os.path.join(root or "/", name)  # noqa: PTH118
        with suppress(OSError):
            if stamp is not None and _times(path) == stamp:
                continue
        if (now := _digest(path, digest)) != digest:
            return f"{name}, which it read and its key lacks, {'changed' if now else 'is gone'}"
    for name, (digest, without) in (record.get("folders") or {}).items():
        if _names_digest(os.path.join(root or "/", name), without) != digest:  # noqa: PTH118
            return f"the names in the folder {name or '.'}, which it listed, changed"
    for path in record.get("absent") or ():
        if os.path.lexists(path):
            return f"{path}, which it looked for in vain, has appeared since"
    for pattern, known in (record.get("looked_for") or {}).items():
        if new := {*names(root or Path("/"), pattern)} ^ {*known}:
            return f"{min(new)}, which it looked for, {'is gone' if min(new) in known else 'is new'}"
    return _other_version(record.get("installed") or {}, keyed)


def installed(modules: Collection[str], path: Iterable[str]) -> dict[str, list[str]]:
    """Return the distributions that contain these modules: name → version and folder.

    Args:
        modules: top-level names; for namespace packages, with the next part of the name.
    """
    # search the RECORD files, as an optional part or a plug-in need not be a requirement of its importer
    shared = {name.partition(".")[0] for name in modules if "." in name}  # namespaces of several distributions
    own = {name.replace(".", "/") for name in modules if name not in shared} - _PACELINE
    line = re.compile(rf"^(?:{'|'.join(map(re.escape, sorted(own)))})[/.]", re.MULTILINE)
    distributions: dict[str, list[str]] = {}
    for folder in filter(None, path):
        for name, (version, about) in _distributions(folder).items():
            with suppress(OSError):
                text = Path(folder, about, "RECORD").read_text(encoding="utf-8")
                if own and name not in distributions and line.search(text):
                    distributions[name] = [version, folder]
    return dict(sorted(distributions.items()))


def _other_version(known: Mapping[str, Sequence[str]], keyed: Collection[str]) -> str | None:
    """Describe the first distribution of a record that has changed."""
    listed: dict[str, dict[str, tuple[str, str]]] = {}
    for name, (version, folder) in known.items():
        if name in keyed:
            continue
        is_there = os.path.isdir(folder)  # noqa: PTH112
        places = [folder] if is_there else sys.path  # a venv may have been moved
        for place in places:
            if place not in listed:
                listed[place] = _distributions(place)
        now = next((listed[place][name][0] for place in places if name in listed[place]), None)
        if now is None and is_there:
            return f"{name}, which it imported and its key lacks, was {version} and isn't installed any more"
        if now not in (None, version):
            return f"{name}, which it imported and its key lacks, was {version} and is {now}"
    return None


def _distributions(folder: str) -> dict[str, tuple[str, str]]:
    """Return the distributions in a folder: name → version and .dist-info folder, from whose name both are read."""
    described = {}
    with suppress(OSError):  # an archive, or a missing folder
        for about in sorted(os.listdir(folder)):  # noqa: PTH208
            if about.endswith(".dist-info"):
                name, _, version = about.removesuffix(".dist-info").partition("-")
                described[re.sub(r"[-_.]+", "-", name).lower()] = (version, about)
    return described


def host() -> str:
    """Identify this host: a record's files are those of one host."""
    with suppress(OSError):
        return f"{platform.node()} {Path('/etc/machine-id').read_text(encoding='ascii').strip()}"
    return platform.node()


def names(root: Path, pattern: str) -> list[str]:
    """Return the sorted names below the project that match a pattern."""
    return sorted(glob.glob(pattern, root_dir=root, recursive=True))  # noqa: PTH207  (which takes hidden ones, too)


def _of_others(notes: Iterable[Note]) -> Iterator[Note]:
    """Yield notes in order of time, except those of files that the program itself wrote before."""
    own: set[tuple[str, str]] = set()
    made: dict[str, tuple[str, ...]] = {}
    for note in notes:
        if note.how in (WRITTEN, MADE):
            yield note
            own.add((note.kind, note.path))
            if note.how == MADE:
                made[note.kind] = (*made.get(note.kind, ()), f"{note.path}/")
        elif (note.kind, note.path) not in own and not note.path.startswith(made.get(note.kind, ())):
            yield note


def _parsed(path: Path) -> Iterator[Note]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, SyntaxError):  # the process was killed while it wrote the line
            at_ns, how, kind, digest, inside = line.split(" ", 4)
            yield Note(int(at_ns), how, kind, digest, str(ast.literal_eval(inside)))


def _names(note: Note, places: Places, ended_well: bool) -> Iterator[str]:
    """Yield the files of the project that a note refers to."""
    how, kind, inside = note.how, note.kind, note.path
    if kind in (PROJECT, ORIGIN):
        looked_at = Path(os.path.realpath(places.project or "/"), inside)
        if how == THERE and Path(os.path.realpath(places.run_dir)).is_relative_to(looked_at):
            return  # a parent of the run folder, which any search upwards (such as git's) visits
        if how in (READ, THERE):  # absent files of the project count for steps only
            yield inside if kind == PROJECT else COPIED + inside
        return
    if kind != WORK:
        return
    if how == TEXT:
        yield inside
        return
    prefix = COPIED if inside.startswith(COPIED) else ""
    top, rest = places.origin if prefix else places.project, inside.removeprefix(prefix)
    if top is None:
        if how == ABSENT and not ended_well:
            yield inside
    elif how in (PACKAGE, PATTERN):
        pattern = f"{glob.escape(rest)}*.py" if how == PACKAGE else rest
        there = sorted(glob.glob(pattern, root_dir=top, recursive=True))  # noqa: PTH207  (without hidden files)
        lacks = (prefix + name for name in there if not (places.work / prefix / name).exists())
        yield from (name for name in lacks if (top / name.removeprefix(prefix)).is_file())
    elif inside.endswith("/"):
        if _holds(top / rest, modules=how != FOLDER):
            yield inside
    elif (top / rest).is_file():
        yield inside
    elif how == NO_STAT and not ended_well and _holds(top / rest):
        yield f"{inside}/"  # Hydra calls os.path.exists before it lists its configurations


def _is_made(path: str, places: Places, written: Collection[str]) -> bool:
    """Return True for a file or folder of the run's copy that the program looked for in vain and then made itself."""
    below = path if path.endswith("/") else f"{path}/"
    was_given = (places.snapshot / path).exists()
    return not was_given and (
        path in written or any(name.startswith(below) for name in written) or (places.work / path).exists()
    )


def _is_whole(name: str, places: Places) -> bool:
    relative = {Path(name), Path(name.removeprefix(f"{places.folder}/"))}
    paths = {str(path) for file in relative for path in (file, *file.parents)}
    patterns = [pattern.removeprefix(COPIED) for pattern in places.whole]
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns for path in paths)


def _holds(folder: Path, *, modules: bool = False) -> bool:
    """Return True if a file lies in the folder; ``modules``: a Python module, in it or one level below."""
    files = itertools.chain(folder.glob("*.py"), folder.glob("*/*.py")) if modules else folder.rglob("*")
    return any(path.is_file() for path in files)


def _is_record(name: str) -> bool:
    """Return True for files of version control and of installed distributions, which influence no result."""
    return any(part in _RECORDS or part.endswith((".egg-info", ".dist-info")) for part in name.split("/"))


def _absolute(note: Note, inside: str) -> str:
    return note.path if note.kind == OUTSIDE else f"{inside}/{note.path}".rstrip("/")


def _in_checkout(note: Note, places: Places | None) -> str:
    """Return the absolute path that a note names, moved from the run's copy to the checkout; '' if that isn't here."""
    if note.kind == OUTSIDE:
        return note.path
    is_copied = note.kind == ORIGIN or (note.kind == WORK and note.path.startswith(COPIED))
    top = places and (places.origin if is_copied else places.project)
    return os.path.join(os.path.realpath(top), note.path.removeprefix(COPIED)) if top else ""  # noqa: PTH118


def _shown(path: str, inside: str) -> str:
    return path[len(inside) + 1 :] if inside and f"{path}/".startswith(f"{inside}/") else path


def _times(path: str) -> list[int]:
    seen = os.stat(path)  # noqa: PTH116
    return [seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino]


def _stamp(path: str, digest: str) -> list[int] | None:
    """Return stamps by which a file needs no hashing next time; None if it changed, or may change without a trace."""
    with suppress(OSError):
        times = _times(path)
        if time.time_ns() - times[2] > _SETTLED_NS and _digest(path, digest) == digest and _times(path) == times:
            return times
    return None


def _digest(path: str, like: str) -> str:
    """Return the file's current digest, of the same kind as ``like``; '' if it can't be read."""
    with suppress(OSError):
        return observer.digest_of(path, as_stamp=":" in like)
    return ""


def _names_digest(path: str, without: Collection[str]) -> str:
    """Return the digest of the current names in a folder; '' if it can't be read."""
    with suppress(OSError):
        return observer.digest_of_names(path, without)
    return ""


def message(unkeyed: Collection[Unkeyed], field: str = "program.inputs") -> list[str]:
    """Return the warnings for the user: a line for files that were read, another for files that were looked for."""
    lines = []
    for was_read in (True, False):
        paths = [item.path for item in unkeyed if item.was_read is was_read]
        if paths:
            was, are = ("was", "isn't") if len(paths) == 1 else ("were", "aren't")
            what = f"{joined(paths)} {was} " + ("read" if was_read else f"looked for and {are} in the snapshot")
            # a program ends at the first file that it lacks, and may read the others of that folder
            folders = {path.rpartition("/")[0] for path in paths} if not was_read else {""}
            more = (
                f", or all of its folder: '{field}=[{folders.pop()}/*]'" if len(folders) == 1 and all(folders) else ""
            )
            lines.append(f"the key is not complete: {what}; {added_to(field, paths)}{more}")
    return lines


def added_to(field: str, paths: Sequence[str]) -> str:
    """Return ``add it to program.inputs: 'program.inputs=[a.txt]'``; without the word if that would be long."""
    word = f"{field}=[{','.join(paths)}]"
    can_be_typed = len(word) <= 60 and re.fullmatch(r"[\w.,=/\[\]-]+", word) is not None
    return f"add {'it' if len(paths) == 1 else 'them'} to {field}" + (f": '{word}'" if can_be_typed else "")


def outside(paths: Sequence[str], hint: str = "program.data sends {them} to the hosts, as a part of the key") -> str:
    """Return the warning for the user about files outside of the project."""
    was, them, change = ("was", "it", "changes") if len(paths) == 1 else ("were", "them", "change")
    they = "it" if len(paths) == 1 else "they"
    return (
        f"{joined(paths)} {was} read outside of the project: no part of the key, but the run is repeated when {they} "
        f"{change}; {hint.format(them=them)}"
    )


def joined(paths: Sequence[str]) -> str:
    """Return the first eight paths as a phrase."""
    if len(paths) > 8:
        return f"{', '.join(paths[:8])} and {len(paths) - 8} more"
    return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
