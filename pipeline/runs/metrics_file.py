"""metrics.jsonl as the controller reads it: lines that make sense, and which ones don't."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_STEPS = range(-(1 << 63), 1 << 63)  # no database keeps more
_LATEST_S = 1 << 53  # nor later milliseconds


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """One line: ``time_s`` in unix seconds, ``step`` counts finished steps, ``epoch`` from 1 (None: a script's, which
    told none); ``attempt`` wrote it and was ``doing`` that from then on."""

    time_s: float
    step: int
    epoch: int | None
    metrics: dict[str, float]
    attempt: str = ""
    doing: str = "training"


def parse(line: bytes) -> MetricsRow | None:
    """A whole line, or None where it is torn, altered or something else. A metric that is no number is left out."""
    try:
        raw = json.loads(line)
        metrics = {str(name): float(value) for name, value in raw["metrics"].items() if _is_number(value)}
        time_s, step, epoch = float(raw["t"]), raw["step"], raw["epoch"]
        if type(step) is int and step in _STEPS and type(epoch) in (int, type(None)) and abs(time_s) < _LATEST_S:
            attempt, doing = str(raw.get("attempt", "")), str(raw.get("doing", "training"))
            return MetricsRow(time_s=time_s, step=step, epoch=epoch, metrics=metrics, attempt=attempt, doing=doing)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        pass
    return None


def bad_lines(path: Path) -> list[int]:
    """Numbers (from 1) of the whole lines that ``parse`` refuses. Raises OSError."""
    with path.open("rb") as file:
        numbered = enumerate(file, start=1)
        return [number for number, line in numbered if line.endswith(b"\n") and parse(line) is None]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cut_torn_line(path: Path) -> None:
    """Cut off a last line whose writer died in the midst of it. Raises OSError."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
