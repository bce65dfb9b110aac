"""metrics.jsonl of a script's run: one whole line a row, in the format of the classifier's."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.script.files import write_text

_LOOK_S = 0.2  # who streams the file looks each 0.05 s: lets them see that it was cut before it grows again


@dataclass(frozen=True, kw_only=True)
class Row:
    """Metrics of one step. ``time_s`` in unix seconds; ``step`` counts finished steps, ``epoch`` from 1."""

    time_s: float
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    epoch: int | None = None


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
        """Write what is finite; NaN and infinities are left out and counted. Raises OSError.

        What no terminal shows of a name (a line's end, a colour) is written out: names stand in lines and tables.
        """
        if not -(1 << 63) <= row.step < 1 << 63:
            self.too_high = row.step if self.too_high is None else self.too_high
            return
        named = {name if name.isprintable() else repr(name)[1:-1]: number for name, number in row.metrics.items()}
        for name, number in named.items():
            if not math.isfinite(number):
                self.left_out.setdefault(name, LeftOut(first=number, step=row.step)).count += 1
        if any(step >= row.step for step, _ in self._earlier):
            self._cut(row.step)
        self._earlier = []
        metrics = {name: number for name, number in named.items() if math.isfinite(number)}
        if not metrics:
            return
        place = {"t": round(row.time_s, 6), "step": row.step, "epoch": row.epoch}
        value: dict[str, Any] = {**place, "metrics": metrics, "attempt": self._attempt, "doing": "training"}
        self._append(json.dumps(value, allow_nan=False) + "\n")
        self._remember(value)

    def _append(self, line: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)  # a removed run folder isn't made anew
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def _cut(self, step: int) -> None:
        """What an earlier attempt recorded from ``step`` on is made again now."""
        kept = _before(self._earlier, step)
        write_text(self._path, "".join(kept))
        self.last, self.step = {}, None
        for line in kept:
            self._remember(json.loads(line))
        time.sleep(_LOOK_S)

    def _remember(self, value: dict[str, Any]) -> None:
        self.last.update(value["metrics"])
        self.step = max(value["step"], self.step if self.step is not None else value["step"])


def _before(rows: Sequence[tuple[int, str]], step: int) -> list[str]:
    """The lines before ``step``. A script may count its steps anew, each epoch from 0: of a metric's passes over them
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
        line
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
