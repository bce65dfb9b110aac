"""When things ran: the attempts of runs, with their pauses, and the trials of a sweep by slot. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.comparing.charts import Bar
from pipeline.comparing.groups import Group
from pipeline.comparing.reading import ComparedRun
from pipeline.core.specs import UNDER_WAY, State
from pipeline.core.tables import duration
from pipeline.runs import journal
from pipeline.runs.metrics_file import MetricsRow
from pipeline.sweep.folder import TrialEntry

_PAUSE_S, _PAUSE = 30.0, 10.0  # a pause is longer than this, and than so many times the usual time between two lines
_IDLE, _SHORTENED = 0.5, 0.05  # idle times of this share of the busy time are shortened to that
_MOST_ROWS = 30


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run; times are unix seconds.

    Attributes:
        started: when its ranks were started; None if they were not.
        state: how it ended; '' if the end was not noted.
        why: the reason of a failure, and what was noted about ranks that held the others up.
        pauses: beginning and end of the stretches in which no metrics were logged, though they usually are.
    """

    number: int
    begun: float
    started: float | None
    ended: float
    state: str
    why: str
    pauses: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bars in named rows, from 0 s on. ``left_out_s``: idle time by which the axis is shortened."""

    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    left_out_s: float = 0.0


def attempts(run: ComparedRun, rows: Sequence[MetricsRow]) -> list[Attempt]:
    """Return the attempts of a run, the first one first. ``rows`` are those of its metrics.jsonl."""
    by_number: dict[int, list[journal.Entry]] = {}
    for entry in run.entries:
        by_number.setdefault(entry.attempt, []).append(entry)
    logged: dict[int, list[float]] = {}
    for row in rows:
        with suppress(ValueError, IndexError):  # a row without the id of an attempt
            logged.setdefault(journal.attempt_number(row.attempt), []).append(row.time_s)
    return [
        _attempt(number, entries, sorted(logged.get(number, [])), run.notes.get(number, ()))
        for number, entries in sorted(by_number.items())
    ]


def _attempt(number: int, entries: Sequence[journal.Entry], logged: Sequence[float], notes: Sequence[str]) -> Attempt:
    end = next((entry for entry in reversed(entries) if entry.state not in UNDER_WAY), None)
    started = next((entry.time for entry in entries if entry.state is State.RUNNING), None)
    last = max([entries[-1].time, *logged[-1:]])
    reason = [] if end is None or not end.detail else [end.detail]
    gaps = [after - before for before, after in pairwise(logged)]
    pause_s = max(_PAUSE_S, _PAUSE * statistics.median(gaps)) if gaps else _PAUSE_S
    return Attempt(
        number=number,
        begun=entries[0].time,
        started=started,
        ended=max(entries[0].time, started or 0.0, last if end is None else end.time),  # clocks may be set back
        state="" if end is None else end.state,
        why="; ".join([*reason, *notes]),
        pauses=tuple((before, after) for before, after in pairwise(logged) if after - before > pause_s),
    )


def of_attempts(attempts_by_name: Mapping[str, Sequence[Attempt]]) -> Timeline:
    """Return a row per run: grey while an attempt starts, then in the colour of its end; pauses are marked."""
    shown = [*attempts_by_name.items()][:_MOST_ROWS]
    bars = []
    for row, (_, of_run) in enumerate(shown):
        for one in of_run:
            ink = "good" if one.state == State.FINISHED else "bad" if one.state else "rest"
            begun = one.ended if one.started is None else one.started
            lasted = duration(max(0.0, one.ended - one.begun))
            title = f"attempt {one.number}: {one.state or 'no end noted'} after {lasted}"
            bars.append(Bar(row=row, begin=one.begun, end=begun, ink="soft", title=f"attempt {one.number} starts"))
            bars.append(Bar(row=row, begin=begun, end=one.ended, ink=ink, text=f"{one.number}", title=title))
            for begin, end in one.pauses:
                said = f"attempt {one.number}: nothing logged for {duration(end - begin)}"
                bars.append(Bar(row=row, begin=begin, end=end, ink="q0", title=said))
    return _from_0([name for name, _ in shown], bars)


def of_sweep(
    entries: Sequence[TrialEntry],
    groups: Sequence[Group],
    rows: Mapping[str, Sequence[MetricsRow]],
    colours: Mapping[str, int],
) -> Timeline | None:
    """Return a row per slot with the trials that ran in it; None if the journal has no slots (older sweeps).

    A bar ends where its slot takes the next trial: the evaluation of the trial before may go on meanwhile.
    """
    group_by_key = {run.key: group for group in groups for run in group.runs}
    begun: dict[int, TrialEntry] = {}
    ran: list[tuple[TrialEntry, TrialEntry | None]] = []
    for entry in entries:
        if entry.state is not State.RUNNING:
            if (start := begun.pop(entry.number, None)) is not None:
                ran.append((start, entry))
        elif entry.slot is not None:
            begun[entry.number] = entry
    ran += [(start, None) for start in begun.values()]
    slots = sorted({start.slot for start, _ in ran if start.slot is not None})
    bars = []
    for row, slot in enumerate(slots):
        in_slot = sorted((pair for pair in ran if pair[0].slot == slot), key=lambda pair: pair[0].time)
        for (start, end), following in zip(in_slot, [*in_slot[1:], None], strict=True):
            last = max([start.time, *(one.time_s for one in rows.get(start.key, ())[-1:])]) if end is None else end.time
            until = max(start.time, last if following is None else min(last, following[0].time))
            bars.append(_trial(row, start, until, end, group_by_key.get(start.key), colours))
    return _from_0([f"slot {slot + 1}" for slot in slots], bars) if bars else None


def _trial(
    row: int, start: TrialEntry, until: float, end: TrialEntry | None, group: Group | None, colours: Mapping[str, int]
) -> Bar:
    label = "" if group is None else group.label
    state = "no end noted" if end is None else str(end.state)
    finished = end is not None and end.state in (State.FINISHED, State.PRUNED)
    ink = "bad" if end is not None and not finished else f"c{colours[label]}" if label in colours else "soft"
    what = start.key if group is None else f"{label} {group.title}"
    title = f"trial {start.number} {what}: {state} after {duration(until - start.time)}"
    return Bar(row=row, begin=start.time, end=until, ink=ink, text=label, title=title)


def _from_0(rows: Sequence[str], bars: Sequence[Bar]) -> Timeline:
    """Let the bars begin at 0 s, and shorten long stretches in which nothing ran, as before a command was repeated."""
    ends = sorted({time for bar in bars for time in (bar.begin, bar.end)})
    stretches = [*pairwise(ends)]
    idle = {pair for pair in stretches if not any(bar.begin < pair[1] and bar.end > pair[0] for bar in bars)}
    busy = sum(end - begin for begin, end in stretches if (begin, end) not in idle)
    at, left_out = {ends[0]: 0.0} if ends else {}, 0.0
    for begin, end in stretches:
        length = end - begin
        if (begin, end) in idle and length > _IDLE * busy:
            left_out += length - _SHORTENED * busy
            length = _SHORTENED * busy
        at[end] = at[begin] + length
    moved = tuple(replace(bar, begin=at[bar.begin], end=at[bar.end]) for bar in bars)
    return Timeline(rows=tuple(rows), bars=moved, left_out_s=left_out)
