"""What a script leaves: files that ``program.outputs`` names, copied beside what it wrote into {run}, and hashed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.script.files import sha256_file


class MissingOutputsError(Exception):
    """A pattern matched nothing. The text names all such patterns."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file relative to the folder of outputs."""

    path: str
    sha256: str
    size_bytes: int


def gather(patterns: Sequence[str], *, workdir: Path, snapshot: Path, outputs: Path) -> list[Output]:
    """Copy what the script left in its working directory into ``outputs``, and hash it with what lies there already.

    A file of the working directory that came with the snapshot, unaltered, is none of its results.

    Args:
        snapshot: the folder from which the working directory was copied, with times.

    Raises:
        MissingOutputsError: a pattern matches no file in either folder.
        OSError: a file can't be copied.
    """
    found: set[str] = set()
    missing = []
    for pattern in patterns:
        glob = pattern.removeprefix("{run}/")
        matched = {path.relative_to(outputs).as_posix() for path in _files(outputs, glob)}
        for path in _files(workdir, glob) if glob == pattern else ():
            inside = path.relative_to(workdir)
            if not _is_unaltered(path, snapshot / inside):
                _copy(path, outputs / inside)
                matched.add(inside.as_posix())
        found |= matched
        missing += [] if matched else [pattern]
    if missing:
        raise MissingOutputsError(", ".join(missing))
    return [_output(outputs, name) for name in sorted(found)]


def left(run_dir: Path) -> dict[str, str]:
    """Each file that an attempt leaves, relative to the run folder → its sha256; so one that is altered later is known.

    Links to folders are not followed. Raises OSError.
    """
    folders = (run_dir / "checkpoints", run_dir / "outputs")
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for name in ("metrics.jsonl", "outputs.json") if (path := run_dir / name).exists()]
    return {path.relative_to(run_dir).as_posix(): sha256_file(path) for path in [*found, *kept]}


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Files that a pattern matches, and all files in folders that it matches."""
    for path in sorted(folder.glob(pattern)):
        for inside in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if inside.is_file() and "__pycache__" not in inside.parts:
                yield inside


def _is_unaltered(path: Path, source: Path) -> bool:
    try:
        then, now = source.stat(), path.stat()
    except OSError:
        return False
    return (then.st_size, then.st_mtime_ns) == (now.st_size, now.st_mtime_ns)


def _copy(path: Path, target: Path) -> None:
    """Whole or not at all: a name that appears holds everything."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copy2(path, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _output(folder: Path, name: str) -> Output:
    path = folder / name
    return Output(path=name, sha256=sha256_file(path), size_bytes=path.stat().st_size)
