"""The interface of a tracker other than MLflow: the methods that the recorder process calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pipeline.tracking.description import Description
from pipeline.tracking.points import Mark, Point


class TrackerError(Exception):
    """The tracker refuses, and would refuse again. The recorder tries again only when `doit record` asks for it."""


class Tracker(ABC):
    """The record of one run. The recorder calls ``begin``, then ``log`` while there are points, and ``end``.

    If a method raises, the recorder begins again with a new object: without limit while the run goes on, for some
    seconds after its end, and then only by `doit record`. Neither the training nor MLflow's record waits for it.
    """

    live: ClassVar[bool] = True  # False: record the run in one go once it has ended

    def __init__(self, settings: Any, run_dir: Path) -> None:
        self.settings = settings
        self.run_dir = run_dir

    @abstractmethod
    def begin(self, run: Description) -> Mapping[str, Mark]:
        """Begin the record, or continue it after a kill or an earlier attempt.

        Return metric → ``mark`` (see ``points.Point``) of its last recorded point: only later points are logged. A
        tracker that doesn't know them starts a new record and returns an empty mapping.
        """

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Store points, in the order of metrics.jsonl, before this returns: a later ``begin`` must know them."""

    @abstractmethod
    def end(self, run: Description, state: str, end_ms: int | None) -> None:
        """End the attempt: FINISHED, PRUNED, FAILED or KILLED, at ``end_ms`` (unix milliseconds).

        Another attempt may follow, which calls ``begin`` again.
        """

    @abstractmethod
    def close(self) -> None:
        """Release open resources; no other call follows."""
