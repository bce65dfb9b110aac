"""Record one run: from its folder to MLflow or another tracker, live or later, each item exactly once."""

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
from pipeline.tracking import state
from pipeline.tracking.address import redact, shown
from pipeline.tracking.answers import Caller, StoreError
from pipeline.tracking.description import Progress, describe, progress
from pipeline.tracking.destinations import Destination, marked
from pipeline.tracking.mlflow.writer import Writer
from pipeline.tracking.points import Mark, Place, last_figures, read_points
from pipeline.tracking.state import TrackingState, fingerprints
from pipeline.tracking.trackers import create
from pipeline.tracking.trackers.base import Tracker, TrackerError
from trainers.contract import run_folder

_POLL_S = 1.0
_SPARSER = 4  # polls become rarer: after 40 s every 10 s, so the number of requests grows logarithmically at first
_LOOK_S = 0.2  # interval of checking the journal's size between polls, so that the end is noticed soon
_HEAD_START_S = 15.0  # importing mlflow takes 1–3 s of CPU time, which belongs to the ranks until the first metrics
_MAX_BACKOFF_S = 30.0
_TAIL_S = 60.0  # after the run's end, for a slow store or a busy host: the limit of `doit train`'s wait
_WAIT_S = 15.0  # for another process that is recording the same run
_FOLLOWER_WAIT_S = 90.0  # the previous attempt's follower may still be finishing
_TRANSACTION_BYTES = 256 << 10  # needed by sqlite per transaction; a disk filled by sqlite keeps 12–45 KiB free
_AT_ONCE = 1000
_CALL_S = 60.0  # time limit of one call, also the limit of waiting at the end of a run
_CLOSE_S, _ENDS_S = 5.0, 2.0
_GROWTH_BYTES = 1 << 30  # allowed memory growth in one call: a tracker may import much
_Result = TypeVar("_Result")


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
    """Update MLflow, or another ``tracker``, from the run folder; existing data is not written again.

    With ``follow`` this continues until the journal says that the attempt has ended, or until process ``parent_pid`` is
    no longer this one's parent. A failing store is retried while the run is going on; after the run's end until nothing
    has succeeded for ``give_up_s`` or the store refuses (then the state is ``pending``). With ``check`` the store is
    queried even if tracking.json says that it has everything, because it may be a new one. ``settings`` are the
    tracker's own fields as JSON; its ``uri`` is its name.

    Raises:
        PacelineError: the folder is no run, or another process is recording it.
    """
    to = Destination(uri=uri, experiment=experiment, tracker=tracker, settings=settings)
    if not check and to.is_recorded(run_dir) and (recorded := to.last_recorded(run_dir)) is not None:
        return recorded
    if not (run_dir / run_folder.CONFIG).is_file():
        raise PacelineError(f"{run_dir} is not a run folder: config.json is missing", hint="doit runs")
    lock = FileLock(run_dir / (".tracking.lock" if to.tracker is None else f".tracking.{to.tracker}.lock"))
    try:
        lock.wait(timeout_s=_FOLLOWER_WAIT_S if follow else _WAIT_S)
    except TimeoutError:
        raise PacelineError(
            f"another process is recording {run_dir.name}", hint=f"doit record {run_dir.name}, when it is done"
        ) from None
    try:
        if not check and to.is_recorded(run_dir) and (recorded := to.last_recorded(run_dir)) is not None:
            return recorded  # by the process that had the lock
        # While it is open, the folder keeps its inode reserved, which therefore identifies it.
        folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _Recording(run_dir, folder, to, follow, give_up_s, parent_pid).run()
        finally:
            os.close(folder)
    finally:
        lock.release()


class _SlowError(Exception):
    """The run has ended and the store has used up its time."""


class _RemovedError(Exception):
    """The run folder was removed or replaced."""


class _Recording:
    def __init__(
        self, run_dir: Path, folder: int, to: Destination, follow: bool, give_up_s: float, parent_pid: int | None
    ) -> None:
        self.run_dir, self.folder, self.follow = run_dir, folder, follow
        self.give_up_s, self.parent_pid = give_up_s, parent_pid
        self.began = self.last_success = time.monotonic()
        self.ended_at: float | None = None
        self.counting = self.refused = False  # refused: the last pass failed for a reason that waiting doesn't fix
        self.failure: str | None = None  # the store's error in the last pass
        self.title, self.database = to.title, to.database
        self.state = self._resumed_state(to)
        self.writer = self._writer(to)

    def _resumed_state(self, to: Destination) -> TrackingState:
        known, experiment = state.load(self.run_dir, to.tracker), marked(to.experiment, to.settings)
        if known and (known.uri, known.experiment) == (shown(to.uri), experiment):
            known.state, known.refused = state.RECORDING, False
            return known
        return TrackingState(uri=shown(to.uri), experiment=experiment, token=uuid.uuid4().hex, tracker=to.tracker)

    def _writer(self, to: Destination) -> Writer | Feed:
        if to.tracker is None:
            return Writer(self.run_dir, self.folder, to.uri, self.state, self._succeeded)
        masking.remember(secret_values(json.loads(to.settings)))
        make = partial(create, to.tracker, to.experiment, to.settings, self.run_dir)
        return Feed(self.run_dir, self.folder, make, self.state, self._succeeded, self._is_wanted)

    def run(self) -> TrackingState:
        """Make passes until the record is complete, or nobody wants it any more."""
        backoff_s = _POLL_S
        while True:
            size = self._journal_bytes()  # taken first, so that a line added from here on ends the sleep below
            now = progress(self.run_dir)
            self.ended_at = (self.ended_at or time.monotonic()) if now.ended else None
            failure = self._try(now)
            if self._removed() or (failure is None and (now.ended or not self.follow)):
                return self.state
            if failure is not None and self._out_of_patience(now):
                return self._pending(failure)
            age_s = time.monotonic() - self.began
            backoff_s = max(_POLL_S, age_s / _SPARSER) if failure is None else backoff_s * 2
            backoff_s = min(backoff_s, _MAX_BACKOFF_S)
            if self._abandoned():
                return self.state
            self._sleep(min(backoff_s, self.give_up_s / 5) if now.ended else backoff_s, size)

    def _try(self, now: Progress) -> str | None:
        """Make one pass; return the reason if the store failed."""
        if self.follow and not now.ended and not self._under_way():
            return None
        if not self.counting:  # from here on: the import of mlflow may take a minute on a busy host
            self.counting, self.last_success = True, time.monotonic()
            self.ended_at = None if self.ended_at is None else self.last_success
        self.refused = False
        try:
            self.writer.write(now)
        except StoreError as error:
            full = _full_disk(self.database, str(error))
            self.refused, self.failure = error.final or full is not None, full or str(error)
            return self.failure
        except _RemovedError:
            return None  # the caller checks _removed()
        except FileNotFoundError:
            if not self._removed():
                raise
            return None
        except _SlowError:
            return self.failure or f"too slow: not everything was taken within {_TAIL_S:g} s"
        self.failure = None
        return None

    def _under_way(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            if (self.run_dir / run_folder.METRICS).stat().st_size > 0:
                return True
        return time.monotonic() - self.began > _HEAD_START_S

    def _out_of_patience(self, now: Progress) -> bool:
        if self.follow and not now.ended:
            return False
        return self.refused or time.monotonic() - self.last_success > self.give_up_s or self._tail_is_over()

    def _tail_is_over(self) -> bool:
        """Return True if the time after the run's end is used up, even if some calls succeed."""
        return self.ended_at is not None and time.monotonic() - self.ended_at > _TAIL_S

    def _succeeded(self) -> None:
        self.last_success = time.monotonic()
        self._is_wanted()

    def _is_wanted(self) -> None:
        if self._removed():
            raise _RemovedError
        if self.follow and self._tail_is_over():
            raise _SlowError

    def _abandoned(self) -> bool:
        """Return True if the command that wants the record is gone, or the run folder was removed."""
        return self.parent_pid not in (None, os.getppid()) or self._removed()

    def _removed(self) -> bool:
        """Return True if another folder may have replaced the run folder, so nothing may be written."""
        try:
            return not os.path.samestat(self.run_dir.stat(), os.fstat(self.folder))
        except FileNotFoundError:
            return True

    def _journal_bytes(self) -> int:
        try:
            return (self.run_dir / run_folder.JOURNAL).stat().st_size
        except FileNotFoundError:
            return 0

    def _sleep(self, seconds: float, size: int) -> None:
        """Sleep at most ``seconds``; wake up when the journal's size changes or the parent is gone."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            if self._abandoned() or self._journal_bytes() != size:
                return

    def _pending(self, reason: str) -> TrackingState:
        self.state.state, self.state.refused = state.PENDING, self.refused
        where = f"MLflow at {self.state.uri}" if self.state.tracker is None else self.title
        self.state.message = redact(f"{where} took no (more) records: {reason}")
        with contextlib.suppress(FileNotFoundError):  # the folder was just removed
            self.state.save(self.folder)
        return self.state


def _full_disk(database: Path | None, reason: str) -> str | None:
    """Return the message of a full disk if that may be the cause of a sqlite failure.

    sqlite reports a full disk as a read-only database, and MLflow's retry as a duplicate column.
    """
    if database is None or "(sqlite3." not in reason:
        return None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(database.parent).free
        if free_bytes < _TRANSACTION_BYTES:
            return f"the disk of {database.parent} is full, {free_bytes:,} bytes are free: make room on it"
    return None


# ------------------------------------------------------------- one pass for a tracker other than MLflow
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
