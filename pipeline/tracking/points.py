"""The points that trackers record, one value of one metric each: read from metrics.jsonl and summary.json."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.core import documents
from pipeline.runs import metrics_file
from pipeline.tracking.description import distinct, mlflow_key, read_summary
from trainers.contract import run_folder

Mark = tuple[int, int]
"""The lap and step of a point (see ``Point``). They increase from point to point of a metric."""


@dataclass(frozen=True)
class Point:
    """One value of one metric.

    ``time_ms`` is the time of the measurement (unix milliseconds), never of the recording. MLflow takes points with
    equal key, time, step and value for one point, so recording them again adds nothing. ``lap`` counts how often the
    metric's steps have restarted, because a script may count the steps of each epoch from 0.
    """

    key: str
    value: float
    time_ms: int
    step: int
    lap: int = 0

    @property
    def mark(self) -> Mark:
        return self.lap, self.step


@dataclass(frozen=True, kw_only=True)
class ReadPosition:
    """How far metrics.jsonl was read."""

    end_bytes: int = 0
    line: bytes = b""  # the last line read; if another line ends at ``end_bytes`` now, the file was replaced since
    marks: Mapping[str, Mark] = field(default_factory=dict)  # key of a metric → mark of its last point
    keys: Mapping[str, str] = field(default_factory=dict)  # name of a metric → its MLflow key


@dataclass(frozen=True)
class Chunk:
    """Points of complete lines, and where the next line begins."""

    points: tuple[Point, ...]
    position: ReadPosition
    is_last: bool  # the file has no more complete lines yet


def read_points(path: Path, position: ReadPosition, limit: int, *, tests_once: bool = False) -> Chunk:
    """Read from ``position`` to the last complete line, or up to ``limit`` points.

    ``tests_once``: metrics below test/ are measured once, and are placed at step 0.
    """
    points: list[Point] = []
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        return Chunk((), ReadPosition(), is_last=True)
    with file:
        # a file that was replaced since is read from its beginning
        file.seek(position.end_bytes - len(position.line))
        is_same = file.read(len(position.line)) == position.line and file.seek(0, os.SEEK_END) >= position.end_bytes
        position = position if is_same else ReadPosition()
        end, last = position.end_bytes, position.line
        marks, keys = dict(position.marks), dict(position.keys)
        file.seek(end)
        is_last = True
        while (line := file.readline()).endswith(b"\n"):  # a line without it is still being written
            row = metrics_file.parse(line)
            if row is not None and points and len(points) + len(row.metrics) > limit:
                is_last = False
                break
            end, last = end + len(line), line
            if row is None:
                continue
            for name, value in row.metrics.items():
                key = keys.setdefault(name, key_of(name, keys))
                step = 0 if tests_once and key.startswith("test/") else row.step
                lap, _ = marks[key] = next_mark(marks.get(key), step)
                points.append(Point(key, value, int(row.time_s * 1000), step, lap))
    return Chunk(tuple(points), ReadPosition(end_bytes=end, line=last, marks=marks, keys=keys), is_last=is_last)


def next_mark(before: Mark | None, step: int) -> Mark:
    """Return the mark of a point with this step that follows the point ``before`` (None: the first point)."""
    lap, last_step = before or (0, step - 1)
    return lap if step > last_step else lap + 1, step


def key_of(name: str, keys: Mapping[str, str]) -> str:
    """Return the MLflow key of a metric, unlike those of other names. ``keys``: earlier name → its key."""
    return keys.get(name) or distinct(mlflow_key(name), set(keys.values()))


def mark_of(steps: Iterable[int]) -> Mark:
    """Return the mark of the last point of a metric from the steps of all its points, which may be in any order."""
    # in each lap a step occurs once, and the last lap may not have reached the larger steps
    counts = Counter(steps)
    laps = max(counts.values())
    return laps - 1, max(step for step, count in counts.items() if count == laps)


def nonfinite(points: Iterable[Point]) -> dict[str, str]:
    """Return metric → its first value that isn't finite, as ``NaN at step 7``."""
    first: dict[str, str] = {}
    for point in points:
        if not math.isfinite(point.value):
            first.setdefault(point.key, f"{'NaN' if math.isnan(point.value) else 'infinite'} at step {point.step}")
    return first


def last_figures(run_dir: Path, position: ReadPosition) -> list[Point]:
    """Return the metrics and the speed of summary.json, and the report's macro F1, as points at the last step.

    Leaves out metrics whose curve up to ``position`` reaches this step already. Empty if there is no summary yet.
    """
    summary = read_summary(run_dir)
    metrics = dict(summary["metrics"]) if isinstance(summary.get("metrics"), dict) else {}
    for name in ("images_per_s", "train_s"):
        metrics[name] = summary.get(name)
    average = documents.read_or_empty(run_dir / run_folder.EVALUATION / "report.json").get("macro avg")
    metrics["test/macro_f1"] = average.get("f1-score") if isinstance(average, dict) else None
    # a damaged summary, or that of a script, may lack the time of the last step
    try:
        time_ms = int((summary["first_step_unix_time"] + summary["train_s"]) * 1000)
        step = int(summary["steps"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return []
    points = []
    for name, value in metrics.items():
        key = key_of(str(name), position.keys)
        lap, last_step = position.marks.get(key, (0, step - 1))
        if isinstance(value, int | float) and step > last_step:
            points.append(Point(key, float(value), time_ms, step, lap))
    return points


def final_points(run_dir: Path, position: ReadPosition) -> list[Point]:
    """Return ``last_figures`` as MLflow shows them best: a metric without a curve is placed at step 0."""
    # mark (0, 0): the metric has its only point at step 0 already, where MLflow draws a bar instead of a lone dot
    points = [point for point in last_figures(run_dir, position) if position.marks.get(point.key) != (0, 0)]
    return [point if point.key in position.marks else replace(point, step=0) for point in points]
