"""The controller's side of recording: starts recorder processes, and waits for them for a limited time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from pipeline import tracking
from pipeline.config.build import RunConfig
from pipeline.core.processes import process
from pipeline.tracking.destinations import Destination, load
from pipeline.tracking.sent_files import notes_on_left_out

PATIENCE_S = 600.0  # a recorder gives up sooner by itself, unless a busy host leaves it no CPU time
_TRY = "  try: "  # before an error's hint, on a line of its own
LOG = "recorder.log"
_LOG_BYTES = 1 << 16  # with less free disk space the recorder's log may be incomplete


class DestinationRecorder:
    """Records one run in one destination (MLflow, or another tracker), by a recorder process for this alone."""

    def __init__(self, run_dir: Path, to: Destination) -> None:
        self.run_dir = run_dir
        self.to = to
        self._child: subprocess.Popen[bytes] | None = None
        self._of_earlier_attempts: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> Path:
        return self.run_dir / (LOG if self.to.tracker is None else f"recorder.{self.to.tracker}.log")

    def start(self) -> None:
        """Record while the run goes on."""
        # an earlier attempt's process ends by itself; until then it holds the lock, for which the new one waits
        if self._child is not None and self._child.poll() is None:
            self.restore_priority()
            self._of_earlier_attempts.append(self._child)
        self._child = self._spawn(follow=True)
        # set here, because the child might get its first time slice only after the training has ended
        process.set_priority(self._child.pid, process.LEAST)

    def restore_priority(self) -> None:
        """Restore normal priority after the training, when the ranks no longer need the processors."""
        if self._child is not None:
            process.set_priority(self._child.pid, process.NORMAL)

    def finish(self) -> None:
        """Wait until the recorder is done; restart it once if it died."""
        self.restore_priority()
        for earlier in self._of_earlier_attempts:
            _wait(earlier)
        has_died = self._child is not None and _wait(self._child) and self._left_no_reason()
        if has_died or (self._child is None and not self.is_recorded()):
            _wait(self._spawn())

    def replay(self) -> None:
        """Record everything again, even if the destination lost its data."""
        _wait(self._spawn(check=True))

    def is_recorded(self) -> bool:
        return self.to.is_recorded(self.run_dir)

    def why(self) -> str:
        """Return the reason why the run isn't recorded, on one line."""
        recorded = load(self.run_dir, self.to.tracker)
        if recorded is not None and recorded.message:
            return recorded.message
        if (free_bytes := shutil.disk_usage(self.run_dir).free) < _LOG_BYTES:
            return f"the disk of {self.run_dir} is full, {free_bytes:,} bytes are free: make room on it"
        last_line = [line for line in self._log_lines() if not line.startswith(_TRY)][-1:]
        return "; ".join([*last_line, f"see {self.log}"])

    def hint(self) -> str:
        """Return the command that records the run later."""
        record_again, database = f"doit record {self.run_dir.name}", self.to.database
        recorded = load(self.run_dir, self.to.tracker)
        if database is not None and not os.access(database if database.exists() else database.parent, os.W_OK):
            return f"{record_again} tracking.uri=sqlite:///<a file that you can write to>"
        if recorded is not None and recorded.refused:
            return f"{record_again}, once that is fixed"
        # without a message in tracking.json, the recorder's own error is at the end of its log
        last_line = self._log_lines()[-1:] if recorded is None or not recorded.message else []
        if last_line and last_line[0].startswith(_TRY):
            return last_line[0].removeprefix(_TRY)
        is_server = database is None and self.to.tracker is None
        return f"{record_again}, once the tracking server answers" if is_server else record_again

    def _log_lines(self) -> list[str]:
        """Return the lines of the recorder's log; if it failed, the last ones are the error and its hint."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return []

    def _left_no_reason(self) -> bool:
        """Return True if the recorder left neither a record nor a reason: it was killed (for example out of memory)."""
        recorded = load(self.run_dir, self.to.tracker)
        return not self.is_recorded() and (recorded is None or not recorded.message)

    def _spawn(self, *, follow: bool = False, check: bool = False) -> subprocess.Popen[bytes]:
        to, flags = self.to, {"follow": follow, "check": check}
        argv = tracking.recorder_command(self.run_dir, to.uri, to.experiment, tracker=to.tracker, **flags)
        return process.background(argv, env=process.child_environment(to.env), log=self.log)


class Recorder:
    """Records one run in MLflow and other trackers; does nothing if tracking is disabled.

    ``enabled``: record in MLflow; None: as configured. ``make`` creates the recorder of one destination.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, root: Path, *, enabled: bool | None = None,
        make: Callable[[Path, Destination], DestinationRecorder] = DestinationRecorder,
    ) -> None:  # fmt: skip
        self.run_dir = run_dir
        destinations = tracking.destinations(vars(config.tracking), root, enabled=enabled)
        self._recorders = [make(run_dir, to) for to in destinations]

    def start(self) -> None:
        """Record while the run goes on."""
        for recorder in self._recorders:
            recorder.start()

    def restore_priority(self) -> None:
        """Restore normal priority after the training, so that recording goes on during the report."""
        for recorder in self._recorders:
            recorder.restore_priority()

    def finish(self, say: Callable[[str], None]) -> str | None:
        """Wait until everything is recorded; return the MLflow run's id, or None if the record is incomplete.

        Call it after the run's last state is in its journal.
        """
        for recorder in self._recorders:
            recorder.finish()
        for recorder in self._missing():
            say(f"WARNING: not recorded in {recorder.to.title} yet: {recorder.why()}\n  try: {recorder.hint()}")

        run_id = self.mlflow_run_id()
        for line in notes_on_left_out(self.run_dir) if run_id is not None else ():
            say(f"note: {line}")
        return run_id

    def replay(self) -> bool:
        """Update each destination from the folder, even if it lost its data; return True if all are complete."""
        for recorder in self._recorders:
            recorder.replay()
        return self.is_complete()

    def is_complete(self) -> bool:
        return not self._missing()

    def titles(self) -> str:
        """Name the destinations, MLflow's with the id of its run."""
        run_id = self.mlflow_run_id()
        names = (recorder.to.title for recorder in self._recorders)
        return " and ".join(f"MLflow run {run_id}" if name == "MLflow" and run_id else name for name in names)

    def why(self) -> str:
        """Return the reason why the run isn't recorded, on one line."""
        return "; ".join(recorder.why() for recorder in self._missing())

    def hint(self) -> str:
        """Return the command that records the run later."""
        return next(recorder.hint() for recorder in self._missing())

    def mlflow_run_id(self) -> str | None:
        """Return the id of the run's MLflow record, if that is complete."""
        for recorder in self._recorders:
            if recorder.to.tracker is None and recorder.is_recorded():
                recorded = load(self.run_dir, recorder.to.tracker)
                return recorded.run_id if recorded is not None else None
        return None

    def _missing(self) -> list[DestinationRecorder]:
        return [recorder for recorder in self._recorders if not recorder.is_recorded()]


def _wait(child: subprocess.Popen[bytes]) -> bool:
    """Return True if the process ended by itself, False if it was killed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=PATIENCE_S)
        return True
    child.kill()
    child.wait()
    return False
