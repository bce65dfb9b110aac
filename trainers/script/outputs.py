"""What a script leaves: files of its working directory, moved beside what it wrote into {run}, and hashed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from trainers.contract import run_folder
from trainers.script.files import sha256_file


class MissingOutputsError(Exception):
    """A pattern matched nothing. The text names all such patterns."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file relative to the folder of outputs."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """``outputs`` are those that were asked for; ``besides`` what else was kept, ``over`` what was too much, each a
    path in the working directory with its size. ``renamed``: path in the working directory → path below the folder of
    outputs, of files whose place there was taken."""

    outputs: list[Output]
    besides: dict[str, int]
    over: dict[str, int]
    renamed: dict[str, str]


WORKDIR = "workdir"
"""Folder among the outputs: what the script wrote in its working directory and nobody asked for."""


def gather(
    patterns: Sequence[str],
    *,
    workdir: Path,
    wrote: Sequence[Path],
    outputs: Path,
    limit_bytes: int | None,
    required: bool,
) -> Gathered:
    """Move what the script wrote in its working directory into ``outputs``, and hash what was asked for.

    No file takes the place of another: where one of {run} has the name, that of the working directory gets a free one.

    Args:
        wrote: those of its files, anywhere in its copy of the project, that the snapshot doesn't hold.
        limit_bytes: of what no pattern matches, the smallest files are kept up to so much; None: none of it.
        required: refuse patterns that match nothing.

    Raises:
        MissingOutputsError: a pattern matches no file in either folder.
        OSError: a file can't be moved.
    """
    in_run: set[str] = set()
    asked: dict[Path, str] = {}
    missing = []
    for pattern in patterns:
        glob = pattern.removeprefix("{run}/")
        matched = {path.relative_to(outputs).as_posix() for path in _files(outputs, glob)}
        own = set(wrote) & set(_files(workdir, glob)) if glob == pattern else set()
        asked |= {path: path.relative_to(workdir).as_posix() for path in own}
        in_run |= matched
        missing += [] if matched or own else [pattern]
    if missing and required:
        raise MissingOutputsError(", ".join(missing))
    rest = sorted(set(wrote) - asked.keys()) if limit_bytes is not None else []
    besides, over = _within(rest, limit_bytes or 0)
    places = {path: asked[path] for path in sorted(asked)}
    # those below the working directory first: of up/x and ../x, both are up/x here, the one of that name keeps it
    for path in sorted(besides, key=lambda path: (not path.is_relative_to(workdir), path)):
        places[path] = f"{WORKDIR}/{_named(path, workdir)}"
    renamed = {}
    for path, name in places.items():
        target = _free(outputs, name)
        if target != name:
            renamed[os.path.relpath(path, workdir)] = places[path] = target
        _move(path, outputs / target)
    return Gathered(
        outputs=[_output(outputs, name) for name in sorted(in_run | {places[path] for path in asked})],
        besides={places[path].removeprefix(f"{WORKDIR}/"): size for path, size in besides.items()},
        over={_named(path, workdir): size for path, size in over.items()},
        renamed=renamed,
    )


def _named(path: Path, workdir: Path) -> str:
    """Where it lay from the working directory; ``up/`` stands for a folder above."""
    return "/".join("up" if part == ".." else part for part in Path(os.path.relpath(path, workdir)).parts)


def _free(outputs: Path, name: str) -> str:
    """A name at which nothing lies yet, nor a file where it needs a folder: ``a-2/m.pt``, ``m-2.pt``, … if need be."""
    free = Path()
    *folders, last = Path(name).parts
    for folder in folders:
        free /= _numbered(folder, lambda path: path.is_dir() or not os.path.lexists(path), outputs / free)
    return (free / _numbered(last, lambda path: not os.path.lexists(path), outputs / free)).as_posix()


def _numbered(name: str, is_free: Callable[[Path], bool], folder: Path) -> str:
    stem, suffix = os.path.splitext(name)  # noqa: PTH122  (of a name alone)
    names = chain([name], (f"{stem}-{number}{suffix}" for number in count(2)))
    return next(one for one in names if is_free(folder / one))


def _within(paths: Sequence[Path], limit_bytes: int) -> tuple[dict[Path, int], dict[Path, int]]:
    """Path → size of those that are kept, the smallest first, and of the rest."""
    sizes = {path: path.stat().st_size for path in paths}
    total, kept = 0, dict[Path, int]()
    for path in sorted(paths, key=lambda path: sizes[path]):
        total += sizes[path]
        if total <= limit_bytes:
            kept[path] = sizes[path]
    return kept, {path: size for path, size in sizes.items() if path not in kept}


def left(run_dir: Path) -> dict[str, str]:
    """Each file that an attempt leaves, relative to the run folder → its sha256; so one that is altered later is known.

    Links to folders are not followed. Raises OSError.
    """
    folders = (run_dir / run_folder.CHECKPOINTS, run_dir / run_folder.OUTPUTS)
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for name in (run_folder.METRICS, run_folder.OUTPUT_DIGESTS) if (path := run_dir / name).exists()]
    return {path.relative_to(run_dir).as_posix(): sha256_file(path) for path in [*found, *kept]}


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Files that a pattern matches, and all files in folders that it matches."""
    for path in sorted(folder.glob(pattern)):
        for inside in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if inside.is_file() and "__pycache__" not in inside.parts:
                yield inside


def _move(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)


def _output(folder: Path, name: str) -> Output:
    path = folder / name
    return Output(path=name, sha256=sha256_file(path), size_bytes=path.stat().st_size)
