"""The data of a script: a file or folder of anybody's own, told apart by content, as launchers send it to hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import canonical_json, sha256_text, temporary_prefix, write_json
from pipeline.data.manifest import MANIFEST
from pipeline.data.request import fingerprints
from pipeline.keys.script_files import DataPath

CONTENT = "content"
"""The name in a pack under which the folder lies, or the one in which the file does."""


class Tree(NamedTuple):
    """The data of a script as one pack.

    ``path`` is the folder that a host gets (None: the script names no data), ``digest`` that of names and contents,
    ``inside`` the paths in it that {data}, {data2}, … stand for, ``sources`` where these lie here, ``sizes`` in bytes
    and ``contents`` (sha256) by path, ``empty`` the folders that hold nothing."""

    path: Path | None
    digest: str
    inside: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    sizes: Mapping[str, int] = {}
    contents: Mapping[str, str] = {}
    empty: tuple[str, ...] = ()
    rank_modules: tuple[str, ...] = ()

    def lay_down(self) -> None:
        """Make the folder: a link to each source, and a manifest by which a host knows whether it has all of it.

        Raises OSError.
        """
        if self.path is None:
            return
        for inside, source in zip(self.inside, self.sources, strict=True):
            _link(self.path, self.path / inside, source)
        described = {"files": dict(self.sizes), "sha256": dict(self.contents), "empty": [*self.empty]}
        write_json(self.path / MANIFEST, {"digest": self.digest, **described})


def _link(pack: Path, link: Path, source: Path) -> None:
    if link.parent != pack and link.parent.is_symlink():  # it leads into a folder of the user's own
        link.parent.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.readlink() != source:
        made = pack / f"{temporary_prefix('.link')}{os.urandom(4).hex()}"
        made.symlink_to(source)
        made.replace(link)  # at once: another command may be about to do the same


NONE = Tree(path=None, digest="")


def tree(data: Sequence[DataPath], data_dir: Path) -> Tree:
    """What a script's data comes to now. Files are hashed only after their stamps changed.

    Raises:
        DataError: it can't be read, holds no file, or a link to a folder or to nothing, or is written to just now.
    """
    parts = [_part(one, f"{CONTENT}{number if number > 1 else ''}", data_dir) for number, one in enumerate(data, 1)]
    if not parts:
        return NONE
    digest = parts[0].digest if len(parts) == 1 else sha256_text(canonical_json([part.digest for part in parts]))
    return Tree(
        path=data_dir.absolute() / f"script-{digest[:12]}",
        digest=digest,
        inside=tuple(inside for part in parts for inside in part.inside),
        sources=tuple(one.path for one in data),
        sizes={name: size for part in parts for name, size in part.sizes.items()},
        contents={name: sha256 for part in parts for name, sha256 in part.contents.items()},
        empty=tuple(name for part in parts for name in part.empty),
    )


def _part(one: DataPath, top: str, data_dir: Path) -> Tree:
    """One file or folder, under the name ``top`` in the pack."""
    source = one.path
    try:
        names, empty = _below(one)
        prints = fingerprints(names, data_dir)
    except OSError as error:
        raise DataError(f"{one.field}={source} can't be read: {os_reason(error)}", hint=_hint(one)) from error
    if not prints:
        raise DataError(f"{one.field}={source} holds no file")
    below = {path: path.relative_to(source).as_posix() if source.is_dir() else path.name for path in prints}
    contents = {below[path]: sha256 for path, (_, sha256) in prints.items()}
    # a folder of one file isn't the file: a script that is told its path does something else with it
    alone = ["./"] if source.is_dir() and len(contents) == 1 else []
    return Tree(
        path=None,
        digest=sha256_text(canonical_json({**contents, **dict.fromkeys([*empty, *alone], "")})),
        inside=(top if source.is_dir() else f"{top}/{source.name}",),
        sizes={f"{top}/{below[path]}": stamp.size_bytes for path, (stamp, _) in prints.items()},
        contents={f"{top}/{name}": sha256 for name, sha256 in contents.items()},
        empty=tuple(f"{top}/{name}" for name in empty),
    )


def _hint(one: DataPath) -> str | None:
    """Of a path in an argument, which was taken for data by itself."""
    return None if one.field == "program.data" else f"program.untracked=['{one.path}'], if every host has it there"


def sources(data_dir: Path) -> Iterator[Path]:
    """What the data of each script leads to, whatever lies there by now. Raises OSError."""
    for content in data_dir.glob(f"script-*/{CONTENT}*"):
        links = [content] if content.is_symlink() else content.iterdir()
        yield from (link.readlink() for link in links if link.is_symlink())


def _below(one: DataPath) -> tuple[list[Path], list[str]]:
    """All files, and the folders without anything in them (``a/b/``): a script may count those, too.

    Raises:
        DataError: a link to a folder, which wouldn't be sent, or one that leads to nothing.
        OSError: a folder can't be read.
    """
    source = one.path
    if not source.is_dir():
        return [source], []
    files, empty = list[Path](), list[str]()
    for path in sorted(source.rglob("*")):
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
