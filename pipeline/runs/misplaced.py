"""What stands in a run folder in the place of something of another kind: a directory where a file belongs.

Whoever reads takes it for a damaged file. Before a command writes into the folder it is renamed to ``*.bad``: nobody
knows what is in it, and no file can be written over a directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from pipeline.core.errors import PacelineError

_FILES = frozenset((".json", ".jsonl", ".yaml", ".log", ".patch", ".png", ".pt"))  # how the files of a run end
_FOLDERS = ("attempts", "checkpoints", "code", "evaluation")
_LINK = "data"
_WITH_FILES = (".", "attempts/*", "checkpoints", "evaluation")
_WRITTEN_IN = (".", "attempts", "attempts/*", "evaluation", "work", "work/*")


def refuse_links(run_dir: Path) -> None:
    """Before anything is written into the folder. Raises PacelineError: a link in it, but for that to the data, would
    take what is written elsewhere."""
    for path in (path for pattern in _WRITTEN_IN for path in sorted(run_dir.glob(f"{pattern}/*"))):
        if path.is_symlink() and path != run_dir / _LINK:
            raise PacelineError(
                f"{path} is a link to {path.readlink()}, where what is written into the run folder would land; a run "
                f"folder has no link but {_LINK}",
                hint=f"rm {shlex.quote(str(path))}, or what it leads to in its place, then the same command",
            )


def set_aside(run_dir: Path) -> Iterator[str]:
    """Rename what is misplaced; yields a line about each. Raises OSError."""
    for path in _misplaced(run_dir):
        aside = _free_name(path)
        kind = "a directory" if path.is_dir() else "a file" if path.is_file() else "a pipe or device"
        path.rename(aside)
        yield f"WARNING: {path} was {kind}, which it never is in a run folder; it is {aside.name} now"


def _misplaced(run_dir: Path) -> list[Path]:
    inside = (path for pattern in _WITH_FILES for path in run_dir.glob(f"{pattern}/*"))
    files = [path for path in inside if path.suffix in _FILES and path.exists() and not path.is_file()]
    folders = [path for name in _FOLDERS if (path := run_dir / name).exists() and not path.is_dir()]
    link = run_dir / _LINK
    return files + folders + ([link] if link.exists() and not link.is_symlink() else [])


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{f'.{number}' if number else ''}.bad") for number in count())
    return next(name for name in names if not name.exists())
