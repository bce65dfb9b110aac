"""The search for unkeyed files, those of the project that a program read or looked for although its key doesn't cover
them, and the warnings about them. A script runs in a copy of the project that has exactly the files of the key."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.contract import run_folder
from trainers.observation import observer
from trainers.observation.input_changes import advice_to_add
from trainers.observation.notes import Note, Notes

OUTSIDE_PREFIX = f"{run_folder.SCRIPT_OUTSIDE}/"
"""Folder of the copy for the files of a script that lies outside of the project."""
_VERSION_CONTROL = (".git", ".hg")  # a folder or, in a worktree, a file that names the folder
_MOST_SHOWN = 8
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders of one attempt on this host."""

    run_dir: Path  # of which only ``work`` is observed
    snapshot: Path  # the files that the key holds
    work: Path  # the copy of the project in which the program runs; the snapshot for the built-in trainer
    data: tuple[str, ...] = ()  # the values of {data}, {data2}, …
    project: Path | None = None  # the checkout, if it lies on this host
    origin: Path | None = None  # the folder of a script that lies outside of the project, if it lies on this host
    bytewise: Sequence[str] = ()  # patterns of files that count byte for byte, relative to project or script_folder
    script_folder: str = ""  # relative to ``work``


@dataclass(frozen=True)
class Unkeyed:
    """A file that the key lacks, by its path in the project. If it was not read, it was looked for in vain."""

    path: str
    was_read: bool


def as_json(unkeyed: Iterable[Unkeyed]) -> dict[str, str]:
    """Return path → "read" or "looked for", for summary.json."""
    return {file.path: "read" if file.was_read else "looked for" for file in unkeyed}


def from_json(unkeyed: dict[str, str]) -> list[Unkeyed]:
    return [Unkeyed(path, use == "read") for path, use in unkeyed.items()]


def unkeyed_files(notes: Notes, places: Places, *, ended_well: bool) -> list[Unkeyed]:
    """Return the files of the project that the program used and its copy lacks. On a host without the project, these
    are the files that it failed to open, and only after a failure (not ``ended_well``): nobody knows then whether the
    project has them.
    """
    keyed = {path.relative_to(places.snapshot).as_posix() for path in places.snapshot.rglob("*")}
    was_read: dict[str, bool] = {}
    written = {note.path for note in notes.of(observer.WRITTEN, zones=(observer.WORK,))}
    for note in notes.all:
        is_failed_look = note.zone == observer.WORK and note.access in (
            observer.OPEN_FAILED,
            observer.STAT_FAILED,
            observer.FOLDER_MISSING,
        )
        # besides STAT_FAILED and PATTERN_SEARCHED; no input
        if note.access in (observer.OWN_STAT_FAILED, observer.OWN_PATTERN_EMPTY, observer.WRITTEN):
            continue
        # a program that looks for its own results: those of a run by hand, which lie in the project, are no inputs
        if is_failed_look and _is_made(note.path, places, written):
            continue
        for path in _project_files(note, places, ended_well):
            reads_comments = note.access == observer.TEXT and not _is_bytewise(path, places)
            if (reads_comments or path.rstrip("/") not in keyed) and not is_bookkeeping(path):
                was_read[path] = was_read.get(path, False) or note.access in (observer.READ, observer.TEXT)
    # a folder says less than a file below it
    parents = {f"{parent}/" for path in was_read if not path.endswith("/") for parent in Path(path).parents}
    return [Unkeyed(path, was_read[path]) for path in sorted(was_read) if path not in parents]


def _project_files(note: Note, places: Places, ended_well: bool) -> Iterator[str]:
    """Yield the files of the project, and folders with a slash at their end, that a note refers to."""
    if note.zone in (observer.PROJECT, observer.ORIGIN):
        path = Path(os.path.realpath(places.project or "/"), note.path)
        run_and_data = (places.run_dir, *map(Path, places.data))
        real_paths = [folder.parent.resolve() / folder.name for folder in run_and_data]  # data may be a link
        # searches upwards and os.makedirs visit the parents of the run folder and of its data
        if note.access == observer.EXISTS and any(real_path.is_relative_to(path) for real_path in real_paths):
            return
        if note.access in (observer.READ, observer.EXISTS):  # missing files of the project count for steps only
            yield note.path if note.zone == observer.PROJECT else OUTSIDE_PREFIX + note.path
    elif note.zone == observer.WORK and note.access == observer.TEXT:
        yield note.path
    elif note.zone == observer.WORK:
        yield from _files_lacking_in_copy(note, places, ended_well)


def _files_lacking_in_copy(note: Note, places: Places, ended_well: bool) -> Iterator[str]:
    """Yield the files of the project that the program looked for in its copy, where they are missing."""
    prefix = OUTSIDE_PREFIX if note.path.startswith(OUTSIDE_PREFIX) else ""
    top, path = places.origin if prefix else places.project, note.path.removeprefix(prefix)
    if top is None:  # this host has no project to compare with
        if note.access == observer.OPEN_FAILED and not ended_well:
            yield note.path
    elif note.access in (observer.PACKAGE_LISTED, observer.PATTERN_SEARCHED):  # matches that only the project has
        pattern = f"{glob.escape(path)}*.py" if note.access == observer.PACKAGE_LISTED else path
        matches = sorted(glob.glob(pattern, root_dir=top, recursive=True))  # noqa: PTH207  (without hidden files)
        missing = (match for match in matches if not (places.work / prefix / match).exists())
        matching = (prefix + match for match in missing if (top / match).is_file())
        yield from (match for match in matching if not _is_like_made(match, places))
    elif note.path.endswith("/"):  # a folder that was listed or searched for a module
        if _has_file(top / path, modules_only=note.access != observer.FOLDER_MISSING):
            yield note.path
    elif (top / path).is_file():
        yield note.path
    elif note.access == observer.STAT_FAILED and not ended_well and _has_file(top / path):
        yield f"{note.path}/"  # Hydra calls os.path.exists before it lists its configurations


def _is_made(path: str, places: Places, written: Collection[str]) -> bool:
    """Return True for a path of the run's copy that the program looked for in vain and then made itself."""
    below = path if path.endswith("/") else f"{path}/"
    was_given = (places.snapshot / path).exists()
    return not was_given and (
        path in written or any(name.startswith(below) for name in written) or (places.work / path).exists()
    )


def _is_like_made(path: str, places: Places) -> bool:
    """Return True if the program made a file whose name differs from this one only in its numbers. Then the path is
    another of its results: a checkpoint epoch9.pt of a run by hand, which lies in the project, is no input of a program
    that looks for epoch*.pt and saves such files.
    """
    name = _NUMBER.sub("0", path.rpartition("/")[2])
    alike = (file for file in (places.work / path).parent.glob("*") if _NUMBER.sub("0", file.name) == name)
    return any(not (places.snapshot / file.relative_to(places.work)).exists() for file in alike)


def _is_bytewise(name: str, places: Places) -> bool:
    """Return True for a file that the key covers byte for byte, comments too."""
    files = {Path(name), Path(name.removeprefix(f"{places.script_folder}/"))}
    paths = {str(path) for file in files for path in (file, *file.parents)}
    patterns = [pattern.removeprefix(OUTSIDE_PREFIX) for pattern in places.bytewise]
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns for path in paths)


def _has_file(folder: Path, *, modules_only: bool = False) -> bool:
    """Return True if a file lies below the folder; ``modules_only``: a Python module, in it or one level below."""
    files = itertools.chain(folder.glob("*.py"), folder.glob("*/*.py")) if modules_only else folder.rglob("*")
    return any(path.is_file() for path in files)


def is_bookkeeping(path: str) -> bool:
    """Return True for files of version control and of installed distributions, which influence no result."""
    return any(part in _VERSION_CONTROL or part.endswith((".egg-info", ".dist-info")) for part in path.split("/"))


# The warnings for the user.


def unkeyed_warnings(unkeyed: Collection[Unkeyed], field: str = "program.inputs") -> list[str]:
    """Return a line for files that were read, and one for files that were looked for. ``field``: setting for both."""
    read = [file.path for file in unkeyed if file.was_read]
    looked_for = [file.path for file in unkeyed if not file.was_read]
    lines = []
    if read:
        was = "was" if len(read) == 1 else "were"
        lines.append(f"the key is not complete: {joined(read)} {was} read; {advice_to_add(field, read)}")
    if looked_for:
        was, is_not = ("was", "isn't") if len(looked_for) == 1 else ("were", "aren't")
        # a program ends at the first file that it lacks, and may read the others of that folder
        folders = {path.rpartition("/")[0] for path in looked_for}
        more = f", or all of its folder: '{field}=[{folders.pop()}/*]'" if len(folders) == 1 and all(folders) else ""
        lines.append(
            f"the key is not complete: {joined(looked_for)} {was} looked for and {is_not} in the snapshot; "
            f"{advice_to_add(field, looked_for)}{more}"
        )
    return lines


def outside_warning(
    paths: Sequence[str], hint: str = "program.data sends {them} to the hosts, as a part of the key"
) -> str:
    """Return the warning about files that were read outside of the project."""
    was, them, they_change = ("was", "it", "it changes") if len(paths) == 1 else ("were", "them", "they change")
    return (
        f"{joined(paths)} {was} read outside of the project: no part of the key, but the run is repeated when "
        f"{they_change}; {hint.format(them=them)}"
    )


def joined(paths: Sequence[str]) -> str:
    """Return the first eight paths as a phrase."""
    if len(paths) > _MOST_SHOWN:
        return f"{', '.join(paths[:_MOST_SHOWN])} and {len(paths) - _MOST_SHOWN} more"
    return paths[0] if len(paths) == 1 else f"{', '.join(paths[:-1])} and {paths[-1]}"
