"""The loop that records one run in MLflow or another tracker, live or afterwards.

It makes passes over the run folder until everything is recorded, each point once. A pass is made by ``MlflowWriter``,
or for another tracker by ``TrackerWriter``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pipeline.core import masking
from pipeline.core.errors import PacelineError, text_of
from pipeline.core.locks import FileLock
from pipeline.core.redact import secret_values
from pipeline.tracking.description import Progress, describe, progress
from pipeline.tracking.destinations import PENDING, RECORDING, Destination, TrackingState, input_stamps, load, redact
from pipeline.tracking.mlflow_writer import MlflowWriter
from pipeline.tracking.points import Mark, ReadPosition, last_figures, read_points
from pipeline.tracking.store_calls import Caller, StoreError
from pipeline.tracking.trackers import create
from pipeline.tracking.trackers.base import Tracker, TrackerError
from trainers.contract import run_folder

_MOST_POINTS = 1000  # of one call
_CALL_S = 60.0  # time limit of one call of a tracker
_CLOSE_S, _ENDS_S = 5.0, 2.0
_GROWTH_BYTES = 1 << 30  # allowed memory growth in one call: a tracker may import much
_Result = TypeVar("_Result")


class TrackerWriter:
    """Brings one tracker other than MLflow up to date, and keeps ``state`` (tracking.NAME.json) consistent with it.

    ``make`` creates the tracker. ``succeeded`` is called after every answer of the tracker, and may raise to end the
    pass. ``refuse_unwanted`` is called before the record begins, and raises if nobody wants the record any more.
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
        self._position = ReadPosition()
        self._marks: dict[str, Mark] = {}

    def write(self, run: Progress) -> None:
        """Make one pass. Raises StoreError."""
        inputs = input_stamps(self.run_dir)  # taken first, so that changes during the pass cause another one
        tracker = self._tracker_of_attempt(run)
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

    def _tracker_of_attempt(self, run: Progress) -> Tracker:
        """Return this attempt's tracker, and begin the record, unless the tracker records only ended runs."""
        if self._tracker is not None and self._attempt == run.attempt:
            return self._tracker
        self.forget()
        self.state.save(self._run_dir_fd)  # from here on a partial record may exist
        self._refuse_unwanted()
        tracker = self._tracker = self._call(self._make)
        if tracker.live or run.ended:
            begin = partial(tracker.begin, describe(self.run_dir))
            self._marks, self._position = self._call(lambda: _checked_marks(begin())), ReadPosition()
            self._attempt = run.attempt
        return tracker

    def _log(self, tracker: Tracker) -> None:
        """Send the points that the record lacks. It has those of steps that an earlier attempt has done already."""
        while True:
            chunk = read_points(self.run_dir / run_folder.METRICS, self._position, _MOST_POINTS)
            final_points = last_figures(self.run_dir, chunk.position) if chunk.is_last else ()
            new = []
            for point in [*chunk.points, *final_points]:
                if point.key not in self._marks or point.mark > self._marks[point.key]:
                    new.append(point)
                    self._marks[point.key] = point.mark
            if new:
                self._call(partial(tracker.log, new))
                self._succeeded()
            self._position = chunk.position
            if chunk.is_last:
                return

    def _call(self, method: Callable[[], _Result]) -> _Result:
        """Call the tracker in its thread; drop it after a failure, as its state is unknown. Raises StoreError."""
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
            reason = text_of(error) if isinstance(error, TrackerError) else f"{type(error).__name__}: {text_of(error)}"
            if isinstance(error, PacelineError):
                reason = f"{error.what} ({error.hint})" if error.hint else error.what
            raise StoreError(masking.shown(redact(reason)), final=final) from error


def _checked_marks(returned: object) -> dict[str, Mark]:
    """Check what a tracker's begin() returned: metric → mark of its last point. Raises TrackerError."""
    marks = dict[str, Mark]()
    for key, mark in returned.items() if isinstance(returned, Mapping) else [(returned, None)]:
        match key, mark:
            case str(), (int(lap), int(step)):
                marks[key] = lap, step
            case _:
                raise TrackerError(f"its begin() returned {returned!r:.80}, not point.mark of each metric's last point")
    return marks


# ------------------------------------------------------------------------------------ passes over a run
_PASS_S = 1.0  # between two passes at first
_SPARSER = 4  # a pass follows after a quarter of the recorder's age: after 40 s one each 10 s
_MAX_BACKOFF_S = 30.0
_LOOK_S = 0.2  # interval of checking the journal's size between passes, so that the run's end is noticed soon
_HEAD_START_S = 15.0  # importing mlflow takes 1–3 s of CPU time, which belongs to the ranks until the first metrics
_TAIL_S = 60.0  # after the run's end, for a slow store or a busy host; `doit train` waits no longer
_WAIT_S = 15.0  # for another process that is recording the same run
_FOLLOWER_WAIT_S = 90.0  # the previous attempt's follower may still be finishing
_TRANSACTION_BYTES = 256 << 10  # that sqlite needs per transaction; when it has filled a disk, 12–45 KiB are still free


def record(
    run_dir: Path,
    uri: str,
    experiment: str,
    *,
    follow: bool = False,
    check: bool = False,
    give_up_s: float = 10.0,
    parent_pid: int | None = None,
    tracker: str | None = None,
    settings: str = "{}",
) -> TrackingState:
    """Record what MLflow, or another ``tracker``, doesn't have of the run folder yet.

    While the run is going on, a failing store is tried again. After the run's end the record is given up once nothing
    has succeeded for ``give_up_s``, or the store refuses; its state is ``pending`` then.

    Args:
        uri: the address of MLflow's store; the name of another tracker.
        follow: go on until the journal says that the attempt has ended.
        check: ask the store even if tracking.json says that it has everything, because it may have been replaced.
        parent_pid: stop once the process with this id is no longer the parent of this one.
        settings: another tracker's own fields, as JSON.

    Raises PacelineError: the folder is no run, or another process is recording it.
    """
    destination = Destination(uri=uri, experiment=experiment, tracker=tracker, settings=settings)
    if not (run_dir / run_folder.CONFIG).is_file():
        raise PacelineError(f"{run_dir} is not a run folder: config.json is missing", hint="doit runs")
    lock = FileLock(run_dir / (".tracking.lock" if tracker is None else f".tracking.{tracker}.lock"))
    try:
        lock.wait(timeout_s=_FOLLOWER_WAIT_S if follow else _WAIT_S)
    except TimeoutError:
        raise PacelineError(
            f"another process is recording {run_dir.name}", hint=f"doit record {run_dir.name}, when it is done"
        ) from None
    try:
        if not check and destination.is_recorded(run_dir) and (recorded := load(run_dir, tracker)) is not None:
            return recorded
        # an open folder keeps its inode, so another folder at its path is noticed
        run_dir_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _Recording(run_dir, run_dir_fd, destination, follow, give_up_s, parent_pid).run()
        finally:
            os.close(run_dir_fd)
    finally:
        lock.release()


class _TooSlowError(Exception):
    """The run has ended, and the store has used up its time."""


class _RemovedError(Exception):
    """The run folder was removed or replaced."""


class _Recording:
    """One record in progress: makes passes and judges whether to try again after a failed one."""

    def __init__(
        self,
        run_dir: Path,
        run_dir_fd: int,
        destination: Destination,
        follow: bool,
        give_up_s: float,
        parent_pid: int | None,
    ) -> None:
        self.run_dir, self.run_dir_fd, self.follow = run_dir, run_dir_fd, follow
        self.give_up_s, self.parent_pid = give_up_s, parent_pid
        self.began = self.last_success = time.monotonic()
        self.ended_at: float | None = None
        self.has_begun = False  # the store's time limits count from the first pass
        self.refused = False  # the last pass failed for a reason that waiting doesn't fix
        self.failure: str | None = None  # the store's error in the last pass
        to = self.destination = destination
        uri, experiment = to.identity
        earlier = load(run_dir, to.tracker)
        if earlier and (earlier.uri, earlier.experiment) == (uri, experiment):
            self.state = earlier
            earlier.state, earlier.refused = RECORDING, False
        else:
            self.state = TrackingState(uri=uri, experiment=experiment, token=uuid.uuid4().hex, tracker=to.tracker)
        self.writer: MlflowWriter | TrackerWriter
        if to.tracker is None:
            self.writer = MlflowWriter(run_dir, run_dir_fd, to.uri, self.state, self._succeeded)
        else:
            masking.remember(secret_values(json.loads(to.settings)))
            make = partial(create, to.tracker, to.experiment, to.settings, run_dir)
            self.writer = TrackerWriter(run_dir, run_dir_fd, make, self.state, self._succeeded, self._refuse_unwanted)

    def run(self) -> TrackingState:
        """Make passes until the record is complete, or nobody wants it any more."""
        backoff_s = _PASS_S
        while True:
            # taken first, so that a line added from here on ends the sleep
            journal_bytes = self._bytes_of(run_folder.JOURNAL)
            run = progress(self.run_dir)
            self.ended_at = (self.ended_at or time.monotonic()) if run.ended else None
            failure = self._pass(run)
            is_last_pass = run.ended or not self.follow
            if self._is_removed() or (failure is None and is_last_pass):
                return self.state
            silent_s = time.monotonic() - self.last_success
            gives_up = self.refused or silent_s > self.give_up_s or self._tail_is_over()
            if failure is not None and gives_up and is_last_pass:
                return self._give_up(failure)
            # the longer a run goes on, the rarer are the passes: they cost time of the processors that train
            age_s = time.monotonic() - self.began
            backoff_s = max(_PASS_S, age_s / _SPARSER) if failure is None else backoff_s * 2
            backoff_s = min(backoff_s, _MAX_BACKOFF_S)
            if self._is_abandoned():
                return self.state
            self._sleep(min(backoff_s, self.give_up_s / 5) if run.ended else backoff_s, journal_bytes)

    def _pass(self, run: Progress) -> str | None:
        """Make one pass; return why the store failed, or None."""
        is_head_start = self.follow and not run.ended and time.monotonic() - self.began <= _HEAD_START_S
        if is_head_start and self._bytes_of(run_folder.METRICS) == 0:
            return None
        if not self.has_begun:  # the limits count from here: imports may have taken a minute on a busy host
            self.has_begun, self.last_success = True, time.monotonic()
            self.ended_at = None if self.ended_at is None else self.last_success
        self.refused = False
        try:
            self.writer.write(run)
        except StoreError as error:
            disk_is_full = _full_disk(self.destination.database, str(error))
            self.refused, self.failure = error.final or disk_is_full is not None, disk_is_full or str(error)
            return self.failure
        except (_RemovedError, FileNotFoundError):
            if not self._is_removed():
                raise
            return None  # run() checks it too, and ends
        except _TooSlowError:
            return self.failure or f"too slow: not everything was taken within {_TAIL_S:g} s"
        self.failure = None
        return None

    def _tail_is_over(self) -> bool:
        """Return True if the time after the run's end is used up, even if some calls succeed."""
        return self.ended_at is not None and time.monotonic() - self.ended_at > _TAIL_S

    def _succeeded(self) -> None:
        self.last_success = time.monotonic()
        self._refuse_unwanted()

    def _refuse_unwanted(self) -> None:
        """End the pass if nobody wants the record any more. Raises _RemovedError, _TooSlowError."""
        if self._is_removed():
            raise _RemovedError
        if self.follow and self._tail_is_over():
            raise _TooSlowError

    def _is_abandoned(self) -> bool:
        return self.parent_pid not in (None, os.getppid()) or self._is_removed()

    def _is_removed(self) -> bool:
        """Return True if the run folder is gone, or another one is at its path, so nothing may be written."""
        try:
            return not os.path.samestat(self.run_dir.stat(), os.fstat(self.run_dir_fd))
        except FileNotFoundError:
            return True

    def _bytes_of(self, name: str) -> int:
        try:
            return (self.run_dir / name).stat().st_size
        except FileNotFoundError:
            return 0

    def _sleep(self, seconds: float, journal_bytes: int) -> None:
        """Sleep at most ``seconds``; wake up when the journal has another size or the parent is gone."""
        until = time.monotonic() + seconds
        while (remaining_s := until - time.monotonic()) > 0:
            time.sleep(min(remaining_s, _LOOK_S))
            if self._is_abandoned() or self._bytes_of(run_folder.JOURNAL) != journal_bytes:
                return

    def _give_up(self, reason: str) -> TrackingState:
        """Note in tracking.json that the record is incomplete, and why."""
        self.state.state, self.state.refused = PENDING, self.refused
        where = f"MLflow at {self.state.uri}" if self.state.tracker is None else self.destination.title
        self.state.message = redact(f"{where} took no (more) records: {reason}")
        with contextlib.suppress(FileNotFoundError):  # the folder was just removed
            self.state.save(self.run_dir_fd)
        return self.state


def _full_disk(database: Path | None, reason: str) -> str | None:
    """Return the message of a full disk if a full disk may be why sqlite failed; None otherwise."""
    # sqlite itself then says that the database is read-only, or that a column is a duplicate
    if database is None or "(sqlite3." not in reason:
        return None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(database.parent).free
        if free_bytes < _TRANSACTION_BYTES:
            return f"the disk of {database.parent} is full, {free_bytes:,} bytes are free: make room on it"
    return None
