"""metrics.jsonl of a script's run: one whole line a row, in the format of the classifier's."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.script.files import write_text

_LOOK_S = 0.2  # who streams the file looks each 0.05 s: lets them see that it was cut before it grows again


@dataclass(frozen=True, kw_only=True)
class Row:
    """Metrics of one step. ``time_s`` in unix seconds; ``step`` counts finished steps, ``epoch`` from 1; ``of_end``: of
    the whole run, at its last step."""

    time_s: float
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    epoch: int | None = None
    of_end: bool = False


@dataclass
class LeftOut:
    """Values of one metric that are no finite numbers: the first, its step, and how many there were."""

    first: float
    step: int
    count: int = 0


class MetricsFile:
    """Appends rows. Rows of earlier attempts stay up to the first step that this one logs, and of a metric that it logs
    later up to that metric's first step; the others are moved to a file of their own, ``aside``.

    ``last`` holds the newest value of each metric, ``step`` the highest step; ``left_out`` says of NaN and infinite
    values, which are not recorded, how many each metric had, with the first and its step; ``too_high`` is the first
    step that no tracker keeps, which isn't recorded either.
    """

    def __init__(
        self,
        path: Path,
        *,
        aside: Path,
        say: Callable[[str], None],
        attempt: str = "",
        resumes: bool = False,
    ) -> None:
        """Raises OSError.

        Args:
            path: metrics.jsonl, with the rows of earlier attempts if there are any.
            aside: where rows are appended that this attempt replaces.
            say: told which rows were moved there, in words, if no earlier row stays in ``path``.
            attempt: id of this attempt, for its rows.
            resumes: the script was told a checkpoint. Else it may find one by itself, unless it logs its first step
                again.
        """
        self._path, self._attempt, self._resumes, self._aside, self._say = path, attempt, resumes, aside, say
        self.last: dict[str, float] = {}
        self.step: int | None = None
        self.left_out: dict[str, LeftOut] = {}
        self.too_high: int | None = None
        self._logged: set[str] = set()  # the metrics of this attempt's steps
        self._earlier: list[tuple[int, str]] = list(_rows_of(path)) if path.exists() else []
        write_text(path, "".join(line for _, line in self._earlier))
        for _, line in self._earlier:
            self._remember(json.loads(line))

    def append(self, row: Row) -> None:
        """Write what is finite; NaN and infinities are left out and counted. Raises OSError."""
        if not _is_kept(row.step):
            self.too_high = row.step if self.too_high is None else self.too_high
            return
        named = _named(row.metrics)
        for name, number in named.items():
            if not math.isfinite(number):
                self.left_out.setdefault(name, LeftOut(first=number, step=row.step)).count += 1
        self._replace(row, named.keys())
        metrics = {name: number for name, number in named.items() if math.isfinite(number)}
        if not metrics:
            return
        self._remember(self._written(row, metrics, self._attempt))

    def restore(self, rows: Iterable[Row]) -> None:
        """Rows that an earlier attempt logged: written where the end of that attempt came before. Raises OSError."""
        known = [json.loads(line) for _, line in self._earlier]
        there = {(value["t"], *value["metrics"]) for value in known}
        attempt = known[-1]["attempt"] if known else self._attempt
        for row in rows:
            metrics = {name: number for name, number in _named(row.metrics).items() if math.isfinite(number)}
            if metrics and _is_kept(row.step) and (round(row.time_s, 6), *metrics) not in there:
                value = self._written(row, metrics, attempt)
                self._earlier.append((row.step, json.dumps(value) + "\n"))
                self._remember(value)

    def _written(self, row: Row, metrics: dict[str, float], attempt: str) -> dict[str, Any]:
        place = {"t": round(row.time_s, 6), "step": row.step, "epoch": row.epoch}
        value: dict[str, Any] = {**place, "metrics": metrics, "attempt": attempt, "doing": "training"}
        self._append(json.dumps(value, allow_nan=False) + "\n")
        return value

    def _append(self, line: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)  # a removed run folder isn't made anew
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def set_aside(self) -> None:
        """Move all rows of earlier attempts: nothing is there that the script could go on from. Raises OSError."""
        self._move(self._earlier)
        self._earlier = []

    def _replace(self, row: Row, names: Set[str]) -> None:
        """Move the rows of earlier attempts that are made again, as ``row`` shows. Raises OSError."""
        new, rows = names - self._logged, self._earlier
        if not rows or not new:
            return
        if row.of_end:  # a script that goes on from its last checkpoint may log no step before
            moved = [(at, line) for at, line in rows if at >= row.step and _metrics(line) == names]
        elif self._logged:  # another source's rows may come later, as TensorBoard's do
            moved = [(at, line) for at, line in rows if at >= row.step and _metrics(line) & new]
        elif not self._resumes and _starts_over(rows, row, names):
            moved = rows
        else:
            rows = rows[_last_pass(rows, names) :]
            moved = [(at, line) for at, line in rows if at > row.step or (at == row.step and _metrics(line) & names)]
        self._move(moved)
        self._earlier = [*(Counter(rows) - Counter(moved)).elements()]
        self._logged |= set() if row.of_end else names

    def _move(self, moved: Sequence[tuple[int, str]]) -> None:
        """Raises OSError."""
        if not moved:
            return
        self._aside.parent.mkdir(parents=True, exist_ok=True)
        with self._aside.open("a", encoding="utf-8") as file:
            file.write("".join(line for _, line in moved))
        stays = [*(Counter(_rows_of(self._path)) - Counter(moved)).elements()]
        if not stays:
            self._say(_in_words([step for step, _ in moved]))
        write_text(self._path, "".join(line for _, line in stays))
        self.last, self.step = {}, None
        for _, line in stays:
            self._remember(json.loads(line))
        time.sleep(_LOOK_S)

    def _remember(self, value: dict[str, Any]) -> None:
        self.last.update(value["metrics"])
        self.step = max(value["step"], self.step if self.step is not None else value["step"])


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """What no terminal shows of a name (a line's end, a colour) is written out: names stand in lines and tables."""
    return {name if name.isprintable() else repr(name)[1:-1]: number for name, number in metrics.items()}


def _is_kept(step: int) -> bool:
    """Whether trackers can hold it: 64 bits."""
    return -(1 << 63) <= step < 1 << 63


def _in_words(steps: Sequence[int]) -> str:
    """``6 rows, of steps 1 to 6``."""
    first, last = min(steps), max(steps)
    of = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{len(steps):,} row{'s' * (len(steps) > 1)}, of {of}"


def _metrics(line: str) -> Set[str]:
    metrics: dict[str, float] = json.loads(line)["metrics"]
    return metrics.keys()


def _starts_over(rows: Sequence[tuple[int, str]], row: Row, names: Set[str]) -> bool:
    """Whether ``row`` isn't behind the first one that an earlier attempt logged of the same metrics (of any, where it
    logged none of them). Of a script that was told no checkpoint, rows before may then be of another pass."""
    at, line = next((one for one in rows if _metrics(one[1]) & names), rows[0])
    return (row.epoch or 0, row.step) <= (json.loads(line)["epoch"] or 0, at)


def _last_pass(rows: Sequence[tuple[int, str]], names: Set[str]) -> int:
    """Where the last pass over the steps begins: a script may count them anew, each epoch from 0. Of the metrics with
    these names, or of all if none of them is there."""
    last: dict[str, int] = {}
    begins: dict[str, int] = {}
    for index, (step, line) in enumerate(rows):
        for name in _metrics(line):
            if step < last.get(name, step):
                begins[name] = index
            last[name] = step
    return max((begins.get(name, 0) for name in (names & last.keys()) or last), default=0)


def _rows_of(path: Path) -> Iterator[tuple[int, str]]:
    """(step, line) of each whole line that makes sense."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            value = json.loads(line)
            if line.endswith("\n") and isinstance(value["metrics"], dict):
                yield int(value["step"]), line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
