"""The comparison of a finished result's inputs with those of today. ``input_record`` has recorded the inputs that the
key doesn't cover; the controller calls ``first_change`` to decide whether the result is still up to date."""

from __future__ import annotations

import glob
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainers.observation import observer


def host_identity() -> str:
    """Return a text that tells this host from others, because the files of a record are those of one host."""
    with suppress(OSError):
        return f"{platform.node()} {Path('/etc/machine-id').read_text(encoding='ascii').strip()}"
    return platform.node()


def first_change(record: Mapping[str, Any], root: Path | None = None, keyed: Collection[str] = ()) -> str | None:
    """Describe the first difference between a record (``InputRecord``) and the present; None: there is none. ``root``:
    the project, for relative paths. ``keyed``: distributions whose versions the key covers.
    """
    for node in record.get("nodes") or ():
        if (change := first_change(node, root, keyed)) is not None:
            return change
    if record.get("host") != host_identity():
        return None  # a record of another host's files
    for name, (digest, stamp) in (record.get("files") or {}).items():
        path = os.path.join(root or "/", name)  # noqa: PTH118
        with suppress(OSError):
            if stamp is not None and times_of(path) == stamp:
                continue
        if (now := present_digest(path, digest)) != digest:
            return f"{name}, which it read and its key lacks, {'changed' if now else 'is gone'}"
    for name, (digest, created) in (record.get("folders") or {}).items():
        if present_digest_of_names(os.path.join(root or "/", name), created) != digest:  # noqa: PTH118
            return f"the names in the folder {name or '.'}, which it listed, changed"
    for path in record.get("absent") or ():
        if os.path.lexists(path):
            return f"{path}, which it looked for in vain, has appeared since"
    for pattern, matches in (record.get("looked_for") or {}).items():
        if different := {*matching_names(root or Path("/"), pattern)} ^ {*matches}:
            name = min(different)
            return f"{name}, which it looked for, {'is gone' if name in matches else 'is new'}"
    return _version_change(record.get("installed") or {}, keyed)


def advice_to_add(field: str, paths: Sequence[str]) -> str:
    """Return ``add it to program.inputs: 'program.inputs=[a.txt]'``; only its beginning if the override is long."""
    word = f"{field}=[{','.join(paths)}]"
    can_be_typed = len(word) <= 60 and re.fullmatch(r"[\w.,=/\[\]-]+", word) is not None
    return f"add {'it' if len(paths) == 1 else 'them'} to {field}" + (f": '{word}'" if can_be_typed else "")


# Installed distributions.


class Distribution(NamedTuple):
    version: str
    info_folder: str  # name of its .dist-info folder


def distributions_in(folder: str) -> dict[str, Distribution]:
    """Return the distributions in a folder by their normalised names, as the names of their .dist-info folders say."""
    distributions = {}
    with suppress(OSError):  # an archive, or a missing folder
        for entry in sorted(os.listdir(folder)):  # noqa: PTH208
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                distributions[re.sub(r"[-_.]+", "-", name).lower()] = Distribution(version, entry)
    return distributions


def _version_change(recorded: Mapping[str, Sequence[str]], keyed: Collection[str]) -> str | None:
    """Describe the first distribution of a record that has changed. ``recorded``: name → (version, folder)."""
    found_in: dict[str, dict[str, Distribution]] = {}
    for name, (version, recorded_folder) in recorded.items():
        if name in keyed:
            continue
        is_folder_there = os.path.isdir(recorded_folder)  # noqa: PTH112
        folders = [recorded_folder] if is_folder_there else sys.path  # a venv may have been moved
        for folder in folders:
            if folder not in found_in:
                found_in[folder] = distributions_in(folder)
        now = next((found_in[folder][name].version for folder in folders if name in found_in[folder]), None)
        if now is None and is_folder_there:
            return f"{name}, which it imported and its key lacks, was {version} and isn't installed any more"
        if now not in (None, version):
            return f"{name}, which it imported and its key lacks, was {version} and is {now}"
    return None


# Files and folders as they are now.


def matching_names(root: Path, pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, root_dir=root, recursive=True))  # noqa: PTH207  (which takes hidden ones, too)


def times_of(path: str) -> list[int]:
    """Return a file's stamp: size in bytes, times of the last write and change in ns, inode. Raises OSError."""
    state = os.stat(path)  # noqa: PTH116
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def present_digest(path: str, like: str) -> str:
    """Return the file's present digest, of the same kind as ``like``; '' if it can't be read."""
    with suppress(OSError):
        return observer.digest_of(path, as_stamp=":" in like)
    return ""


def present_digest_of_names(path: str, without: Collection[str]) -> str:
    """Return the digest of the present names in a folder; '' if it can't be read."""
    with suppress(OSError):
        return observer.digest_of_names(path, without)
    return ""
