"""Where each rank of an attempt stands, as its controller last heard: attempts/N/ranks.json, and what it says.

Rewritten every few seconds and worth nothing after a crash, so nothing waits for the disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from pipeline.core.tables import counted
from trainers.contract.beats import Phase, RankBeat, Usage, as_json, phase_words

FILE = "ranks.json"
SLOWER = 1.2  # times the median: what hosts of one kind differ by is less
LEAST_LOST_S = 2.0  # less says nothing of a host
IDLE_S = 5.0  # for which a script's rank did nothing: less is a wait between two batches


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank: its step (from 1), what it is at and since when, the seconds of its own work on its steps."""

    rank: int
    host: str
    step: int
    phase: int
    for_s: float
    own_s: float


def rows(told: Iterable[tuple[str, RankBeat]]) -> list[RankRow]:
    """Of what each rank told last, with its host, in the order of the ranks."""
    found = [
        RankRow(rank=beat.rank, host=host, step=beat.step, phase=beat.phase, for_s=beat.for_s, own_s=beat.own_s)
        for host, beat in told
    ]
    return sorted(found, key=lambda row: row.rank)


def write(
    folder: Path, told: Sequence[RankRow], notes: Sequence[str] = (), hosts: Mapping[str, Usage] | None = None
) -> None:
    """Put it where ``doit status`` looks. ``hosts``: how busy each is, as far as it told. Raises OSError."""
    temporary = folder / f".{FILE}.tmp"
    value = {
        "ranks": [asdict(row) for row in told],
        "notes": list(notes),
        "hosts": {host: as_json(usage) for host, usage in (hosts or {}).items()},
    }
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(folder / FILE)


def read(folder: Path) -> tuple[list[RankRow], list[str]]:
    """The ranks and the notes on them; none where nothing readable is there."""
    try:
        value: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [RankRow(**row) for row in value["ranks"]], [str(note) for note in value["notes"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return [], []


def usages(folder: Path) -> dict[str, Usage]:
    """How busy each host is; none where nothing readable is there."""
    try:
        value: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {str(host): Usage.of(told) for host, told in value["hosts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def lagging(told: Sequence[RankRow]) -> str:
    """``steps 57 to 58; behind: rank 1 on node1 (step 57, loading data 12 s)``, or ``all at step 58``; of a script
    ``2 at work``, or which do nothing."""
    if not told:
        return ""
    if any(row.phase == Phase.RUNNING_A_SCRIPT for row in told):
        return _of_script(told)
    first, last = min(row.step for row in told), max(row.step for row in told)
    steps = f"all at step {last}" if first == last else f"steps {first} to {last}"
    behind = [row for row in told if row.step < last]
    if not behind and any(row.phase == Phase.WAITING for row in told):  # the others wait for whoever doesn't
        behind = [row for row in told if row.phase != Phase.WAITING]
    slow = [row for row in behind if row.for_s >= 1.0]
    if not slow:
        return steps
    shown = [f"rank {row.rank} on {row.host} (step {row.step}, {_doing(row)} {row.for_s:.0f} s)" for row in slow[:3]]
    more = f" and {counted(len(slow) - 3, 'more rank')}" if len(slow) > 3 else ""
    return f"{steps}; behind: {', '.join(shown)}{more}"


def _of_script(told: Sequence[RankRow]) -> str:
    idle = [row for row in told if row.for_s >= IDLE_S]
    at_work = f"{len(told) - len(idle)} at work" if len(idle) < len(told) else ""
    shown = [f"rank {row.rank} on {row.host} for {row.for_s:.0f} s" for row in idle[:3]]
    more = f" and {counted(len(idle) - 3, 'more rank')}" if len(idle) > 3 else ""
    return "; ".join(filter(None, [at_work, f"idle: {', '.join(shown)}{more}" if idle else ""]))


def slow_ranks(told: Sequence[RankRow]) -> list[str]:
    """A sentence for each rank whose own work took more than a fifth longer than the median's."""
    if len(told) < 2:
        return []
    usual_s = median_low([row.own_s for row in told])
    slow = [row for row in told if usual_s and row.own_s > SLOWER * usual_s and row.own_s - usual_s >= LEAST_LOST_S]
    return [
        f"rank {row.rank} on {row.host} was slow: its own work took {row.own_s:.1f} s, {row.own_s / usual_s - 1:.0%} "
        f"more than the median rank's {usual_s:.1f} s, and the others waited {row.own_s - usual_s:.1f} s for it"
        for row in slow
    ]


def _doing(row: RankRow) -> str:
    return phase_words(row.phase)
