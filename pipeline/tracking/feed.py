"""One recorder pass for a tracker other than MLflow: sends the points that the tracker doesn't have yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeline.core import masking
from pipeline.core.errors import PacelineError, text_of
from pipeline.tracking.address import redact
from pipeline.tracking.answers import Caller, StoreError
from pipeline.tracking.description import Progress, describe
from pipeline.tracking.points import Mark, Place, last_figures, read_points
from pipeline.tracking.state import TrackingState, fingerprints
from pipeline.tracking.trackers.base import Tracker, TrackerError
from trainers.contract import run_folder

_AT_ONCE = 1000
_CALL_S = 60.0  # time limit of one call, also the limit of waiting at the end of a run
_CLOSE_S, _ENDS_S = 5.0, 2.0
_GROWTH_BYTES = 1 << 30  # allowed memory growth in one call: a tracker may import much
_Result = TypeVar("_Result")


class Feed:
    """Updates one tracker. The tracker itself knows its last points; ``state`` records whether it is complete.

    ``folder`` is a descriptor of ``run_dir``. ``succeeded`` is called after every answer of the tracker and may raise
    to end the pass; ``is_wanted`` raises if the record should not begin.
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
        """Make one pass. Raises StoreError."""
        inputs = fingerprints(self.run_dir)  # taken first, so that changes during the pass cause another one
        tracker = self._begun(now)
        if not (tracker.live or now.ended):
            return
        self._log(tracker)
        if now.ended:
            self._ask(partial(tracker.end, describe(self.run_dir), str(now.state), now.end_ms))
            self._succeeded()
            self.forget()
            self.state.finish(inputs, self._folder)

    def forget(self) -> None:
        """Close the tracker; the next pass begins with a new object."""
        tracker, self._tracker, self._attempt = self._tracker, None, None
        caller, self._caller = self._caller, None
        if tracker is not None and caller is not None:
            with contextlib.suppress(Exception, SystemExit):  # the tracker has already failed
                caller.call(tracker.close, _CLOSE_S, ends_within_s=_ENDS_S)
        if caller is not None:
            caller.close()

    def _begun(self, now: Progress) -> Tracker:
        if self._tracker is not None and self._attempt == now.attempt:
            return self._tracker
        self.forget()
        self.state.save(self._folder)  # from here on a partial record may exist
        self._is_wanted()
        tracker = self._tracker = self._ask(self._make)
        if tracker.live or now.ended:
            begin = partial(tracker.begin, describe(self.run_dir))
            self._marks, self._place = self._ask(lambda: _marks(begin())), Place()
            self._attempt = now.attempt
        return tracker

    def _log(self, tracker: Tracker) -> None:
        """Send new points.

        An attempt that repeats steps from its checkpoint repeats their metrics; existing points stay.
        """
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
        """Call the tracker; every failure becomes a StoreError, and the tracker is dropped, because its state is
        unknown."""
        self._caller = self._caller or Caller(_GROWTH_BYTES)
        try:
            return self._caller.call(call, _CALL_S, ends_within_s=_ENDS_S)
        except StoreError:
            self._tracker = None  # its thread hangs, so it can't be closed
            self.forget()
            raise
        except (Exception, SystemExit) as error:  # third-party code may raise anything
            self.forget()
            final = isinstance(error, TrackerError | PacelineError | ImportError)
            raise StoreError(masking.shown(redact(_reason(error))), final=final) from error


def _marks(begun: object) -> dict[str, Mark]:
    """Validate the result of begin(). Raises TrackerError."""
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
