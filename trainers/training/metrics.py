"""metrics.jsonl: its lines are appended, and restored to those that a checkpoint has when a run goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from trainers.core.files import explained, write_bytes


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
        actual, expected = self._path.read_bytes() if self._path.exists() else b"", self.text.encode()
        if actual == expected or not actual:  # a removed file is reported with the run folder
            return ""
        write_bytes(self._path, expected)
        return _damage(self._path.name, actual, expected, "was written")


def _restore(path: Path, text: str) -> str:
    """Truncate the file after ``text``, or rewrite it if it does not begin with ``text``. Returns the damage, or ''."""
    actual, expected = path.read_bytes() if path.exists() else b"", text.encode()
    if actual.startswith(expected):  # intact: drop only the lines that a stopped attempt wrote after its checkpoint
        path.touch()
        os.truncate(path, len(expected))
    else:
        write_bytes(path, expected)
    return _damage(path.name, actual, expected, "the checkpoint knows")


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
