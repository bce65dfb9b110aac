"""The best evaluation of the val split so far, and whether too many have followed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BestSoFar:
    """``see()`` after each evaluation, with a result that all ranks have alike. A checkpoint keeps ``state``."""

    def __init__(self, patience: int | None) -> None:
        """``patience``: evaluations without a better accuracy that end the run; None: none do."""
        self._patience = patience
        self.accuracy = -1.0
        self.since = 0  # evaluations after the best

    @property
    def is_over(self) -> bool:
        """Whether the run is to end here."""
        return self._patience is not None and self.since >= self._patience

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"best_accuracy": self.accuracy, "evaluations_since_best": self.since}

    def known(self, progress: Mapping[str, Any]) -> tuple[float, float]:
        """What a checkpoint's ``progress`` has of it, for ``restore``."""
        return progress.get("best_accuracy", self.accuracy), progress.get("evaluations_since_best", self.since)

    def restore(self, accuracy: float, since: float) -> None:
        """Go on from a checkpoint."""
        self.accuracy, self.since = accuracy, int(since)

    def see(self, accuracy: float) -> bool:
        """Whether this is the best so far; of equals the first is."""
        better = accuracy > self.accuracy
        self.accuracy, self.since = (accuracy, 0) if better else (self.accuracy, self.since + 1)
        return better

    def why(self) -> str:
        """A line for people, where ``is_over``."""
        return (
            f"ended early: val accuracy has not risen above {self.accuracy:.4f} in {self.since} evaluations "
            f"(trainer.patience={self._patience})"
        )
