"""What another tracker is: the few calls that the recorder makes of it, in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pipeline.tracking.description import Description
from pipeline.tracking.points import Mark, Point


class TrackerError(Exception):
    """The tracker refuses, and will the next time: it isn't asked again until `doit record`."""


class Tracker(ABC):
    """One run's record. The recorder calls ``begin``, ``log`` as often as there are points, and ``end``.

    What a method raises is noted, and all begins anew with ``begin`` of another object: until the run's end as often
    as need be, after it for some seconds, then with `doit record`. Neither the training nor MLflow's record waits.

    Attributes:
        live: False: the run is recorded once it has ended, in one go.
    """

    live: ClassVar[bool] = True

    def __init__(self, settings: Any, run_dir: Path) -> None:
        self.settings = settings
        self.run_dir = run_dir

    @abstractmethod
    def begin(self, run: Description) -> Mapping[str, Mark]:
        """Begin the record, or go on with it after a kill or an earlier attempt: ``mark`` of the last point of each
        metric that it holds already. Only what is later is logged, so each point stands in it once; one that can't
        tell begins anew and returns nothing."""

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Points in the order of metrics.jsonl. They are kept when it returns: a later ``begin`` tells of them."""

    @abstractmethod
    def end(self, run: Description, state: str, end_ms: int | None) -> None:
        """The attempt has ended: FINISHED, PRUNED, FAILED or KILLED, at ``end_ms`` (unix milliseconds). Another one may
        follow, and ``begin`` with it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open; nothing is called after it."""
