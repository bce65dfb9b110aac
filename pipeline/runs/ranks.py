"""What the ranks of a run's newest attempt do: which one is behind, which one is slow, which hosts are still awaited.

The command that follows an attempt writes the state of its ranks to ranks.json; ``doit status``, the live view and
commands that wait for the run show it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low

from pipeline.core import documents
from pipeline.core.printable import printable, without_colours
from pipeline.core.tables import counted, first_of
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.contents import nodes_of
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder
from trainers.contract.beats import Phase, RankBeat, Usage, phase_words
from trainers.contract.records import as_json, from_json

FILE = "ranks.json"
SLOWER = 1.2  # times the median; equal hosts differ by less
LEAST_LOST_S = 2.0  # a smaller loss may be chance
_HEAD_BYTES = 256 << 10  # torchrun prints its rendezvous at the start of a log
_TAIL_BYTES = 64 << 10  # enough for the last lines of metrics.jsonl
_MOST_HOSTS = 4  # hosts that one message names
_MOST_QUOTED = 120  # characters of a script's line
_RANK_PREFIX = re.compile(r"^(?:-|\d+) \| ")  # in a host's log: ``3 | `` before a line of rank 3, ``- | `` of no rank
_TORCH_CLIENT_ERROR = re.compile(r"The client socket has (?:failed to connect|timed out)[^\n]*")
IDLE_S = 5.0  # without work a script's rank counts as idle after this time; waits between two batches are shorter


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank as it last reported. A rank of a script reports neither steps nor phases: its agent watches whether it
    works (uses the processor, reads, writes or prints)."""

    rank: int
    host: str
    step: int  # from 1; 0: none begun, and always for a script
    phase: int  # for a script always Phase.RUNNING_A_SCRIPT
    for_s: float  # seconds since the phase began; for a script: seconds since the rank was last seen at work
    own_s: float  # seconds that it has computed in total, without waiting for others


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
    """Write ranks.json into the folder of an attempt; ``hosts``: how busy each host is, if known. Raises OSError."""
    temporary = folder / f".{FILE}.tmp"
    value = {
        "ranks": [asdict(row) for row in rows],
        "notes": list(notes),
        "hosts": {host: as_json(usage) for host, usage in (hosts or {}).items()},
    }
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(folder / FILE)


def read(folder: Path) -> tuple[list[RankRow], list[str]]:
    """Read the ranks' states and the notes about them from an attempt's folder; nothing if the file is unreadable."""
    value = documents.read_or_empty(folder / FILE)
    try:
        return [RankRow(**row) for row in value["ranks"]], [str(note) for note in value["notes"]]
    except (KeyError, TypeError):
        return [], []


def usages(folder: Path) -> dict[str, Usage]:
    """Read how busy each host is from an attempt's folder; nothing if the file is unreadable."""
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
    # all at one step, some waiting for the others: those that don't wait hold them up
    if not behind and any(row.phase == Phase.WAITING for row in rows):
        behind = [row for row in rows if row.phase != Phase.WAITING]
    slow = [row for row in behind if row.for_s >= 1.0]  # a shorter delay is nothing to report
    if not slow:
        return steps
    shown = [
        f"rank {row.rank} on {row.host} (step {row.step}, {phase_words(row.phase)} {row.for_s:.0f} s)"
        for row in slow[:3]
    ]
    more = f" and {counted(len(slow) - 3, 'more rank')}" if len(slow) > 3 else ""
    return f"{steps}; behind: {', '.join(shown)}{more}"


def _of_script(rows: Sequence[RankRow]) -> str:
    """Return ``3 at work; idle: rank 1 on node1 for 12 s``: a script's ranks report no steps."""
    idle = [row for row in rows if row.for_s >= IDLE_S]  # for a script: seconds without work
    at_work = f"{len(rows) - len(idle)} at work" if len(idle) < len(rows) else ""
    shown = [f"rank {row.rank} on {row.host} for {row.for_s:.0f} s" for row in idle[:3]]
    more = f" and {counted(len(idle) - 3, 'more rank')}" if len(idle) > 3 else ""
    return "; ".join(filter(None, [at_work, f"idle: {', '.join(shown)}{more}" if idle else ""]))


def slow(rows: Sequence[RankRow]) -> list[str]:
    """Return a sentence for each rank whose own work took at least a fifth longer than the median rank's."""
    if len(rows) < 2:
        return []
    usual_s = median_low([row.own_s for row in rows])
    if not usual_s:
        return []
    slow = [row for row in rows if row.own_s > SLOWER * usual_s and row.own_s - usual_s >= LEAST_LOST_S]
    return [
        f"rank {row.rank} on {row.host} was slow: its own work took {row.own_s:.1f} s, {row.own_s / usual_s - 1:.0%} "
        f"more than the median rank's {usual_s:.1f} s, and the others waited {row.own_s - usual_s:.1f} s for it"
        for row in slow
    ]


# ------------------------------------------------------------------------------- in words, from the run folder
def under_way(folder: RunFolder) -> str:
    """Return what the ranks of the newest attempt do, from rank 0's last metrics, as words that follow "still"."""
    rows = last_rows(folder)
    if rows and rows[-1].attempt in journal.known_attempts(folder.path)[-1:]:  # rows may be of an earlier attempt
        return f"{rows[-1].doing}, last reported step {rows[-1].step}"
    if (awaited := hosts_awaited(folder)) is not None:
        return awaited
    if not folder.program.is_ours:
        return f"running the script; {no_metric(folder)}"
    if not rows:
        return "waiting for the first step; the ranks import torch and read the data"
    step = checkpoints.newest_step(folder.path)
    start = f"checkpoint of step {step}" if step else "beginning"
    return f"starting again from the {start}; the ranks import torch and read the data"


def hosts_awaited(folder: RunFolder) -> str | None:
    """Return which hosts the rendezvous waits for, as words that follow "still"; None if all have joined, or none."""
    plan = folder.read_json(run_folder.PLAN) or {}
    nodes = nodes_of(plan)
    if len(nodes) < 2:
        return None
    rendezvous = f"{plan.get('master_addr')}:{plan.get('master_port')}"
    logs = folder.path / run_folder.ATTEMPTS / str(plan.get("attempt"))
    log_by_host = {str(node.get("host")): _head(logs / f"{node.get('host')}.log") for node in nodes}
    joined = [host for host, log in log_by_host.items() if f"torchrun is at {rendezvous}," in log]
    awaited = [host for host in log_by_host if host not in joined]
    if not joined or not awaited:
        return None
    errors = {host: _TORCH_CLIENT_ERROR.findall(log_by_host[host]) for host in awaited}
    reasons = [f"{host} says: {lines[-1].strip()}" for host, lines in errors.items() if lines]
    reason = f": {'; '.join(reasons[:_MOST_HOSTS])}" if reasons else ", where torchrun starts (it imports torch)"
    have = "has" if len(joined) == 1 else "have"
    return f"waiting for {first_of(awaited, _MOST_HOSTS)}{reason}; {first_of(joined, _MOST_HOSTS)} {have} come"


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def no_metric(folder: RunFolder, *, quoted: bool = False) -> str:
    """Return the age of the newest line of a script that has logged no metric; ``quoted``: its text, too."""
    numbers = (int(path.name) for path in folder.path.glob("attempts/*") if path.name.isdigit())
    logs = [path for path in folder.path.glob(f"attempts/{max(numbers, default=0)}/*.log") if path.stat().st_size]
    if not logs:
        return "no logged metric so far, no line either"
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    line = _last_line(newest) if quoted else ""
    age_s = max(0.0, time.time() - newest.stat().st_mtime)
    return f"no logged metric so far, its last line came {age_s:.0f} s ago{f': {line}' if line else ''}"


def _last_line(log: Path) -> str:
    """Return the last line of a log that isn't blank, without the prefix of its rank; a progress bar's last state."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    text = next((line for line in reversed(lines) if line.strip()), "")
    return printable(without_colours(_RANK_PREFIX.sub("", text)).strip())[:_MOST_QUOTED]


def outliving_processes(folder: RunFolder) -> Iterator[str]:
    """Yield ``node1: process 12 (…)`` for each host's processes that outlived their script and had to be ended."""
    attempt = f"{run_folder.ATTEMPTS}/{journal.attempts(folder.journal)}"
    for path in sorted(folder.path.glob(f"{attempt}/*.exit.json")):
        end = folder.read_json(f"{attempt}/{path.name}") or {}
        if end.get("code") == 0 and end.get("outlived"):
            yield f"{end.get('host')}: {end['outlived']}"


def last_rows(folder: RunFolder) -> list[metrics_file.MetricsRow]:
    """Return the rows in the last 64 KiB of metrics.jsonl."""
    return metrics_file.rows(folder.path / run_folder.METRICS, tail_bytes=_TAIL_BYTES)
