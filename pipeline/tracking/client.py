"""The controller's side of recording: starts the recorder process and waits for it, never for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline import tracking
from pipeline.config.build import RunConfig
from pipeline.core import process

_PATIENCE_S = 120.0  # the recorder gives up by itself, sooner (recorder.py); this bounds one that does nothing
_BUSY_S = 600.0  # where it does something and others want the processors: it lets all of them go first
_LOOK_S = 5.0
LOG = "recorder.log"


class Recorder:
    """One run's way into MLflow. With tracking switched off ``start`` does nothing and ``finish`` returns None."""

    def __init__(self, run_dir: Path, config: RunConfig, root: Path, *, enabled: bool | None = None) -> None:
        self.run_dir = run_dir
        self.enabled = config.tracking.enabled if enabled is None else enabled
        self.uri = tracking.absolute_uri(config.tracking.uri, root)
        self.experiment = config.tracking.experiment
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Record while the run goes on. An earlier attempt's recorder ends by itself; a lock keeps the two apart."""
        if self.enabled:
            self._child = self._spawn(follow=True)

    def finish(self, say: Callable[[str], None]) -> str | None:
        """Wait until everything is recorded and return the MLflow run's id; None while the server doesn't answer.

        Must be called after the run's last state stands in its journal.
        """
        if not self.enabled:
            return None
        self._settle()
        run_id = self._recorded_id()
        if run_id is None:
            say(f"WARNING: not recorded in MLflow yet: {self.why()}\n  try: {self.hint()}")
        return run_id

    def _settle(self) -> None:
        """Until the recorder is done; once more where it died."""
        died = self._child is not None and _wait(self._child) and self._says_nothing()
        if died or (self._child is None and not self._is_recorded()):
            _wait(self._spawn())

    def replay(self) -> str | None:
        """Bring the store to what the folder says, also where it lost what it was given; the run's id or None."""
        _wait(self._spawn(check=True))
        return self._recorded_id()

    def why(self) -> str:
        """Why the run isn't recorded, in a line."""
        recorded = tracking.last_recorded(self.run_dir)
        if recorded is not None and recorded.message:
            return recorded.message
        last = (self.run_dir / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return "; ".join([*last, f"see {self.run_dir / LOG}"])

    def hint(self) -> str:
        """The command that records the run later."""
        file = tracking.sqlite_path(self.uri)
        if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
            return f"doit record run={self.run_dir.name} tracking.uri=sqlite:///<a file that you can write to>"
        return f"doit record run={self.run_dir.name}" + ("" if file else ", once the tracking server answers")

    def _recorded_id(self) -> str | None:
        recorded = tracking.last_recorded(self.run_dir)
        return recorded.run_id if recorded is not None and self._is_recorded() else None

    def _says_nothing(self) -> bool:
        """The recorder left neither a record nor a reason: somebody (the system, short of memory) ended it."""
        recorded = tracking.last_recorded(self.run_dir)
        return not self._is_recorded() and (recorded is None or not recorded.message)

    def _is_recorded(self) -> bool:
        return tracking.is_recorded(self.run_dir, self.uri, self.experiment)

    def _spawn(self, *, follow: bool = False, check: bool = False) -> subprocess.Popen[bytes]:
        argv = tracking.recorder_command(self.run_dir, self.uri, self.experiment, follow=follow, check=check)
        return process.background(
            argv, env=process.of_this_clone(tracking.recorder_env(self.uri)), log=self.run_dir / LOG
        )


def _wait(child: subprocess.Popen[bytes]) -> bool:
    """Whether it ended by itself (True) or had to be ended."""
    began = moved = time.monotonic()
    known = 0.0
    while (now := time.monotonic()) - moved < _PATIENCE_S and now - began < _BUSY_S:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_LOOK_S)
            return True
        used_s = _processor_s(child.pid)
        if used_s > known:
            known, moved = used_s, time.monotonic()
    child.kill()
    child.wait()
    return False


def _processor_s(pid: int) -> float:
    """Processor time of a process so far; 0 where the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
