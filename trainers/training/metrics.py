"""metrics.jsonl, throughput, early stopping, and the training losses that are kept on the device."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.core.errors import TrainerError
from trainers.core.files import explained, write_bytes
from trainers.distributed.process_group import RankContext


class MetricsFile:
    """Appends lines {"t", "step", "epoch", "metrics", "attempt", "doing"} to metrics.jsonl; ``t`` in unix seconds."""

    def __init__(self, path: Path, text: str = "", *, attempt: str = "") -> None:
        """Open the file with exactly ``text`` as content: the lines up to the checkpoint that the run resumes from.

        ``damage`` describes lines that were unreadable or differed from ``text``; normally it is empty.
        ``attempt`` is the run id that new lines carry.
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
        """Append a line.

        Args:
            step: number of finished steps.
            epoch: from 1.
            doing: the activity that follows, which the controller shows until the next line.
        """
        place = {"t": round(time.time(), 6), "step": step, "epoch": epoch}
        text = json.dumps({**place, "metrics": metrics, "attempt": self._attempt, "doing": doing}, allow_nan=False)
        text += "\n"
        self._texts.append(text)
        with explained(self._path, len(text)):
            self._file.write(text)
            self._file.flush()

    def close(self) -> str:
        """Fsync the file. If it was damaged since the last write, rewrite it and return a description of the damage."""
        os.fsync(self._file.fileno())
        self._file.close()
        seen, wanted = self._path.read_bytes() if self._path.exists() else b"", self.text.encode()
        if seen == wanted or not seen:  # a removed file is reported with the run folder
            return ""
        write_bytes(self._path, wanted)
        return _damage(self._path.name, seen, wanted, "was written")


def _restore(path: Path, text: str) -> str:
    """Truncate the file after ``text``, or rewrite it if it does not begin with ``text``. Returns the damage, or ''."""
    seen, wanted = path.read_bytes() if path.exists() else b"", text.encode()
    if seen.startswith(wanted):  # intact: drop only the lines that a stopped attempt wrote after its checkpoint
        path.touch()
        os.truncate(path, len(wanted))
    else:
        write_bytes(path, wanted)
    return _damage(path.name, seen, wanted, "the checkpoint knows")


def _damage(name: str, seen: bytes, wanted: bytes, known: str) -> str:
    """Describe which lines of a file differ from the lines that were written.

    A last line without a newline is no damage: its writer was killed.
    """
    whole, lines = wanted.splitlines(keepends=True), seen.splitlines(keepends=True)
    altered = [number for number, (line, seen) in enumerate(zip(whole, lines, strict=False), 1) if line != seen]
    later = enumerate(lines[len(whole) :], len(whole) + 1)
    altered += [number for number, line in later if line.endswith(b"\n") and not _is_metrics(line)]
    if altered:
        more = f" and {len(altered) - 1} more" if len(altered) > 1 else ""
        return f"{name}: line {altered[0]}{more} was damaged; all that {known} is there again"
    return f"{name} lacked lines; all that {known} is there again" if len(lines) < len(whole) else ""


def _is_metrics(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line)["metrics"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def take(
    metrics: Mapping[str, float], step: int, progress: dict[str, Any], say: Callable[[str], None]
) -> dict[str, float]:
    """Copy the finite metrics of an evaluation into ``progress`` and return them.

    JSON has no NaN or infinity, so such values are left out and counted in ``progress["nonfinite"]``, with the first
    value of each metric and its step. The same rule holds for the metrics of scripts.
    """
    left_out: dict[str, Any] = progress.get("nonfinite", {})
    for name, value in metrics.items():
        if not math.isfinite(value):
            if name not in left_out:
                say(f"warning: {name} is {value} at step {step}; such values are left out of the metrics, and counted")
            known = left_out.get(name, {"first": str(value), "step": step, "count": 0})
            # a new dict, not a change of the old one: a checkpoint that is being written may hold the old one
            left_out = {**left_out, name: {**known, "count": known["count"] + 1}}
    if left_out:
        progress["nonfinite"] = left_out
    kept = {name: value for name, value in metrics.items() if math.isfinite(value)}
    progress["metrics"].update(kept)
    return kept


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The losses of one interval: ``loss`` is the mean over ``steps`` steps and all ranks (NaN: none was finite).

    ``called`` and ``stop`` are rank 0's requests for a checkpoint and for the end of the run.
    """

    loss: float
    steps: int
    called: bool
    stop: bool


class Losses:
    """The training losses since the last read, one row per part of the global batch, kept on the device.

    ``add`` costs one small copy on the device; only ``read`` waits for it.
    """

    def __init__(self, context: RankContext, capacity: int, parts_per_rank: int = 1) -> None:
        self._context = context
        first, self._whose = context.ranks.rank * parts_per_rank, "on rank" if parts_per_rank == 1 else "in part"
        self._own = slice(first, first + parts_per_rank)
        rows = context.ranks.world_size * parts_per_rank
        self._values = torch.zeros(rows, capacity + 1, device=context.device)  # last column: rank 0's request
        self._count = 0
        self._restored = 0  # how many of these losses were computed by an earlier attempt

    def add(self, loss: Tensor) -> None:
        """Keep the mean losses of this rank's parts of the batch: a scalar, or [parts]."""
        self._values[self._own, self._count].copy_(loss.detach())
        self._count += 1

    def unread(self, last_step: int, *, saved_step: int, skip_nonfinite: bool) -> list[list[float]]:
        """Take out the losses that were not read yet, a row for each part, for ``restore``. Raises as ``read`` does."""
        rows, _ = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        return rows

    def restore(self, count: int, rows: Sequence[Sequence[float]] = ()) -> None:
        """Put back ``unread`` losses. Every rank passes ``count``, the length of a row; one rank passes the rows."""
        self._count = self._restored = count
        for part, row in enumerate(rows):
            self._values[part, :count] = torch.tensor(row, device=self._values.device)

    def call(self, *, stop: bool = False) -> None:
        """Let rank 0 request a checkpoint at the next read (with ``stop``, the end of the run too).

        The request travels in the table of losses, so it needs no message of its own.
        """
        self._values[0, -1].clamp_(min=2.0 if stop else 1.0)

    def read(self, last_step: int, *, saved_step: int = 0, skip_nonfinite: bool = False) -> Reading:
        """Return the mean loss since the last read, over all ranks. The result is the same on each rank.

        Raises:
            TrainerError: a loss is not a number or infinite, naming step, rank or part, and last checkpoint.
        """
        steps = self._count - self._restored
        rows, call = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        finite = [loss for row in rows for loss in row if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        return Reading(loss=mean, steps=steps, called=call > 0, stop=call > 1)

    def _rows(self) -> tuple[list[list[float]], float]:
        """Return the losses of each part and rank 0's request, and clear both."""
        count, self._count, self._restored = self._count, 0, 0
        table: list[list[float]] = self._context.read(self._context.sum(self._values))
        self._values.zero_()
        return [row[:count] for row in table], table[0][-1]

    def _refuse_nonfinite(self, rows: Sequence[Sequence[float]], last_step: int, saved_step: int) -> None:
        count = len(rows[0])
        for column in range(count):
            bad = [number for number, row in enumerate(rows) if not math.isfinite(row[column])]
            if bad:
                where = f"at step {last_step - count + 1 + column} {self._whose} {', '.join(map(str, bad))}"
                last_good = f"the last good checkpoint is that of step {saved_step}"
                last_good = last_good if saved_step else "there is no checkpoint yet"
                raise TrainerError(
                    f"the training loss is {rows[bad[0]][column]} {where}; {last_good}; a lower optimizer.lr or "
                    "trainer.precision=fp32 usually helps, trainer.skip_nonfinite=true leaves such steps out"
                )


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
        half, seen = sum(steps for _, steps in rates) / 2, 0
        for rate, steps in rates:
            seen += steps
            if seen >= half:
                return rate
        return 0.0


class BestSoFar:
    """The best evaluation of the val split so far, and early stopping (trainer.patience).

    Call ``see()`` after each evaluation, with a result that is the same on all ranks. A checkpoint keeps ``state``.
    """

    def __init__(self, patience: int | None) -> None:
        """``patience``: evaluations without a better accuracy that end the run; None: no early stopping."""
        self._patience = patience
        self.accuracy = -1.0
        self.since = 0  # number of evaluations after the best one

    @property
    def is_over(self) -> bool:
        """True if the run should end here."""
        return self._patience is not None and self.since >= self._patience

    @property
    def state(self) -> dict[str, Any]:
        """The values that a checkpoint keeps."""
        return {"best_accuracy": self.accuracy, "evaluations_since_best": self.since}

    def known(self, progress: Mapping[str, Any]) -> tuple[float, float]:
        """Return the values in a checkpoint's ``progress``, for ``restore``."""
        return progress.get("best_accuracy", self.accuracy), progress.get("evaluations_since_best", self.since)

    def restore(self, accuracy: float, since: float) -> None:
        """Continue from a checkpoint's values."""
        self.accuracy, self.since = accuracy, int(since)

    def see(self, accuracy: float) -> bool:
        """Record an evaluation. Returns True if it is the best so far; on a tie, the earlier one counts as the best."""
        better = accuracy > self.accuracy
        self.accuracy, self.since = (accuracy, 0) if better else (self.accuracy, self.since + 1)
        return better

    def why(self) -> str:
        """Return a message on why the run ended early, if ``is_over``."""
        return (
            f"ended early: val accuracy has not risen above {self.accuracy:.4f} in {self.since} evaluations "
            f"(trainer.patience={self._patience})"
        )
