"""metrics.jsonl of a script's run: one whole line a row, in the format of the classifier's."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Appends rows. Of an earlier attempt, rows are kept up to the first step that this one logs.

    ``last`` holds the newest value of each metric, ``step`` the highest step; ``left_out`` says of NaN and infinite
    values, which are not recorded, how many each metric had, with the first and its step; ``too_high`` is the first
    step that no tracker keeps, which isn't recorded either.
    """

    def __init__(self, path: Path, *, attempt: str = "", keep: bool = False) -> None:
        """``keep``: the script goes on from a checkpoint; else it starts over, and earlier rows are dropped."""
        self._path, self._attempt = path, attempt
        self.last: dict[str, float] = {}
        self.step: int | None = None
        self.left_out: dict[str, LeftOut] = {}
        self.too_high: int | None = None
        self._earlier: list[tuple[int, str]] = list(_rows_of(path)) if keep and path.exists() else []
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
        kept = _kept(self._earlier, row)
        if len(kept) < len(self._earlier):
            self._cut(kept)
        self._earlier = kept if row.of_end else []
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

    def _cut(self, kept: Sequence[tuple[int, str]]) -> None:
        """The rest of what an earlier attempt recorded is made again now."""
        write_text(self._path, "".join(line for _, line in kept))
        self.last, self.step = {}, None
        for _, line in kept:
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


def _kept(rows: Sequence[tuple[int, str]], row: Row) -> list[tuple[int, str]]:
    """Of what an earlier attempt recorded, what isn't made again by ``row``: what came before its step. At the end,
    where a script that goes on from its last checkpoint logs no step, all but the same results."""
    if not row.of_end:
        return _before(rows, row.step)
    return [
        (at, line) for at, line in rows if at < row.step or json.loads(line)["metrics"].keys() != row.metrics.keys()
    ]


def _before(rows: Sequence[tuple[int, str]], step: int) -> list[tuple[int, str]]:
    """The rows before ``step``. A script may count its steps anew, each epoch from 0: of a metric's passes over them
    the last one is meant, and those before stay whole."""
    last: dict[str, int] = {}
    passes: dict[str, int] = {}
    of_rows = []
    for at, line in rows:
        names = json.loads(line)["metrics"]
        for name in names:
            passes[name] = passes.get(name, 0) + (at < last.get(name, at))
            last[name] = at
        of_rows.append({name: passes[name] for name in names})
    return [
        (at, line)
        for (at, line), of_row in zip(rows, of_rows, strict=True)
        if at < step or all(number < passes[name] for name, number in of_row.items())
    ]


def _rows_of(path: Path) -> Iterator[tuple[int, str]]:
    """(step, line) of each whole line that makes sense."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            value = json.loads(line)
            if line.endswith("\n") and isinstance(value["metrics"], dict):
                yield int(value["step"]), line
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
