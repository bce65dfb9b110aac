"""The metrics.jsonl of a script's run, one line per row, in the format of the built-in trainer's. Several attempts
write it; rows that an attempt logs again move to another file."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainers.script.files import printable, write_text

_CUT_S = 0.2  # pause after the file has shrunk: readers look every 0.05 s, and must see it before it grows again


@dataclass(frozen=True, kw_only=True)
class Row:
    """Metrics of one step, or (``of_end``) of the whole run. ``step``: finished steps; ``epoch``: from 1."""

    time_s: float
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    epoch: int | None = None
    of_end: bool = False

    def as_json(self, attempt: str) -> dict[str, Any]:
        metrics = {name: number for name, number in self.metrics.items() if math.isfinite(number)}
        position = {"t": round(self.time_s, 6), "step": self.step, "epoch": self.epoch}
        return {**position, "metrics": metrics, "attempt": attempt, "doing": "training"}


@dataclass
class LeftOut:
    """Values of one metric that aren't finite: the first, its step, and their number."""

    first: float
    step: int
    count: int = 0

    def as_json(self) -> dict[str, str | int]:
        return {"first": str(self.first), "step": self.step, "count": self.count}


class _RecordedRow(NamedTuple):
    """A row of metrics.jsonl that an earlier attempt wrote: its ``line``, and parts that decide whether it stays."""

    step: int
    epoch: int
    names: frozenset[str]
    line: str


class MetricsFile:
    """Appends rows, and moves rows of earlier attempts that this attempt logs again to the file ``aside``. ``last``:
    metric → newest value. ``step``: the highest; None: no row. ``left_out``: metric → NaN and infinite values.
    ``unstorable_step``: the first step that no tracker can store.
    """

    def __init__(
        self, path: Path, *, aside: Path, say: Callable[[str], None], attempt: str = "", resumes: bool = False
    ) -> None:
        """Read the rows of earlier attempts. Raises OSError. ``say`` is called with a description of moved rows if no
        row stays in the file. ``resumes``: the script was given a checkpoint. Without one it may still find one by
        itself; that is decided by the first step that it logs.
        """
        self._path, self._attempt, self._resumes, self._aside, self._say = path, attempt, resumes, aside, say
        self.last: dict[str, float] = {}
        self.step: int | None = None
        self.left_out: dict[str, LeftOut] = {}
        self.unstorable_step: int | None = None
        self._logged: set[str] = set()  # names of the metrics that this attempt has logged
        self._earlier: list[_RecordedRow] = list(_rows_of(path)) if path.exists() else []
        write_text(path, "".join(row.line for row in self._earlier))
        for row in self._earlier:
            self._remember(json.loads(row.line))

    def append(self, row: Row) -> None:
        """Write the finite metrics; count NaN and infinities. Raises OSError."""
        if not _is_kept(row.step):
            self.unstorable_step = row.step if self.unstorable_step is None else self.unstorable_step
            return
        row = replace(row, metrics=_named(row.metrics))
        for name, number in row.metrics.items():
            if not math.isfinite(number):
                self.left_out.setdefault(name, LeftOut(first=number, step=row.step)).count += 1
        self._move_repeated(row)
        value = row.as_json(self._attempt)
        if value["metrics"]:
            self._write(value)
            self._remember(value)

    def restore(self, rows: Iterable[Row]) -> None:
        """Add rows that an earlier attempt logged but could not record before its end. Raises OSError."""
        contents = [json.loads(row.line) for row in self._earlier]
        recorded = {(content["t"], *content["metrics"]) for content in contents}  # (time, *names of metrics)
        attempt = contents[-1]["attempt"] if contents else self._attempt
        for row in rows:
            value = replace(row, metrics=_named(row.metrics)).as_json(attempt)
            if value["metrics"] and _is_kept(row.step) and (value["t"], *value["metrics"]) not in recorded:
                self._earlier.append(_recorded_row(self._write(value)))
                self._remember(value)

    def _write(self, value: Mapping[str, Any]) -> str:
        """Append a line, and return it as ``_move`` will find it in the file. Raises OSError."""
        line = json.dumps(value, allow_nan=False) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)  # no O_CREAT: a removed run folder isn't created again
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
        return line

    def set_aside(self) -> None:
        """Move all rows of earlier attempts, because the script has no checkpoint to continue from. Raises OSError."""
        self._move(self._earlier)
        self._earlier = []

    def _move_repeated(self, row: Row) -> None:
        """Move the rows of earlier attempts that this one logs again, at its first row of a metric. Raises OSError."""
        names, earlier = row.metrics.keys(), self._earlier
        new_names = names - self._logged
        if not earlier or not new_names:
            return
        if row.of_end:
            # Results of the whole run. A script that resumes from the checkpoint of its last step trains no more and
            # logs only these. So its rows of steps stay; only its earlier results move, which have the same names.
            moved = [old for old in earlier if old.step >= row.step and old.names == names]
        elif self._logged:  # the first row of a further source, such as TensorBoard's files, which may come later
            moved = [old for old in earlier if old.step >= row.step and old.names & new_names]
        elif not self._resumes and _starts_over(earlier, row):  # the very first row
            moved = earlier
        else:  # also the very first row: later steps of the last pass over the steps
            earlier = earlier[_last_pass(earlier, names) :]
            moved = [old for old in earlier if old.step > row.step or (old.step == row.step and old.names & names)]
        self._move(moved)
        self._earlier = [*(Counter(earlier) - Counter(moved)).elements()]
        # results of the whole run don't count: whether the script starts over is decided by its first row of a step
        self._logged |= set() if row.of_end else names

    def _move(self, moved: Sequence[_RecordedRow]) -> None:
        """Move rows to the file ``aside``. Raises OSError."""
        if not moved:
            return
        self._aside.parent.mkdir(parents=True, exist_ok=True)
        with self._aside.open("a", encoding="utf-8") as file:
            file.write("".join(row.line for row in moved))
        staying = [*(Counter(_rows_of(self._path)) - Counter(moved)).elements()]
        if not staying:
            self._say(_in_words([row.step for row in moved]))
        write_text(self._path, "".join(row.line for row in staying))
        self.last, self.step = {}, None
        for row in staying:
            self._remember(json.loads(row.line))
        time.sleep(_CUT_S)

    def _remember(self, value: dict[str, Any]) -> None:
        self.last.update(value["metrics"])
        self.step = max(value["step"], self.step if self.step is not None else value["step"])


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with printable names, because names stand in lines and tables."""
    return {printable(name): number for name, number in metrics.items()}


def _is_kept(step: int) -> bool:
    """Return True if trackers can store the step, in 64 bits."""
    return -(1 << 63) <= step < 1 << 63


def _in_words(steps: Sequence[int]) -> str:
    """Return ``6 rows, of steps 1 to 6``."""
    first, last = min(steps), max(steps)
    of = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{len(steps):,} row{'s' * (len(steps) > 1)}, of {of}"


def _starts_over(earlier: Sequence[_RecordedRow], row: Row) -> bool:
    """Return True if ``row`` isn't behind the first earlier row with one of its metrics, or the first at all."""
    first = next((old for old in earlier if old.names & row.metrics.keys()), earlier[0])
    return (row.epoch or 0, row.step) <= (first.epoch, first.step)


def _last_pass(earlier: Sequence[_RecordedRow], names: Set[str]) -> int:
    """Return the index at which the last pass over the steps begins: a script may count anew in each epoch."""
    last_step: dict[str, int] = {}
    begins: dict[str, int] = {}
    for index, row in enumerate(earlier):
        for name in row.names:
            if row.step < last_step.get(name, row.step):
                begins[name] = index
            last_step[name] = row.step
    return max((begins.get(name, 0) for name in (names & last_step.keys()) or last_step), default=0)


def _rows_of(path: Path) -> Iterator[_RecordedRow]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                yield _recorded_row(line)


def _recorded_row(line: str) -> _RecordedRow:
    content = json.loads(line)
    names = frozenset(content["metrics"].keys())
    return _RecordedRow(int(content["step"]), int(content.get("epoch") or 0), names, line)
