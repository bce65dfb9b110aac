"""The record of a program's inputs that its key doesn't cover, made from the notes of its processes at a good end.
Later ``input_changes`` compares it with the present, to find out whether the result is still up to date."""

from __future__ import annotations

import glob
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from trainers.observation import observer
from trainers.observation.input_changes import (
    distributions_in,
    host_identity,
    matching_names,
    present_digest,
    present_digest_of_names,
    times_of,
)
from trainers.observation.notes import Note, Notes
from trainers.observation.unkeyed import OUTSIDE_PREFIX, Places, is_bookkeeping

_SECRET_NAME = re.compile("TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
_SHORTEST_SECRET = 8
_PACELINE = {"trainers", "pipeline", "paceline"}  # the key includes their sources
_SETTLED_NS = 2_500_000_000  # a younger file may be edited without a change of its times and size

FileEntry = tuple[str, list[int] | None]
"""Digest of a file, and its stamp: size in bytes, times of the last write and change in ns, inode.

The stamp is None if a later edit might not change it.
"""


class InputRecord(TypedDict, total=False):
    """A record as JSON. Paths below the project are relative to it, others absolute."""

    host: str  # whose files these are
    files: dict[str, FileEntry]  # that were read
    absent: list[str]  # paths that were looked for in vain
    folders: dict[str, tuple[str, list[str]]]  # listed → digest of the names, and those that the program created there
    imported: list[str]  # top-level names of modules
    installed: dict[str, tuple[str, str]]  # distributions that contain some of these → version, folder
    variables: list[str]  # of the environment, read by name
    own_variables: list[str]  # those that the program's own code read
    looked_for: dict[str, list[str]]  # with a project: pattern below it → names that match
    unkeyed: dict[str, str]  # files of the project that the key lacks (``unkeyed.as_json``)
    nodes: list[Any]  # records of further nodes or programs


def record_inputs(
    notes: Notes,
    root: Path | None = None,
    keyed: Collection[str] = (),
    bytewise: Collection[str] = (),
    places: Places | None = None,
) -> InputRecord:
    """Return the inputs that decide whether a result is up to date. ``root``: the project, for a program that runs in
    it (a step); None: it runs in a copy of the key's files, so only inputs outside of the project are recorded.

    ``keyed``: real paths of files that the key covers, ``bytewise``: those of them whose comments count. ``places``: of
    a program that runs in a copy, to tell where a missing file may appear.
    """
    top = "" if root is None else os.path.realpath(root)
    zones = (observer.OUTSIDE,) if root is None else (observer.OUTSIDE, observer.PROJECT)
    imported = sorted({note.path for note in notes.of(observer.IMPORTED)})
    record = InputRecord(
        host=host_identity(),
        files=_files(notes, top, zones, keyed, bytewise),
        absent=_absent(notes, places),
        folders=_folders(notes, top, zones),
        imported=imported,
        installed=installed(imported, sys.path),
        variables=notes.variables,
        own_variables=notes.own_variables,
    )
    if top:
        record["looked_for"] = _looked_for(notes, Path(top), keyed)
    return record


def files_changed_meanwhile(notes: Notes, root: Path, keyed: Mapping[str, str]) -> list[str]:
    """Return files of the key that had another content when they were opened. ``keyed``: real path → sha256."""
    top, changed = os.path.realpath(root), set[str]()
    for note in notes.of(observer.READ, zones=(observer.PROJECT, observer.OUTSIDE)):
        path = os.path.realpath(_absolute(note, top))
        if path in keyed and note.digest != keyed[path] and note.digest != present_digest(path, note.digest):
            changed.add(_relative(path, top))
    return sorted(changed)


def _files(
    notes: Notes, top: str, zones: Collection[str], keyed: Collection[str], bytewise: Collection[str]
) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for note in notes.of(observer.READ, observer.TEXT, zones=zones):
        path = _absolute(note, top)
        # a source that was read as text was read with its comments, which the key covers only of bytewise files
        covered = bytewise if note.access == observer.TEXT else keyed
        if os.path.realpath(path) not in covered and not is_bookkeeping(note.path):
            digest = present_digest(path, "") if note.access == observer.TEXT else note.digest
            files.setdefault(_relative(path, top), (digest, _stamp(path, digest)))
    return dict(sorted(files.items()))


def _folders(notes: Notes, top: str, zones: Collection[str]) -> dict[str, tuple[str, list[str]]]:
    """Return listed folder → (digest of its names, names that the program created there)."""
    created: dict[str, set[str]] = {}
    for note in notes.of(observer.WRITTEN, observer.MADE_FOLDER, zones=zones):
        folder, _, name = _absolute(note, top).rpartition("/")
        created.setdefault(folder, set()).add(name)
    folders: dict[str, tuple[str, list[str]]] = {}
    for note in notes.of(observer.FOLDER_LISTED, zones=zones):
        path = _absolute(note, top)
        if not is_bookkeeping(f"{note.path}/"):
            own_names = sorted(created.get(path, ()))
            # it may have listed the folder before or after it created these
            left_out = own_names if present_digest_of_names(path, own_names) == note.digest else []
            folders.setdefault(_relative(path, top), (note.digest, left_out))
    return dict(sorted(folders.items()))


def _absent(notes: Notes, places: Places | None) -> list[str]:
    """Return absolute paths that were looked for in vain and may be created by another program.

    Left out are temporary and hidden folders, those of PATH, runs, secrets, and files that the program created later.
    """
    home = os.path.expanduser("~")  # noqa: PTH111
    temporary = [f"{os.path.realpath(folder)}/" for folder in (tempfile.gettempdir(), *os.get_exec_path())]
    left_out_outside = (*temporary, f"{os.path.realpath(home)}/.")
    left_out_in_project = f"{os.path.realpath(places.run_dir.parent)}/" if places else "/"
    # a path may contain a token or password of the environment, which must not be recorded
    variables = os.environ.items()
    secrets = [
        value for name, value in variables if _SECRET_NAME.search(name.upper()) and len(value) >= _SHORTEST_SECRET
    ]
    written = {_in_checkout(note, places) for note in notes.of(observer.WRITTEN, observer.MADE_FOLDER)}
    absent = set[str]()
    for note in notes.of(observer.OPEN_FAILED, observer.STAT_FAILED):
        path = _in_checkout(note, places)
        is_left_out = path.startswith(left_out_outside if note.zone == observer.OUTSIDE else left_out_in_project)
        is_in_copy = places is not None and note.zone == observer.WORK and (places.work / note.path).exists()
        if not path or is_left_out or is_in_copy or path in written or os.path.lexists(path):
            continue
        if not is_bookkeeping(path) and not any(secret in path for secret in secrets):
            absent.add(path)
    return sorted(absent)


def _looked_for(notes: Notes, root: Path, keyed: Collection[str]) -> dict[str, list[str]]:
    """Return pattern → names below the project that match it now, for searches, missing files and existing ones."""
    matches: dict[str, list[str]] = {}
    accesses = (
        observer.PATTERN_SEARCHED,
        observer.OPEN_FAILED,
        observer.STAT_FAILED,
        observer.MODULE_MISSING,
        observer.ARGUMENT_MISSING,
        observer.EXISTS,
    )
    for note in notes.of(*accesses, zones=(observer.PROJECT,)):
        if note.access == observer.PATTERN_SEARCHED:
            matches[note.path] = matching_names(root, note.path)
        elif (note.access != observer.MODULE_MISSING or note.path.endswith(".py")) and not is_bookkeeping(note.path):
            pattern = glob.escape(note.path)
            now = matching_names(root, pattern)
            if note.access == observer.EXISTS and now and str(root / note.path) not in keyed:
                matches[pattern] = now
            elif note.access != observer.EXISTS and not now:  # else it was created meanwhile
                matches[pattern] = []
    return dict(sorted(matches.items()))


# Installed distributions.


def installed(modules: Collection[str], path: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the distributions that contain these modules (top-level names): name → version and folder in ``path``."""
    # search the RECORD files, as an optional part or a plug-in need not be a requirement of its importer
    namespaces = {name.partition(".")[0] for name in modules if "." in name}  # shared by several distributions
    names = {name.replace(".", "/") for name in modules if name not in namespaces} - _PACELINE
    line_of_module = re.compile(rf"^(?:{'|'.join(map(re.escape, sorted(names)))})[/.]", re.MULTILINE)
    distributions: dict[str, tuple[str, str]] = {}
    for folder in filter(None, path):
        for name, distribution in distributions_in(folder).items():
            with suppress(OSError):
                text = Path(folder, distribution.info_folder, "RECORD").read_text(encoding="utf-8")
                if names and name not in distributions and line_of_module.search(text):
                    distributions[name] = (distribution.version, folder)
    return dict(sorted(distributions.items()))


# Paths and digests.


def _absolute(note: Note, top: str) -> str:
    return note.path if note.zone == observer.OUTSIDE else f"{top}/{note.path}".rstrip("/")


def _relative(path: str, top: str) -> str:
    return path[len(top) + 1 :] if top and f"{path}/".startswith(f"{top}/") else path


def _in_checkout(note: Note, places: Places | None) -> str:
    """Return the absolute path of a note, moved from the run's copy to the checkout; '' if that isn't on this host."""
    if note.zone == observer.OUTSIDE:
        return note.path
    is_of_origin = note.zone == observer.ORIGIN or (note.zone == observer.WORK and note.path.startswith(OUTSIDE_PREFIX))
    top = places and (places.origin if is_of_origin else places.project)
    return os.path.join(os.path.realpath(top), note.path.removeprefix(OUTSIDE_PREFIX)) if top else ""  # noqa: PTH118


def _stamp(path: str, digest: str) -> list[int] | None:
    """Return the stamp by which a file needs no hashing; None if it changed, or may change without a trace."""
    with suppress(OSError):
        times = times_of(path)
        is_settled = time.time_ns() - times[2] > _SETTLED_NS
        if is_settled and present_digest(path, digest) == digest and times_of(path) == times:
            return times
    return None
