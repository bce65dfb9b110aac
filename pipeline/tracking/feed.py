"""What one pass of the recorder gives to another tracker than MLflow: the points that it doesn't hold yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeline.core import masking
from pipeline.core.errors import PacelineError, text_of
from pipeline.tracking import state
from pipeline.tracking.address import redact
from pipeline.tracking.answers import Caller, StoreError
from pipeline.tracking.description import Progress, describe
from pipeline.tracking.points import Mark, Place, last_figures, read_points
from pipeline.tracking.state import TrackingState, fingerprints
from pipeline.tracking.trackers.base import Tracker, TrackerError
from trainers.contract import run_folder

_AT_ONCE = 1000
_CALL_S = 60.0  # of one call of a tracker: who waits for the end of a run waits no longer for all of them
_CLOSE_S, _ENDS_S = 5.0, 2.0
_GROWTH_BYTES = 1 << 30  # of this process in one call: a tracker may import much
_Result = TypeVar("_Result")


class Feed:
    """Brings one tracker up to date. How far it is the tracker itself knows; ``state`` says whether that is all.

    ``folder`` is a descriptor of ``run_dir``. ``succeeded`` is called after every answer of the tracker and may raise
    to end the pass; ``is_wanted`` raises where there is no reason to begin.
    """

    def __init__(
        self,
        run_dir: Path,
        folder: int,
        make: Callable[[], Tracker],
        state: TrackingState,
        succeeded: Callable[[], None],
        is_wanted: Callable[[], None],
    ) -> None:
        self.run_dir = run_dir
        self.state = state
        self._folder = folder
        self._make = make
        self._succeeded, self._is_wanted = succeeded, is_wanted
        self._tracker: Tracker | None = None
        self._caller: Caller | None = None
        self._attempt: int | None = None  # that the tracker knows of
        self._place = Place()
        self._marks: dict[str, Mark] = {}

    def write(self, now: Progress) -> None:
        """Raises StoreError."""
        inputs = fingerprints(self.run_dir)  # taken first: what changes during the pass makes another one
        tracker = self._begun(now)
        if not (tracker.live or now.ended):
            return
        self._log(tracker)
        if now.ended:
            self._ask(partial(tracker.end, describe(self.run_dir), str(now.state), now.end_ms))
            self._succeeded()
            self.forget()
            self.state.inputs, self.state.state, self.state.message = inputs, state.DONE, ""
            self.state.save(self._folder)

    def forget(self) -> None:
        """The next pass begins with another object."""
        tracker, self._tracker, self._attempt = self._tracker, None, None
        caller, self._caller = self._caller, None
        if tracker is not None and caller is not None:
            with contextlib.suppress(Exception, SystemExit):  # it has failed before
                caller.call(tracker.close, _CLOSE_S, ends_within_s=_ENDS_S)
        if caller is not None:
            caller.close()

    def _begun(self, now: Progress) -> Tracker:
        if self._tracker is not None and self._attempt == now.attempt:
            return self._tracker
        self.forget()
        self.state.save(self._folder)  # from here on there may be a part of a record
        self._is_wanted()
        tracker = self._tracker = self._ask(self._make)
        if tracker.live or now.ended:
            begin = partial(tracker.begin, describe(self.run_dir))
            self._marks, self._place = self._ask(lambda: _marks(begin())), Place()
            self._attempt = now.attempt
        return tracker

    def _log(self, tracker: Tracker) -> None:
        """An attempt that repeats steps from its checkpoint repeats their metrics: what is there stays."""
        while True:
            chunk = read_points(self.run_dir / run_folder.METRICS, self._place, _AT_ONCE)
            points = [*chunk.points, *(last_figures(self.run_dir, chunk.place) if chunk.is_last else ())]
            new = []
            for point in points:
                if point.key not in self._marks or point.mark > self._marks[point.key]:
                    new.append(point)
                    self._marks[point.key] = point.mark
            if new:
                self._ask(partial(tracker.log, new))
                self._succeeded()
            self._place = chunk.place
            if chunk.is_last:
                return

    def _ask(self, call: Callable[[], _Result]) -> _Result:
        """Every failure of the tracker becomes a StoreError, and it is let go: what it has taken is not known. So is
        one whose call has no end, as where a server answers without end."""
        self._caller = self._caller or Caller(_GROWTH_BYTES)
        try:
            return self._caller.call(call, _CALL_S, ends_within_s=_ENDS_S)
        except StoreError:
            self._tracker = None  # its thread hangs: it can't be closed
            self.forget()
            raise
        except (Exception, SystemExit) as error:  # of many classes: it is other people's code
            self.forget()
            final = isinstance(error, TrackerError | PacelineError | ImportError)
            raise StoreError(masking.shown(redact(_reason(error))), final=final) from error


def _marks(begun: object) -> dict[str, Mark]:
    """What begin() has returned. Raises TrackerError: it is something else."""
    marks = dict[str, Mark]()
    for key, mark in begun.items() if isinstance(begun, Mapping) else [(begun, None)]:
        match key, mark:
            case str(), (int(lap), int(step)):
                marks[key] = lap, step
            case _:
                raise TrackerError(f"its begin() returned {begun!r:.80}, not point.mark of each metric's last point")
    return marks


def _reason(error: Exception | SystemExit) -> str:
    if isinstance(error, PacelineError):
        return f"{error.what} ({error.hint})" if error.hint else error.what
    return text_of(error) if isinstance(error, TrackerError) else f"{type(error).__name__}: {text_of(error)}"
