"""Helpers of this package: the folder of a script's working files, atomic writes of small files, lines for the user."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.contract.seal import sealed_text
from trainers.core.files import replace

WARNING, NOTE = "WARNING: ", "note: "
"""Prefixes of lines that the user sees at once, and not only in the host's log."""


def work_folder(run_dir: Path, node_rank: int) -> Path:
    """Return the folder of one node with its copy of the snapshot; it is removed after a good end."""
    return run_dir / run_folder.WORK / f"node{node_rank}"


def write_text(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all. Raises OSError."""
    replace(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with ``write_text``. Raises OSError; ValueError for NaN."""
    write_text(path, json.dumps(value, allow_nan=False, indent=2) + "\n")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write sealed JSON with ``write_text``. Raises OSError, ValueError."""
    write_text(path, sealed_text(value))


def say(text: str) -> None:
    """Print a line of Paceline's own, in the log of this host among those of the ranks."""
    print(f"paceline: {text}", flush=True)


def in_words(names: Sequence[str], size_bytes: int | None = None) -> str:
    """Return a phrase such as ``results.csv, logs/a.txt and 3 more (1.5 GiB)``."""
    shown = ", ".join(map(printable, names[:3])) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    return shown if size_bytes is None else f"{shown} ({_size(size_bytes)})"


def printable(name: str) -> str:
    """Return a name that fits into a line: bytes that aren't UTF-8, and line ends, are escaped."""
    return name if name.isprintable() else repr(name)[1:-1]


def _size(count_bytes: int) -> str:
    """Return a size such as ``1.5 GiB``, in the units in which limits are set."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count_bytes >= factor:
            return f"{count_bytes / factor:.1f} {unit}"
    return f"{count_bytes} B"
