"""The data of a script: files and folders of any kind, identified by content, as launchers send them to hosts."""

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
"""The name of the folder in a pack, or of the folder that contains the single file."""
_PACK = re.compile(r".+-[0-9a-f]{12}")


class Tree(NamedTuple):
    """The data of a script as one pack."""

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
            _link(self.path, self.path / inside, source.resolve())  # a run isn't led elsewhere if a link is changed
        sizes_bytes = {name: stamp.size_bytes for name, stamp in self.stamps.items()}
        described = {"files": sizes_bytes, "sha256": dict(self.contents), "empty": [*self.empty]}
        write_json(self.path / MANIFEST, {"digest": self.digest, **described})

    def replaced_meanwhile(self, data: Sequence[DataPath], data_dir: Path) -> tuple[str, ...]:
        """Return the files of a script's data that are gone or other than when the run began."""
        if self.path is None:
            return ()
        try:
            now = tree(data, data_dir)
        except DataError as error:  # gone, or being written to
            return (error.what,)
        changed = [name for name, sha256 in self.contents.items() if now.contents.get(name) != sha256]
        return tuple(_below_source(name, self) for name in sorted(changed))


def _link(pack: Path, link: Path, source: Path) -> None:
    if link.parent != pack and link.parent.is_symlink():  # a link there would lead into the user's folder
        link.parent.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != source:
        made = pack / f"{temporary_prefix('.link')}{os.urandom(4).hex()}"
        made.symlink_to(source)
        made.replace(link)  # atomic, because another command may do the same concurrently


NO_DATA = Tree(path=None, digest="")


def tree(data: Sequence[DataPath], data_dir: Path) -> Tree:
    """Describe the current content of a script's data. Hashes only files with changed stamps. Raises DataError."""
    parts = [_part(one, f"{CONTENT}{number if number > 1 else ''}", data_dir) for number, one in enumerate(data, 1)]
    if not parts:
        return NO_DATA
    digest = parts[0].digest if len(parts) == 1 else sha256_text(canonical_json([part.digest for part in parts]))
    return Tree(
        path=data_dir.absolute() / f"script-{digest[:12]}",
        digest=digest,
        inside=tuple(inside for part in parts for inside in part.inside),
        sources=tuple(one.path for one in data),
        stamps={name: stamp for part in parts for name, stamp in part.stamps.items()},
        contents={name: sha256 for part in parts for name, sha256 in part.contents.items()},
        empty=tuple(name for part in parts for name in part.empty),
    )


def changed_files(now: Tree, old_digest: str, data_dir: Path) -> list[str]:
    """Return ``train.csv changed`` for each file that differs from data of another digest that was used here."""
    try:
        old = documents.read(data_dir / f"script-{old_digest[:12]}" / MANIFEST)
        before = dict(old["sha256"]) if old["digest"] == old_digest else {}
    except (OSError, ValueError, KeyError, TypeError):  # removed, or altered
        return []
    if not before:
        return []
    changes = []
    for name in sorted(before.keys() | now.contents.keys()):
        if before.get(name) != now.contents.get(name):
            change = "added" if name not in before else "removed" if name not in now.contents else "changed"
            changes.append(f"{_below_source(name, now)} {change}")
    return changes


def _below_source(name: str, tree: Tree) -> str:
    """Return a path in the pack as users know it: with the name of its data's folder in the place of ``content``."""
    top, _, below = name.partition("/")
    source = next((path for at, path in zip(tree.inside, tree.sources, strict=True) if at == top), None)
    return below if source is None else f"{source.name}/{below}"


def _part(one: DataPath, top: str, data_dir: Path) -> Tree:
    source = one.path
    try:
        names, empty = _below(one, data_dir.resolve())
        prints = fingerprints(names, data_dir)
    except OSError as error:
        raise DataError(f"{one.field}={source} can't be read: {os_reason(error)}", hint=_hint(one)) from error
    if not prints:
        raise DataError(f"{one.field}={source} holds no file")
    below = {path: path.relative_to(source).as_posix() if source.is_dir() else path.name for path in prints}
    contents = {below[path]: known.sha256 for path, known in prints.items()}
    # A folder with one file must differ from the file itself, because a script treats their paths differently.
    alone = ["./"] if source.is_dir() and len(contents) == 1 else []
    return Tree(
        path=None,
        digest=sha256_text(canonical_json({**contents, **dict.fromkeys([*empty, *alone], "")})),
        inside=(top if source.is_dir() else f"{top}/{source.name}",),
        stamps={f"{top}/{below[path]}": known.stamp for path, known in prints.items()},
        contents={f"{top}/{name}": sha256 for name, sha256 in contents.items()},
        empty=tuple(f"{top}/{name}" for name in empty),
    )


def _hint(one: DataPath) -> str | None:
    return None if one.field == "program.data" else f"program.untracked=['{one.path}'], if every host has it there"


def sources(data_dir: Path) -> Iterator[Path]:
    """Yield the link targets of all script data, whether they still exist or not. Raises OSError."""
    for content in data_dir.glob(f"script-*/{CONTENT}*"):
        links = [content] if content.is_symlink() else content.iterdir()
        yield from (link.readlink() for link in links if link.is_symlink())


def _below(one: DataPath, data_dir: Path) -> tuple[list[Path], list[str]]:
    """Return all files, and the empty folders (``a/b/``), which a script may see too.

    What Paceline keeps in ``data_dir`` is left out, as ``data_dir`` may be the same folder.

    Raises DataError: a link to a folder or to nothing; OSError.
    """
    source = one.path
    if not source.is_dir():
        return [source], []
    files, empty = list[Path](), list[str]()
    top = source.resolve()
    of_packs = [*data_dir.iterdir()] if data_dir.is_relative_to(top) and data_dir.is_dir() else []
    kept = {source / path.relative_to(top) for path in of_packs if _is_of_paceline(path)}
    for path in sorted(source.rglob("*")):
        if kept and not kept.isdisjoint([path, *path.parents]):
            continue
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"{one.field}={source}: {path.relative_to(source)} is a link to {path.readlink()}, which isn't there",
                hint=_hint(one) or "take it away, or put there what it leads to",
            )
        if path.is_symlink() and path.is_dir():
            raise DataError(
                f"{one.field}={source}: {path.relative_to(source)} is a link to a folder, which is not sent",
                hint=_hint(one) or "put the folder itself there, or name the folder that it leads to",
            )
        if path.is_file():
            files.append(path)
        elif path.is_dir() and not any(path.iterdir()):
            empty.append(f"{path.relative_to(source).as_posix()}/")
    return files, empty


def _is_of_paceline(path: Path) -> bool:
    if path.name.startswith("."):
        return path.name == FINGERPRINTS or path.name.endswith(".lock") or path.name.startswith(".building-")
    return _PACK.fullmatch(path.name) is not None and (path / MANIFEST).is_file()
