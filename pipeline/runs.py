"""The run folders taken together: finding one by its key, listing them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import journal
from pipeline.errors import UsageError, hint
from pipeline.key import KEY_LENGTH
from pipeline.runfolder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run as a list shows it; ``accuracy`` is test/accuracy in 0..1 once the run is finished."""

    key: str
    state: str
    what: str
    nodes: str
    accuracy: float | None
    synthetic: bool
    unix_time: float


def find(runs_dir: Path, named: str) -> RunFolder:
    """The run whose key begins with ``named``. Raises UsageError: none or several, or it is newer than this code."""
    keys = [path.name for path in _folders(runs_dir)]
    found = [key for key in keys if named and key.startswith(named)]
    if len(found) == 1:
        folder = RunFolder(runs_dir / found[0])
        folder.refuse_newer()
        return folder
    if found:
        raise UsageError(f"run={named} is the beginning of {len(found)} keys: {', '.join(sorted(found))}")
    raise UsageError(f"run={named}: no such run under {runs_dir}; {hint(named, keys)}")


def rows(runs_dir: Path) -> list[Row]:
    """All runs, oldest first."""
    return sorted((_row(RunFolder(path)) for path in _folders(runs_dir)), key=lambda row: row.unix_time)


def finished_parts(runs_dir: Path) -> dict[str, dict[str, Any]]:
    """key → what key.json holds, of every finished run."""
    parts = {}
    for path in _folders(runs_dir):
        known = RunFolder(path).read_json("key.json")
        if known is not None and (path / "result.json").is_file():
            parts[path.name] = known
    return parts


def _folders(runs_dir: Path) -> Iterator[Path]:
    if runs_dir.is_dir():
        yield from (
            path for path in runs_dir.iterdir() if len(path.name) == KEY_LENGTH and (path / "key.json").is_file()
        )


def _row(folder: RunFolder) -> Row:
    result = folder.read_json("result.json") or {}
    config = folder.read_json("config.json") or {}
    entries = journal.read(folder.journal)
    last = entries[-1] if entries else None
    nodes = (folder.read_json("key.json") or {}).get("topology", {}).get("nproc_per_node", [])
    return Row(
        key=folder.key,
        state=str(result.get("state") or (last.state if last else "PLANNED")),
        what=" ".join(str(config.get(group, {}).get("name", "?")) for group in ("dataset", "model", "optimizer")),
        nodes=" + ".join(str(count) for count in nodes) + " ranks",
        accuracy=result.get("metrics", {}).get("test/accuracy"),
        synthetic=config.get("dataset", {}).get("name") == "synthetic",
        unix_time=last.time if last else folder.path.stat().st_mtime,
    )
