"""The last reports of an attempt's ranks, which ``doit status`` and the live view show: who is behind, who is slow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

from pipeline.core import documents
from pipeline.core.tables import counted
from trainers.contract.beats import Phase, RankBeat, Usage, phase_words
from trainers.contract.records import as_json, from_json

FILE = "ranks.json"
SLOWER = 1.2  # times the median; equal hosts differ by less
LEAST_LOST_S = 2.0  # a smaller loss may be chance
IDLE_S = 5.0  # after which a script's rank counts as idle; waits between two batches are shorter


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank: its step (from 1), its activity and since when, and the seconds of its own work."""

    rank: int
    host: str
    step: int
    phase: int
    for_s: float
    own_s: float


def rows_of(beats: Iterable[tuple[str, RankBeat]]) -> list[RankRow]:
    """Return the last reports of all ranks, with their hosts, in the order of the ranks."""
    rows = [
        RankRow(rank=beat.rank, host=host, step=beat.step, phase=beat.phase, for_s=beat.for_s, own_s=beat.own_s)
        for host, beat in beats
    ]
    return sorted(rows, key=lambda row: row.rank)


def write(
    folder: Path, rows: Sequence[RankRow], notes: Sequence[str] = (), hosts: Mapping[str, Usage] | None = None
) -> None:
    """Write the ranks' states for ``doit status``; ``hosts``: how busy each is, if known. Raises OSError."""
    temporary = folder / f".{FILE}.tmp"
    value = {
        "ranks": [asdict(row) for row in rows],
        "notes": list(notes),
        "hosts": {host: as_json(usage) for host, usage in (hosts or {}).items()},
    }
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(folder / FILE)


def read(folder: Path) -> tuple[list[RankRow], list[str]]:
    """Read the ranks' states and the notes about them; nothing if the file is unreadable."""
    value = documents.read_or_empty(folder / FILE)
    try:
        return [RankRow(**row) for row in value["ranks"]], [str(note) for note in value["notes"]]
    except (KeyError, TypeError):
        return [], []


def usages(folder: Path) -> dict[str, Usage]:
    """Read how busy each host is; nothing if the file is unreadable."""
    value = documents.read_or_empty(folder / FILE)
    try:
        return {str(host): from_json(Usage, usage) for host, usage in value["hosts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def lagging(rows: Sequence[RankRow]) -> str:
    """Return ``steps 57 to 58; behind: rank 1 on node1 (step 57, loading data 12 s)``, or ``all at step 58``."""
    if not rows:
        return ""
    if any(row.phase == Phase.RUNNING_A_SCRIPT for row in rows):
        return _of_script(rows)
    first, last = min(row.step for row in rows), max(row.step for row in rows)
    steps = f"all at step {last}" if first == last else f"steps {first} to {last}"
    behind = [row for row in rows if row.step < last]
    if not behind and any(row.phase == Phase.WAITING for row in rows):  # ranks that don't wait hold up the others
        behind = [row for row in rows if row.phase != Phase.WAITING]
    slow = [row for row in behind if row.for_s >= 1.0]
    if not slow:
        return steps
    shown = [
        f"rank {row.rank} on {row.host} (step {row.step}, {phase_words(row.phase)} {row.for_s:.0f} s)"
        for row in slow[:3]
    ]
    more = f" and {counted(len(slow) - 3, 'more rank')}" if len(slow) > 3 else ""
    return f"{steps}; behind: {', '.join(shown)}{more}"


def _of_script(rows: Sequence[RankRow]) -> str:
    idle = [row for row in rows if row.for_s >= IDLE_S]
    at_work = f"{len(rows) - len(idle)} at work" if len(idle) < len(rows) else ""
    shown = [f"rank {row.rank} on {row.host} for {row.for_s:.0f} s" for row in idle[:3]]
    more = f" and {counted(len(idle) - 3, 'more rank')}" if len(idle) > 3 else ""
    return "; ".join(filter(None, [at_work, f"idle: {', '.join(shown)}{more}" if idle else ""]))


def slow(rows: Sequence[RankRow]) -> list[str]:
    """Return a sentence for each rank whose own work took a fifth longer than the median's."""
    if len(rows) < 2:
        return []
    usual_s = median_low([row.own_s for row in rows])
    slow = [row for row in rows if usual_s and row.own_s > SLOWER * usual_s and row.own_s - usual_s >= LEAST_LOST_S]
    return [
        f"rank {row.rank} on {row.host} was slow: its own work took {row.own_s:.1f} s, {row.own_s / usual_s - 1:.0%} "
        f"more than the median rank's {usual_s:.1f} s, and the others waited {row.own_s - usual_s:.1f} s for it"
        for row in slow
    ]
