"""metrics.jsonl and the final figures as MLflow points."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.runs import metrics_file
from pipeline.tracking.description import mlflow_key, read_object, read_summary


@dataclass(frozen=True)
class Point:
    """One value of one metric. ``time_ms`` is the time of the measurement (unix milliseconds), never of the
    recording: MLflow takes an equal (key, time, step, value) for the same point, so a replay adds nothing."""

    key: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True)
class Chunk:
    """Whole lines of metrics.jsonl: their points, where the next line begins, how many made no sense, and whether
    there is no further one yet."""

    points: tuple[Point, ...]
    end_bytes: int
    bad_lines: int
    is_last: bool


def read_points(path: Path, start_bytes: int, limit: int) -> Chunk:
    """From ``start_bytes`` on, to the last whole line or as many as have ``limit`` points. One that shrank is read
    anew."""
    points: list[Point] = []
    bad = 0
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        return Chunk((), 0, 0, is_last=True)
    with file:
        end = start_bytes if start_bytes <= path.stat().st_size else 0
        file.seek(end)
        while (line := file.readline()).endswith(b"\n"):  # one without it is still being written
            found = _parse(line)
            if points and len(points) + len(found or ()) > limit:
                return Chunk(tuple(points), end, bad, is_last=False)
            end += len(line)
            bad += found is None
            points += found or ()
    return Chunk(tuple(points), end, bad, is_last=True)


def _parse(line: bytes) -> list[Point] | None:
    row = metrics_file.parse(line)
    return None if row is None else _points(row.metrics, int(row.time_s * 1000), row.step)


def one_off(points: Iterable[Point]) -> list[Point]:
    """Points of a training with those of its one test at step 0."""
    return [replace(point, step=0) if point.key.startswith("test/") else point for point in points]


def nonfinite(points: Iterable[Point]) -> dict[str, str]:
    """Metric → ``NaN at step 7``: the first of its values that is no finite number. MLflow keeps them all."""
    found: dict[str, str] = {}
    for point in points:
        if not math.isfinite(point.value):
            shown = "NaN" if math.isnan(point.value) else "infinite"
            found.setdefault(point.key, f"{shown} at step {point.step}")
    return found


def _points(metrics: Mapping[str, Any], time_ms: int, step: int) -> list[Point]:
    return [
        Point(mlflow_key(str(name)), float(value), time_ms, step)
        for name, value in metrics.items()
        if isinstance(value, int | float)
    ]


def last_figures(run_dir: Path) -> list[Point]:
    """The summary's metrics and speed and the report's macro F1, at the last step; empty before that."""
    summary = read_summary(run_dir)
    metrics = dict(summary["metrics"]) if isinstance(summary.get("metrics"), dict) else {}
    for name in ("images_per_s", "train_s"):
        metrics[name] = summary.get(name)
    average = read_object(run_dir / "evaluation" / "report.json").get("macro avg")
    metrics["test/macro_f1"] = average.get("f1-score") if isinstance(average, dict) else None
    try:
        time_ms = int((summary["first_step_unix_time"] + summary["train_s"]) * 1000)
        return _points(metrics, time_ms, int(summary["steps"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return []


def final_points(run_dir: Path, curves: Container[str]) -> list[Point]:
    """The same for MLflow: what belongs to one of ``curves`` (names of metrics) stands at the last step. Of the others
    there is one figure: it stands at step 0, where MLflow draws it as a bar instead of a lone dot.
    """
    return [point if point.key in curves else replace(point, step=0) for point in last_figures(run_dir)]
