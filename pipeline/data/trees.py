"""The data of a script: files and folders of any kind, named by the digest of their content.

A script finds them by ``{data}`` in its arguments. Here they are one folder of links, ``script-<12 hex digits>`` in
``paths.data``, from which launchers send the files to hosts. (The built-in trainer has a ``manifest.Pack`` instead.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core import documents
from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import (
    FINGERPRINTS,
    Stamp,
    canonical_json,
    fingerprints,
    sha256_text,
    temporary_prefix,
    write_json,
)
from pipeline.keys.script_files import DataPath
from trainers.contract.run_folder import MANIFEST

CONTENT = "content"
"""The name of the first data folder in a pack, or of the folder that contains a single file; the next is content2."""
_PACK = re.compile(r".+-[0-9a-f]{12}")


class Tree(NamedTuple):
    """The data of a script as one pack; also a part of it, which has no ``path`` of its own."""

    path: Path | None  # the folder that a host receives; None: no data
    digest: str
    inside: tuple[str, ...] = ()  # the paths in it that {data}, {data2}, … stand for
    sources: tuple[Path, ...] = ()  # their local paths
    stamps: Mapping[str, Stamp] = {}  # by path in the pack
    contents: Mapping[str, str] = {}  # path in the pack → sha256
    empty: tuple[str, ...] = ()  # empty folders
    rank_modules: tuple[str, ...] = ()

    def create(self) -> None:
        """Create the folder with a link to each source, and the manifest for the hosts' copies. Raises OSError."""
        if self.path is None:
            return
        for inside, source in zip(self.inside, self.sources, strict=True):
            # resolved, so that a link of the user's that is changed later doesn't lead the run elsewhere
            _link(self.path, self.path / inside, source.resolve())
        sizes_bytes = {name: stamp.size_bytes for name, stamp in self.stamps.items()}
        described = {"files": sizes_bytes, "sha256": dict(self.contents), "empty": [*self.empty]}
        write_json(self.path / MANIFEST, {"digest": self.digest, **described})

    def replaced_meanwhile(self, data: Sequence[DataPath], data_dir: Path) -> tuple[str, ...]:
        """Return the files of ``data`` that were changed or removed since this object described them."""
        if self.path is None:
            return ()
        try:
            now = tree(data, data_dir)
        except DataError as error:  # gone, or being written to
            return (error.what,)
        changed = [name for name, sha256 in self.contents.items() if now.contents.get(name) != sha256]
        return tuple(_user_path(name, self) for name in sorted(changed))


def _link(pack: Path, link: Path, source: Path) -> None:
    # A parent that is a link leads into a folder of the user's, where nothing may be written.
    if link.parent != pack and link.parent.is_symlink():
        link.parent.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != source:
        temporary = pack / f"{temporary_prefix('.link')}{os.urandom(4).hex()}"
        temporary.symlink_to(source)
        temporary.replace(link)  # atomic, because another command may do the same concurrently


NO_DATA = Tree(path=None, digest="")


def tree(data: Sequence[DataPath], data_dir: Path) -> Tree:
    """Describe the current content of a script's data. Hashes only files with changed stamps. Raises DataError."""
    parts = []
    for number, data_path in enumerate(data, 1):
        top = CONTENT if number == 1 else f"{CONTENT}{number}"
        parts.append(_part(data_path, top, data_dir))
    if not parts:
        return NO_DATA
    digest = parts[0].digest if len(parts) == 1 else sha256_text(canonical_json([part.digest for part in parts]))
    return Tree(
        path=data_dir.absolute() / f"script-{digest[:12]}",
        digest=digest,
        inside=tuple(inside for part in parts for inside in part.inside),
        sources=tuple(data_path.path for data_path in data),
        stamps={name: stamp for part in parts for name, stamp in part.stamps.items()},
        contents={name: sha256 for part in parts for name, sha256 in part.contents.items()},
        empty=tuple(name for part in parts for name in part.empty),
    )


def changed_files(now: Tree, old_digest: str, data_dir: Path) -> list[str]:
    """Return a line such as ``train.csv changed`` for each file that differs from the data of ``old_digest``."""
    try:
        old = documents.read(data_dir / f"script-{old_digest[:12]}" / MANIFEST)
        before = dict(old["sha256"]) if old["digest"] == old_digest else {}
    except (OSError, ValueError, KeyError, TypeError):  # removed, altered, or only on another computer
        return []
    if not before:
        return []
    changes = []
    for name in sorted(before.keys() | now.contents.keys()):
        if before.get(name) != now.contents.get(name):
            change = "added" if name not in before else "removed" if name not in now.contents else "changed"
            changes.append(f"{_user_path(name, now)} {change}")
    return changes


def _user_path(name: str, tree: Tree) -> str:
    """Return a path in the pack as users know it: with the name of the user's folder in the place of ``content``."""
    top, _, below = name.partition("/")
    for inside, source in zip(tree.inside, tree.sources, strict=True):
        if inside == top:
            return f"{source.name}/{below}"
    return below  # a single file


def _part(data_path: DataPath, top: str, data_dir: Path) -> Tree:
    """Describe one file or folder, which lies below ``top`` in the pack. Raises DataError."""
    source = data_path.path
    try:
        paths, empty = _files_and_empty_folders(data_path, data_dir.resolve())
        fingerprint_by_path = fingerprints(paths, data_dir)
    except OSError as error:
        what = f"{data_path.field}={source} can't be read: {os_reason(error)}"
        raise DataError(what, hint=_hint(data_path)) from error
    if not fingerprint_by_path:
        raise DataError(f"{data_path.field}={source} holds no file")
    is_folder = source.is_dir()
    names = {path: path.relative_to(source).as_posix() if is_folder else path.name for path in fingerprint_by_path}
    contents = {names[path]: fingerprint.sha256 for path, fingerprint in fingerprint_by_path.items()}
    # A folder with one file must differ from the file itself, because a script treats their paths differently.
    folder_marker = ["./"] if is_folder and len(contents) == 1 else []
    return Tree(
        path=None,
        digest=sha256_text(canonical_json({**contents, **dict.fromkeys([*empty, *folder_marker], "")})),
        inside=(top if is_folder else f"{top}/{source.name}",),
        stamps={f"{top}/{names[path]}": fingerprint.stamp for path, fingerprint in fingerprint_by_path.items()},
        contents={f"{top}/{name}": sha256 for name, sha256 in contents.items()},
        empty=tuple(f"{top}/{name}" for name in empty),
    )


def _hint(data_path: DataPath) -> str | None:
    """Return how to leave out a path that was taken for data because an argument of the script names it."""
    if data_path.field == "program.data":
        return None
    return f"program.untracked=['{data_path.path}'], if every host has it there"


def sources(data_dir: Path) -> Iterator[Path]:
    """Yield the link targets of all script data, whether they still exist or not. Raises OSError."""
    for content in data_dir.glob(f"script-*/{CONTENT}*"):
        links = [content] if content.is_symlink() else content.iterdir()
        yield from (link.readlink() for link in links if link.is_symlink())


def _files_and_empty_folders(data_path: DataPath, data_dir: Path) -> tuple[list[Path], list[str]]:
    """Return all files and all empty folders (``a/b/``). Raises DataError: a link that can't be sent; OSError."""
    source = data_path.path
    if not source.is_dir():
        return [source], []
    files, empty = list[Path](), list[str]()
    # paths.data may lie in the user's folder, or be it; what Paceline keeps there is no data of the script
    real_source = source.resolve()
    in_data_dir = [*data_dir.iterdir()] if data_dir.is_relative_to(real_source) and data_dir.is_dir() else []
    skipped = {source / path.relative_to(real_source) for path in in_data_dir if _is_of_paceline(path)}
    for path in sorted(source.rglob("*")):
        if skipped and not skipped.isdisjoint([path, *path.parents]):
            continue
        if path.is_symlink() and not path.is_file():
            link, hint = f"{data_path.field}={source}: {path.relative_to(source)} is a link to", _hint(data_path)
            if not path.exists():
                hint = hint or "take it away, or put there what it leads to"
                raise DataError(f"{link} {path.readlink()}, which isn't there", hint=hint)
            if path.is_dir():
                hint = hint or "put the folder itself there, or name the folder that it leads to"
                raise DataError(f"{link} a folder, which is not sent", hint=hint)
        if path.is_file():
            files.append(path)
        elif path.is_dir() and not any(path.iterdir()):
            empty.append(f"{path.relative_to(source).as_posix()}/")
    return files, empty


def _is_of_paceline(path: Path) -> bool:
    """Return True for an entry of ``paths.data`` that Paceline made: a pack, a lock or a cache."""
    if path.name.startswith("."):
        return path.name == FINGERPRINTS or path.name.endswith(".lock") or path.name.startswith(".building-")
    return _PACK.fullmatch(path.name) is not None and (path / MANIFEST).is_file()
