"""The controller's side of recording: starts the recorder process and waits for it, never for long."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from pipeline import shell, tracking
from pipeline.config.build import RunConfig

_PATIENCE_S = 30.0  # the recorder gives up by itself after about 10 s; this bounds a stuck one
LOG = "recorder.log"


class Recorder:
    """One run's way into MLflow. With tracking switched off ``start`` does nothing and ``finish`` returns None."""

    def __init__(self, run_dir: Path, config: RunConfig, root: Path, *, enabled: bool | None = None) -> None:
        self.run_dir = run_dir
        self.enabled = config.tracking_enabled if enabled is None else enabled
        self.uri = tracking.absolute_uri(config.tracking_uri, root)
        self.experiment = config.tracking_experiment
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
        if self._child is not None:
            _wait(self._child)
        elif not self._is_recorded():
            _wait(self._spawn(follow=False))
        recorded = tracking.last_recorded(self.run_dir)
        if recorded is not None and self._is_recorded():
            return recorded.run_id
        why = recorded.message if recorded and recorded.message else f"see {self.run_dir / LOG}"
        say(f"WARNING: not recorded in MLflow yet: {why}\n  try: doit record run={self.run_dir.name}")
        return None

    def _is_recorded(self) -> bool:
        return tracking.is_recorded(self.run_dir, self.uri, self.experiment)

    def _spawn(self, *, follow: bool) -> subprocess.Popen[bytes]:
        argv = tracking.recorder_command(self.run_dir, self.uri, self.experiment, follow=follow)
        return shell.background(argv, env={**os.environ, **tracking.recorder_env(self.uri)}, log=self.run_dir / LOG)


def _wait(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_PATIENCE_S)
    if child.poll() is None:
        child.kill()
        child.wait()
