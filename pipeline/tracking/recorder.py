"""Record one run: from its folder to MLflow or another tracker, live or later, each item exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from functools import partial
from pathlib import Path

from pipeline.core import masking
from pipeline.core.errors import PacelineError
from pipeline.core.locks import FileLock
from pipeline.core.redact import secret_values
from pipeline.tracking import state
from pipeline.tracking.address import redact, shown
from pipeline.tracking.answers import StoreError
from pipeline.tracking.description import Progress, progress
from pipeline.tracking.destinations import Destination, marked
from pipeline.tracking.mlflow.writer import MlflowWriter
from pipeline.tracking.state import TrackingState
from pipeline.tracking.tracker_writer import TrackerWriter
from pipeline.tracking.trackers import create
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
    destination = Destination(uri=uri, experiment=experiment, tracker=tracker, settings=settings)
    if not check and (recorded := _complete_record(destination, run_dir)) is not None:
        return recorded
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
        if not check and (recorded := _complete_record(destination, run_dir)) is not None:
            return recorded  # by the process that had the lock
        # An open folder keeps its inode, by which another folder at its path is recognized.
        run_dir_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _Recording(run_dir, run_dir_fd, destination, follow, give_up_s, parent_pid).run()
        finally:
            os.close(run_dir_fd)
    finally:
        lock.release()


def _complete_record(destination: Destination, run_dir: Path) -> TrackingState | None:
    return destination.last_recorded(run_dir) if destination.is_recorded(run_dir) else None


class _SlowError(Exception):
    """The run has ended and the store has used up its time."""


class _RemovedError(Exception):
    """The run folder was removed or replaced."""


class _Recording:
    """One call of ``record``: passes of a writer, until the record is complete or given up."""

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
        self.counting = self.refused = False  # refused: the last pass failed for a reason that waiting doesn't fix
        self.failure: str | None = None  # the store's error in the last pass
        self.destination = destination
        self.state = self._resumed_state()
        self.writer = self._writer()

    def _resumed_state(self) -> TrackingState:
        """Return the state of an earlier record in the same destination; a new one without such a record."""
        to = self.destination
        uri, experiment = shown(to.uri), marked(to.experiment, to.settings)
        earlier = state.load(self.run_dir, to.tracker)
        if earlier and (earlier.uri, earlier.experiment) == (uri, experiment):
            earlier.state, earlier.refused = state.RECORDING, False
            return earlier
        return TrackingState(uri=uri, experiment=experiment, token=uuid.uuid4().hex, tracker=to.tracker)

    def _writer(self) -> MlflowWriter | TrackerWriter:
        to = self.destination
        if to.tracker is None:
            return MlflowWriter(self.run_dir, self.run_dir_fd, to.uri, self.state, self._succeeded)
        masking.remember(secret_values(json.loads(to.settings)))
        make = partial(create, to.tracker, to.experiment, to.settings, self.run_dir)
        return TrackerWriter(self.run_dir, self.run_dir_fd, make, self.state, self._succeeded, self._refuse_unwanted)

    def run(self) -> TrackingState:
        """Make passes until the record is complete, or nobody wants it any more."""
        backoff_s = _POLL_S
        while True:
            journal_bytes = self._journal_bytes()  # taken first, so that a line added from here on ends the sleep
            run = progress(self.run_dir)
            self.ended_at = (self.ended_at or time.monotonic()) if run.ended else None
            failure = self._try(run)
            if self._removed() or (failure is None and (run.ended or not self.follow)):
                return self.state
            if failure is not None and self._out_of_patience(run):
                return self._pending(failure)
            age_s = time.monotonic() - self.began
            backoff_s = max(_POLL_S, age_s / _SPARSER) if failure is None else backoff_s * 2
            backoff_s = min(backoff_s, _MAX_BACKOFF_S)
            if self._abandoned():
                return self.state
            self._sleep(min(backoff_s, self.give_up_s / 5) if run.ended else backoff_s, journal_bytes)

    def _try(self, run: Progress) -> str | None:
        """Make one pass; return the reason if the store failed."""
        if self.follow and not run.ended and not self._under_way():
            return None
        if not self.counting:  # from here on: the import of mlflow may take a minute on a busy host
            self.counting, self.last_success = True, time.monotonic()
            self.ended_at = None if self.ended_at is None else self.last_success
        self.refused = False
        try:
            self.writer.write(run)
        except StoreError as error:
            full = _full_disk(self.destination.database, str(error))
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
        """Return True once there are metrics, or the head start of the ranks is over."""
        with contextlib.suppress(FileNotFoundError):
            if (self.run_dir / run_folder.METRICS).stat().st_size > 0:
                return True
        return time.monotonic() - self.began > _HEAD_START_S

    def _out_of_patience(self, run: Progress) -> bool:
        if self.follow and not run.ended:
            return False
        return self.refused or time.monotonic() - self.last_success > self.give_up_s or self._tail_is_over()

    def _tail_is_over(self) -> bool:
        """Return True if the time after the run's end is used up, even if some calls succeed."""
        return self.ended_at is not None and time.monotonic() - self.ended_at > _TAIL_S

    def _succeeded(self) -> None:
        self.last_success = time.monotonic()
        self._refuse_unwanted()

    def _refuse_unwanted(self) -> None:
        """End the pass if nobody wants the record any more. Raises _RemovedError, _SlowError."""
        if self._removed():
            raise _RemovedError
        if self.follow and self._tail_is_over():
            raise _SlowError

    def _abandoned(self) -> bool:
        """Return True if the command that wanted the record is gone, or the run folder was removed."""
        return self.parent_pid not in (None, os.getppid()) or self._removed()

    def _removed(self) -> bool:
        """Return True if another folder may have replaced the run folder, so nothing may be written."""
        try:
            return not os.path.samestat(self.run_dir.stat(), os.fstat(self.run_dir_fd))
        except FileNotFoundError:
            return True

    def _journal_bytes(self) -> int:
        try:
            return (self.run_dir / run_folder.JOURNAL).stat().st_size
        except FileNotFoundError:
            return 0

    def _sleep(self, seconds: float, journal_bytes: int) -> None:
        """Sleep at most ``seconds``; wake up when the journal has another size or the parent is gone."""
        until = time.monotonic() + seconds
        while (remaining_s := until - time.monotonic()) > 0:
            time.sleep(min(remaining_s, _LOOK_S))
            if self._abandoned() or self._journal_bytes() != journal_bytes:
                return

    def _pending(self, reason: str) -> TrackingState:
        self.state.state, self.state.refused = state.PENDING, self.refused
        where = f"MLflow at {self.state.uri}" if self.state.tracker is None else self.destination.title
        self.state.message = redact(f"{where} took no (more) records: {reason}")
        with contextlib.suppress(FileNotFoundError):  # the folder was just removed
            self.state.save(self.run_dir_fd)
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
