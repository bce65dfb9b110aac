"""One recorder pass for a tracker other than MLflow: writes everything from the run folder that it doesn't have yet."""

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

_AT_ONCE = 1000  # points of one call
_CALL_S = 60.0  # time limit of one call, also the limit of waiting at the end of a run
_CLOSE_S, _ENDS_S = 5.0, 2.0
_GROWTH_BYTES = 1 << 30  # allowed memory growth in one call: a tracker may import much
_Result = TypeVar("_Result")


class TrackerWriter:
    """Updates one tracker, which knows its last points itself.

    Args:
        run_dir_fd: a descriptor of ``run_dir``.
        make: creates the tracker.
        state: records whether the record is complete.
        succeeded: called after every answer of the tracker; may raise to end the pass.
        refuse_unwanted: called before the record begins; raises if nobody wants it any more.
    """

    def __init__(
        self,
        run_dir: Path,
        run_dir_fd: int,
        make: Callable[[], Tracker],
        state: TrackingState,
        succeeded: Callable[[], None],
        refuse_unwanted: Callable[[], None],
    ) -> None:
        self.run_dir = run_dir
        self.state = state
        self._run_dir_fd = run_dir_fd
        self._make = make
        self._succeeded, self._refuse_unwanted = succeeded, refuse_unwanted
        self._tracker: Tracker | None = None
        self._caller: Caller | None = None
        self._attempt: int | None = None  # the attempt that the tracker has begun to record
        self._place = Place()
        self._marks: dict[str, Mark] = {}

    def write(self, run: Progress) -> None:
        """Make one pass. Raises StoreError."""
        inputs = fingerprints(self.run_dir)  # taken first, so that changes during the pass cause another one
        tracker = self._begun(run)
        if not (tracker.live or run.ended):
            return
        self._log(tracker)
        if run.ended:
            self._call(partial(tracker.end, describe(self.run_dir), str(run.state), run.end_ms))
            self._succeeded()
            self.forget()
            self.state.finish(inputs, self._run_dir_fd)

    def forget(self) -> None:
        """Close the tracker; the next pass begins with a new object."""
        tracker, self._tracker, self._attempt = self._tracker, None, None
        caller, self._caller = self._caller, None
        if tracker is not None and caller is not None:
            with contextlib.suppress(Exception, SystemExit):  # the tracker has already failed
                caller.call(tracker.close, _CLOSE_S, ends_within_s=_ENDS_S)
        if caller is not None:
            caller.close()

    def _begun(self, run: Progress) -> Tracker:
        """Return the tracker of this attempt, whose record it has begun if it records live or the run has ended."""
        if self._tracker is not None and self._attempt == run.attempt:
            return self._tracker
        self.forget()
        self.state.save(self._run_dir_fd)  # from here on a partial record may exist
        self._refuse_unwanted()
        tracker = self._tracker = self._call(self._make)
        if tracker.live or run.ended:
            begin = partial(tracker.begin, describe(self.run_dir))
            self._marks, self._place = self._call(lambda: _marks(begin())), Place()
            self._attempt = run.attempt
        return tracker

    def _log(self, tracker: Tracker) -> None:
        """Send new points. Those of steps that an attempt repeats from its checkpoint are in the record already."""
        while True:
            chunk = read_points(self.run_dir / run_folder.METRICS, self._place, _AT_ONCE)
            points = [*chunk.points, *(last_figures(self.run_dir, chunk.place) if chunk.is_last else ())]
            new = []
            for point in points:
                if point.key not in self._marks or point.mark > self._marks[point.key]:
                    new.append(point)
                    self._marks[point.key] = point.mark
            if new:
                self._call(partial(tracker.log, new))
                self._succeeded()
            self._place = chunk.place
            if chunk.is_last:
                return

    def _call(self, method: Callable[[], _Result]) -> _Result:
        """Call the tracker in its thread. After a failure it is dropped, as its state is unknown. Raises StoreError."""
        self._caller = self._caller or Caller(_GROWTH_BYTES)
        try:
            return self._caller.call(method, _CALL_S, ends_within_s=_ENDS_S)
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
