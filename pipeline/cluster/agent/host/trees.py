"""Digests of a folder's content, computed alike on the controller and on hosts, and compared.

Regular files, their executable bits, and symbolic links count; empty folders, owners and times don't.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Iterator, Mapping

from ..wire import HERE, THERE, Json, say

PARTIAL = ".paceline-partial"  # where rsync keeps what has come of a file
SHOWN = 3  # names in an answer
_BLOCK_BYTES = 1 << 20
Entry = tuple[str, int, str]
"""Kind (``file``, ``executable``, ``link``), bytes, and sha256 of the content or of the link's target."""


def listing(root: str, wanted: Mapping[str, Entry] | None = None) -> dict[str, Entry]:
    """Return name below ``root`` → description; if ``root`` is a file its name is ``.``. Raises OSError.

    ``wanted``: files that it lacks, or has with another size, are not read.
    """
    return {name: entry(os.path.join(root, name), name, wanted) for name in names(root)}


def names(root: str) -> Iterator[str]:
    """Return all files and links below ``root`` in a fixed order. Raises OSError."""
    if not os.path.isdir(root):
        if os.path.lexists(root):
            yield "."
        return
    for folder, folders, files in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if name != PARTIAL)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted([*files, *links]):
            yield os.path.relpath(os.path.join(folder, name), root)


def _raise(error: OSError) -> None:
    raise error


def entry(path: str, name: str, wanted: Mapping[str, Entry] | None = None) -> Entry:
    """Describe one file or link. Raises OSError; SystemExit for sockets, devices and the like."""
    path = path if name != "." else os.path.dirname(path)
    state = os.lstat(path)
    if stat.S_ISLNK(state.st_mode):
        return "link", 0, hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    if not stat.S_ISREG(state.st_mode):
        raise SystemExit(f"{path} is neither a file nor a folder nor a link")
    kind = "executable" if state.st_mode & stat.S_IXUSR else "file"
    if wanted is not None and (name not in wanted or wanted[name][1] != state.st_size):
        return kind, state.st_size, ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return kind, state.st_size, digest.hexdigest()


def tree_digest(entries: Mapping[str, Entry]) -> str:
    """Return one sha256 of names, kinds and contents."""
    rows = sorted([name, kind, sha256] for name, (kind, _, sha256) in entries.items())
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def difference(wanted: Mapping[str, Entry], present: Mapping[str, Entry]) -> Json:
    """Compare ``present`` with the wanted files: counts, some names, and the digest of the wanted names that exist."""
    other = sorted(name for name in wanted if present.get(name) != wanted[name])
    more = sorted(name for name in present if name not in wanted)
    return {
        "differ": len(other),
        "absent": sum(name not in present for name in other),
        "named": other[:SHOWN],
        "more": len(more),
        "more_named": more[:SHOWN],
        "in_the_way": in_the_way(wanted, present)[:SHOWN],
        "sha256": tree_digest({name: present[name] for name in wanted if name in present}),
    }


def in_the_way(wanted: Mapping[str, Entry], present: Mapping[str, Entry]) -> list[str]:
    """Return what conflicts with the wanted files: files and links in place of folders, folders in place of files."""
    folders = {parent for name in wanted for parent in parents(name)}
    full = {parent for name in present for parent in parents(name)}
    return sorted({name for name in present if name in folders} | {name for name in wanted if name in full})


def parents(name: str) -> Iterator[str]:
    """Return the folders that contain ``name``, below the root."""
    while name := os.path.dirname(name):
        yield name


def compare_trees(request: Json) -> None:
    """Answer with each tree's place and its difference from the controller's. Changes nothing."""
    rows = []
    for tree in request["trees"]:
        place = os.path.expanduser(tree["place"])
        wanted = {name: (kind, size, sha256) for name, (kind, size, sha256) in tree["files"].items()}
        rows.append({"place": place, **difference(wanted, listing(place, wanted))})
    say(trees=rows)


def make_places(request: Json) -> None:
    """Make room for folders and single files; answer with each place, and whether rsync exists."""
    places = []
    for one in request["places"]:
        place = os.path.expanduser(one["place"])
        if os.path.lexists(place) and os.path.isdir(place) == one["is_file"]:
            what = "a folder" if one["is_file"] else "no folder"
            away = f"mv {shlex.quote(place)} {shlex.quote(place + '.away')}"
            raise SystemExit(f"{place} is {what} there; move it away, or name another to={THERE}{away}")
        if request["delete"] and os.path.islink(place) and not one["is_file"]:
            raise SystemExit(
                f"{place} is a link to {os.readlink(place)} there, in which delete=1 would remove files{HERE}the same "
                "words without delete=1, or that folder with to="
            )
        folder = os.path.dirname(place) if one["is_file"] else place
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            other = "to=/a/folder/there/that/its/login/can/write/to"
            raise SystemExit(f"can't make the folder {folder} there ({error.strerror}){HERE}{other}") from error
        places.append(place)
    say(places=places, rsync=shutil.which("rsync") is not None)
