"""What one pass of the recorder gives to another tracker than MLflow: the points that it doesn't hold yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.core.errors import PacelineError, text_of
from pipeline.tracking import state
from pipeline.tracking.address import redact
from pipeline.tracking.description import Progress, describe
from pipeline.tracking.failures import StoreError
from pipeline.tracking.points import last_figures, read_points
from pipeline.tracking.state import TrackingState, fingerprints
from pipeline.tracking.trackers.base import Tracker, TrackerError

_AT_ONCE = 1000


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
        self._attempt: int | None = None  # that the tracker knows of
        self._offset_bytes = 0
        self._steps: dict[str, int] = {}

    def write(self, now: Progress) -> None:
        """Raises StoreError."""
        inputs = fingerprints(self.run_dir)  # taken first: what changes during the pass makes another one
        tracker = self._begun(now)
        if not (tracker.live or now.ended):
            return
        self._log(tracker)
        if now.ended:
            with self._asked():
                tracker.end(describe(self.run_dir), str(now.state), now.end_ms)
            self._succeeded()
            self.forget()
            self.state.inputs, self.state.state, self.state.message = inputs, state.DONE, ""
            self.state.save(self._folder)

    def forget(self) -> None:
        """The next pass begins with another object."""
        tracker, self._tracker, self._attempt = self._tracker, None, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # it has failed before
                tracker.close()

    def _begun(self, now: Progress) -> Tracker:
        if self._tracker is not None and self._attempt == now.attempt:
            return self._tracker
        self.forget()
        self.state.save(self._folder)  # from here on there may be a part of a record
        self._is_wanted()
        with self._asked():
            tracker = self._tracker = self._make()
            if tracker.live or now.ended:
                self._steps, self._offset_bytes = dict(tracker.begin(describe(self.run_dir))), 0
                self._attempt = now.attempt
        return tracker

    def _log(self, tracker: Tracker) -> None:
        """An attempt that repeats steps from its checkpoint repeats their metrics: what is there stays."""
        while True:
            chunk = read_points(self.run_dir / "metrics.jsonl", self._offset_bytes, _AT_ONCE)
            points = [*chunk.points, *(last_figures(self.run_dir) if chunk.is_last else ())]
            new = []
            for point in points:
                if point.step > self._steps.get(point.key, -1):
                    new.append(point)
                    self._steps[point.key] = point.step
            if new:
                with self._asked():
                    tracker.log(new)
                self._succeeded()
            self._offset_bytes = chunk.end_bytes
            if chunk.is_last:
                return

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Every failure of the tracker becomes a StoreError, and it is let go: what it has taken is not known."""
        try:
            yield
        except Exception as error:  # of many classes: it is other people's code
            self.forget()
            final = isinstance(error, TrackerError | PacelineError | ImportError)
            raise StoreError(redact(_reason(error)), final=final) from error


def _reason(error: Exception) -> str:
    if isinstance(error, PacelineError):
        return f"{error.what} ({error.hint})" if error.hint else error.what
    return text_of(error) if isinstance(error, TrackerError) else f"{type(error).__name__}: {text_of(error)}"
