"""The controller's side of recording: starts the recorder processes and waits for them, never for long."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline import tracking
from pipeline.config.build import RunConfig
from pipeline.core.processes import priority, process
from pipeline.tracking.destinations import Destination
from pipeline.tracking.mlflow import artifacts

_PATIENCE_S = 120.0  # the recorder gives up by itself, sooner (recorder.py); this bounds one that does nothing
_BUSY_S = 600.0  # where it does something and others want the processors: it lets all of them go first
_LOOK_S = 5.0
_TRY = "  try: "  # before an error's hint, on a line of its own
LOG = "recorder.log"
_WORDS_BYTES = 1 << 16  # on a disk with less the recorder's own words may be cut, or missing
_PROC = Path("/proc")  # not on macOS


class DestinationRecorder:
    """Records one run in one destination, by a process of its own."""

    def __init__(self, run_dir: Path, to: Destination) -> None:
        self.run_dir = run_dir
        self.to = to
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.run_dir / (LOG if self.to.tracker is None else f"recorder.{self.to.tracker}.log")

    def start(self) -> None:
        """Record while the run goes on."""
        self._child = self._spawn(follow=True)
        priority.lower_priority(self._child.pid)

    def restore_priority(self) -> None:
        """The training is over: nobody else wants the processors as much any more."""
        if self._child is not None:
            priority.restore_priority(self._child.pid)

    def finish(self) -> None:
        """Until the recorder is done; once more where it died."""
        self.restore_priority()
        died = self._child is not None and _wait(self._child) and self._says_nothing()
        if died or (self._child is None and not self.is_recorded()):
            _wait(self._spawn())

    def replay(self) -> None:
        """The same, also where the destination lost what it was given."""
        _wait(self._spawn(check=True))

    def is_recorded(self) -> bool:
        return self.to.is_recorded(self.run_dir)

    def why(self) -> str:
        """Why the run isn't recorded, in a line."""
        recorded = self.to.last_recorded(self.run_dir)
        if recorded is not None and recorded.message:
            return recorded.message
        if (free_bytes := shutil.disk_usage(self.run_dir).free) < _WORDS_BYTES:
            return f"the disk of {self.run_dir} is full, {free_bytes:,} bytes are free: make room on it"
        last = [line for line in self._logged() if not line.startswith(_TRY)][-1:]
        return "; ".join([*last, f"see {self.log}"])

    def hint(self) -> str:
        """The command that records the run later."""
        file = self.to.database
        if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
            return f"doit record {self.run_dir.name} tracking.uri=sqlite:///<a file that you can write to>"
        recorded = self.to.last_recorded(self.run_dir)
        if recorded is not None and recorded.refused:
            return f"doit record {self.run_dir.name}, once that is fixed"
        last = self._logged()[-1:] if recorded is None or not recorded.message else []
        if last and last[0].startswith(_TRY):
            return last[0].removeprefix(_TRY)
        waits = file is None and self.to.tracker is None
        return f"doit record {self.run_dir.name}" + (", once the tracking server answers" if waits else "")

    def _logged(self) -> list[str]:
        """The lines of its log; the last ones are an error and what helps."""
        with contextlib.suppress(FileNotFoundError):
            return self.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return []

    def _says_nothing(self) -> bool:
        """The recorder left neither a record nor a reason: somebody (the system, short of memory) ended it."""
        recorded = self.to.last_recorded(self.run_dir)
        return not self.is_recorded() and (recorded is None or not recorded.message)

    def _spawn(self, *, follow: bool = False, check: bool = False) -> subprocess.Popen[bytes]:
        to = self.to
        argv = tracking.recorder_command(
            self.run_dir, to.uri, to.experiment, tracker=to.tracker, follow=follow, check=check
        )
        return process.background(argv, env=process.of_this_clone(to.env), log=self.log)


class Recorder:
    """Records one run in MLflow and other trackers. With tracking switched off it does nothing.

    ``make`` makes the recorder of one destination.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        root: Path,
        *,
        enabled: bool | None = None,
        make: Callable[[Path, Destination], DestinationRecorder] = DestinationRecorder,
    ) -> None:
        self.run_dir = run_dir
        destinations = tracking.destinations(vars(config.tracking), root, enabled=enabled)
        self._recorders = [make(run_dir, to) for to in destinations]

    def start(self) -> None:
        """Record while the run goes on. An earlier attempt's recorder ends by itself; a lock keeps the two apart."""
        for recorder in self._recorders:
            recorder.start()

    def restore_priority(self) -> None:
        """The training is over, the report isn't yet: what there is may be recorded meanwhile."""
        for recorder in self._recorders:
            recorder.restore_priority()

    def finish(self, say: Callable[[str], None]) -> str | None:
        """Wait until everything is recorded and return the MLflow run's id; None while the server doesn't answer.

        Must be called after the run's last state stands in its journal.
        """
        for recorder in self._recorders:
            recorder.finish()
        for recorder in self._missing():
            say(f"WARNING: not recorded in {recorder.to.title} yet: {recorder.why()}\n  try: {recorder.hint()}")

        run_id = self.mlflow_run_id()
        for line in artifacts.left_out(self.run_dir) if run_id is not None else ():
            say(f"note: {line}")
        return run_id

    def replay(self) -> bool:
        """Bring each destination to what the folder says, also where it lost what it was given; whether all are."""
        for recorder in self._recorders:
            recorder.replay()
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether everything is recorded."""
        return not self._missing()

    def where(self) -> str:
        """Where the run is recorded, in words."""
        run_id = self.mlflow_run_id()
        others = [recorder.to.title for recorder in self._recorders if recorder.to.tracker is not None]
        return " and ".join([*([f"MLflow run {run_id}"] if run_id else []), *others])

    def titles(self) -> str:
        return " and ".join(recorder.to.title for recorder in self._recorders)

    def why(self) -> str:
        """Why the run isn't recorded, in a line."""
        return "; ".join(recorder.why() for recorder in self._missing())

    def hint(self) -> str:
        """The command that records the run later."""
        return next(recorder.hint() for recorder in self._missing())

    def mlflow_run_id(self) -> str | None:
        """The id of the run's record in MLflow, where that is complete."""
        for recorder in self._recorders:
            if recorder.to.tracker is None and recorder.is_recorded():
                recorded = recorder.to.last_recorded(self.run_dir)
                return recorded.run_id if recorded is not None else None
        return None

    def _missing(self) -> list[DestinationRecorder]:
        return [recorder for recorder in self._recorders if not recorder.is_recorded()]


def _wait(child: subprocess.Popen[bytes]) -> bool:
    """Whether it ended by itself (True) or had to be ended."""

    def ended(timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=timeout_s)
            return True
        return False

    if patient(child.pid, ended):
        return True
    child.kill()
    child.wait()
    return False


def patient(pid: int, done: Callable[[float], bool]) -> bool:
    """Whether ``done``, which waits so many seconds for it, came true while the process ``pid`` still did something."""
    began = moved = time.monotonic()
    known = 0.0
    while (now := time.monotonic()) - moved < _PATIENCE_S and now - began < _BUSY_S:
        if done(_LOOK_S):
            return True
        used_s = _processor_s(pid)
        if used_s > known:
            known, moved = used_s, time.monotonic()
    return False


def _processor_s(pid: int) -> float:
    """Processor time of a process so far; 0 where there is none."""
    if not _PROC.is_dir():
        import psutil  # on macOS alone

        try:
            used = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)
    try:
        fields = (_PROC / f"{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
