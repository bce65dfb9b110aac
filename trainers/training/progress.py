"""The measurements of a run so far, over all of its attempts: times, rates and metrics. A checkpoint stores them."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainers.core.files import explained, write_bytes


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Values of one metric that aren't finite: the first (as text, which JSON has), its step, and their number."""

    first: str
    step: int
    count: int = 0


@dataclass(kw_only=True)
class Progress:
    """Measurements of the run so far. Rank 0's are used, because it writes the results.

    Attributes:
        train_s: seconds of training, with evaluations and checkpoints.
        warm_up_s: seconds before the first step of each attempt, in which the network is compiled.
        images_per_s: the median over the last attempt; 0: not measured yet.
        first_step_unix_time: the end of the run's first step; None: there was none.
        metrics: the newest finite value of each metric of an evaluation.
        nonfinite: the values that ``record_metrics`` has left out, by metric.
        best_accuracy: the best val/accuracy; -1: there was no evaluation. It is the same on all ranks.
        evaluations_since_best: evaluations of the val split after the best one. It is the same on all ranks.
        unread_losses: losses since the last line of metrics.jsonl, if SIGTERM interrupted an interval; [parts, steps].
    """

    train_s: float = 0.0
    warm_up_s: float = 0.0
    images_per_s: float = 0.0
    first_step_unix_time: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, NonFinite] = field(default_factory=dict)
    best_accuracy: float = -1.0
    evaluations_since_best: int = 0
    unread_losses: list[list[float]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return a copy as plain data, for a checkpoint that is written while the training goes on."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Progress:
        """Return the progress of ``as_json``."""
        nonfinite = {name: NonFinite(**entry) for name, entry in content["nonfinite"].items()}
        return cls(**{**content, "nonfinite": nonfinite})

    def record_metrics(self, metrics: Mapping[str, float], step: int) -> tuple[dict[str, float], list[str]]:
        """Keep the finite metrics of an evaluation. NaN and infinity, which JSON lacks, are left out and counted.
        Return the finite ones, and a warning for each metric that was left out for the first time.
        """
        warnings = []
        for name, value in metrics.items():
            if math.isfinite(value):
                self.metrics[name] = value
                continue
            if name not in self.nonfinite:
                warnings.append(
                    f"warning: {name} is {value} at step {step}; such values are left out of the metrics, and counted"
                )
            earlier = self.nonfinite.get(name, NonFinite(first=str(value), step=step))
            self.nonfinite[name] = replace(earlier, count=earlier.count + 1)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}, warnings

    def record_accuracy(self, accuracy: float) -> bool:
        """Record an evaluation of the val split. Return True if it is the best so far; on a tie, the earlier one is."""
        is_best = accuracy > self.best_accuracy
        if is_best:
            self.best_accuracy, self.evaluations_since_best = accuracy, 0
        else:
            self.evaluations_since_best += 1
        return is_best


class Throughput:
    """Images per second over all ranks, from the times between reads of the losses (no extra waiting)."""

    def __init__(self, global_batch_size: int) -> None:
        self._batch = global_batch_size
        self._rates: list[tuple[float, int]] = []
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Exclude the time since the last interval (an evaluation, a checkpoint)."""
        self._since = time.perf_counter()

    def interval(self, steps: int) -> float:
        """Close an interval of ``steps`` steps that ends now; returns its images per second."""
        now = time.perf_counter()
        rate = steps * self._batch / max(now - self._since, 1e-9)
        self._rates.append((rate, steps))
        self._since = now
        return rate

    def median(self) -> float:
        """Return the median over steps, without the first interval (warm-up) if there are more. 0 without intervals."""
        rates = sorted(self._rates[1:] or self._rates)
        half, steps_so_far = sum(steps for _, steps in rates) / 2, 0
        for rate, steps in rates:
            steps_so_far += steps
            if steps_so_far >= half:
                return rate
        return 0.0


class MetricsFile:
    """Appends lines {"t", "step", "epoch", "metrics", "attempt", "doing"} to metrics.jsonl; ``t`` in unix seconds."""

    def __init__(self, path: Path, text: str = "", *, attempt: str = "") -> None:
        """Open the file with exactly ``text`` as content: the lines up to the checkpoint that the run resumes from.
        ``damage`` is set to a description if the file didn't begin with ``text``, else to ''. ``attempt`` is the run id
        of new lines.
        """
        self.damage = _restore(path, text)
        self._path, self._texts, self._attempt = path, [text], attempt
        self._file = path.open("a", encoding="utf-8")

    @property
    def text(self) -> str:
        """All lines as they were written."""
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    def write(self, step: int, epoch: int, metrics: dict[str, float], *, doing: str) -> None:
        """Append a line: ``step`` counts finished steps, ``epoch`` from 1, ``doing`` is the activity that follows."""
        position = {"t": round(time.time(), 6), "step": step, "epoch": epoch}
        text = json.dumps({**position, "metrics": metrics, "attempt": self._attempt, "doing": doing}, allow_nan=False)
        text += "\n"
        self._texts.append(text)
        with explained(self._path, len(text)):
            self._file.write(text)
            self._file.flush()

    def close(self) -> str:
        """Fsync the file. If it was damaged since the last write, rewrite it and return a description of the damage."""
        os.fsync(self._file.fileno())
        self._file.close()
        actual, expected = self._path.read_bytes() if self._path.exists() else b"", self.text.encode()
        if actual == expected or not actual:  # a removed file is reported with the run folder
            return ""
        write_bytes(self._path, expected)
        return f"{self._path.name} was damaged; all that was written is there again"


def _restore(path: Path, text: str) -> str:
    """Cut the file after ``text``, or rewrite it if it does not begin with ``text``. Returns the damage, or ''."""
    actual, expected = path.read_bytes() if path.exists() else b"", text.encode()
    if actual.startswith(expected):  # drop the lines that a stopped attempt wrote after its checkpoint
        path.touch()
        os.truncate(path, len(expected))
        return ""
    write_bytes(path, expected)
    return f"{path.name} was damaged; all that the checkpoint knows is there again"
