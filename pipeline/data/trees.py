"""The data of a script: a file or folder of anybody's own, told apart by content, as launchers send it to hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pipeline.core import leftovers
from pipeline.core.errors import DataError, os_reason
from pipeline.core.files import canonical_json, sha256_text, write_json
from pipeline.data.manifest import MANIFEST
from pipeline.data.request import fingerprints

CONTENT = "content"
"""The name in a pack under which the folder lies, or the one in which the file does."""


class Tree(NamedTuple):
    """``path`` is the folder that a host gets (None: the script names no data), ``digest`` that of names and contents,
    ``inside`` the path in it that {data} stands for, ``source`` where it lies here, ``sizes`` in bytes and ``contents``
    (sha256) by path, ``empty`` the folders that hold nothing."""

    path: Path | None
    digest: str
    inside: str = ""
    source: Path = Path()
    sizes: Mapping[str, int] = {}
    contents: Mapping[str, str] = {}
    empty: tuple[str, ...] = ()
    rank_modules: tuple[str, ...] = ()

    def lay_down(self) -> None:
        """Make the folder: a link to the source, and a manifest by which a host knows whether it has all of it.

        Raises OSError.
        """
        if self.path is None:
            return
        link = self.path / self.inside
        if link.parent != self.path and link.parent.is_symlink():  # it leads into a folder of the person's own
            link.parent.unlink()
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.readlink() != self.source:
            made = self.path / f"{leftovers.prefix('.link')}{os.urandom(4).hex()}"
            made.symlink_to(self.source)
            made.replace(link)  # at once: another command may be about to do the same
        told = {"files": dict(self.sizes), "sha256": dict(self.contents), "empty": [*self.empty]}
        write_json(self.path / MANIFEST, {"digest": self.digest, **told})


NONE = Tree(path=None, digest="")


def tree(source: Path | None, data_dir: Path) -> Tree:
    """What a script's data comes to now. Files are hashed only after their stamps changed.

    Raises:
        DataError: it can't be read, holds no file, or a link to a folder or to nothing, or is written to just now.
    """
    if source is None:
        return NONE
    inside = CONTENT if source.is_dir() else f"{CONTENT}/{source.name}"
    try:
        names, empty = _below(source)
        found = fingerprints(names, data_dir)
    except OSError as error:
        raise DataError(f"program.data={source} can't be read: {os_reason(error)}") from error
    if not found:
        raise DataError(f"program.data={source} holds no file")
    below = {path: path.relative_to(source).as_posix() if source.is_dir() else path.name for path in found}
    contents = {below[path]: sha256 for path, (_, sha256) in found.items()}
    # a folder of one file isn't the file: a script that is told its path does something else with it
    alone = ["./"] if source.is_dir() and len(contents) == 1 else []
    digest = sha256_text(canonical_json({**contents, **dict.fromkeys([*empty, *alone], "")}))
    return Tree(
        path=data_dir.absolute() / f"script-{digest[:12]}",
        digest=digest,
        inside=inside,
        source=source,
        sizes={f"{CONTENT}/{below[path]}": stamp.size_bytes for path, (stamp, _) in found.items()},
        contents={f"{CONTENT}/{name}": sha256 for name, sha256 in contents.items()},
        empty=tuple(f"{CONTENT}/{name}" for name in empty),
    )


def sources(data_dir: Path) -> Iterator[Path]:
    """What the data of each script leads to, whatever lies there by now. Raises OSError."""
    for content in data_dir.glob(f"script-*/{CONTENT}"):
        links = [content] if content.is_symlink() else content.iterdir()
        yield from (link.readlink() for link in links if link.is_symlink())


def _below(source: Path) -> tuple[list[Path], list[str]]:
    """All files, and the folders without anything in them (``a/b/``): a script may count those, too.

    Raises:
        DataError: a link to a folder, which wouldn't be sent, or one that leads to nothing.
        OSError: a folder can't be read.
    """
    if not source.is_dir():
        return [source], []
    files, empty = list[Path](), list[str]()
    for path in sorted(source.rglob("*")):
        if path.is_symlink() and not path.exists():
            raise DataError(
                f"program.data={source}: {path.relative_to(source)} is a link to {path.readlink()}, which isn't there",
                hint="take it away, or put there what it leads to",
            )
        if path.is_symlink() and path.is_dir():
            raise DataError(
                f"program.data={source}: {path.relative_to(source)} is a link to a folder, which is not sent",
                hint="put the folder itself there, or name the folder that it leads to",
            )
        if path.is_file():
            files.append(path)
        elif path.is_dir() and not any(path.iterdir()):
            empty.append(f"{path.relative_to(source).as_posix()}/")
    return files, empty
