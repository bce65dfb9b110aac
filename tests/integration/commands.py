"""`doit` as a person starts it, with its results in a folder of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pipeline import tracking
from tests.integration import preloaded
from tests.integration.light import light_python
from tests.waiting import HANG_S, busy, unhurried, wait_until

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("cluster.nproc_per_node=1", "++cluster.env.OMP_NUM_THREADS=1")
"""One rank with one thread: threads of a rank wait for each other without pause, on cores that other tests want."""


@dataclass
class Project:
    """The checkout's code with runs, data and tracking in ``folder``; ``words`` are added to every call.

    ``whole``: torchrun on this computer is torch's own, the report that of scikit-learn; else stand-ins are (light.py).
    """

    folder: Path
    words: list[str] = field(default_factory=list)
    whole: bool = False

    @property
    def overrides(self) -> list[str]:
        where = [f"paths.runs='{self.folder}/runs'", f"paths.data='{self.folder}/data'"]
        return [*where, f"tracking.uri='sqlite:///{self.folder}/mlflow.db'", *self.words]

    def argv(self, *words: str) -> list[str]:
        python = sys.executable if self.whole else light_python()
        return [python, "-m", "doit", *words[:1], *self.overrides, *words[1:]]

    def doit(self, *words: str, apart: bool = False, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
        """Run to its end; stdout and stderr together in ``stdout``, or ``apart``."""
        if not self.whole:
            return preloaded.doit(*words[:1], *self.overrides, *words[1:], apart=apart, timeout_s=timeout_s)
        done = subprocess.run(
            self.argv(*words),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if apart else subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        done.stdout, done.stderr = unhurried(done.stdout), unhurried(done.stderr or "")
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start in a process group of its own, as a terminal would."""
        return subprocess.Popen(
            self.argv(*words),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run_folders(self) -> list[Path]:
        return [path for path in (self.folder / "runs").glob("*") if (path / "key.json").exists()]

    def only_run(self) -> Path:
        (folder,) = self.run_folders()
        return folder

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.only_run() / "result.json").read_text())
        return result

    def states(self) -> list[str]:
        lines = (self.only_run() / "journal.jsonl").read_text().splitlines()
        return [json.loads(line)["state"] for line in lines]


def with_readings(fetched: Path, folder: Path) -> None:
    """Copy the data to ``folder``, and what the command that fetched it has read out of the project's sources: reading
    them anew costs the first command of each folder of runs more than all else it does."""
    shutil.copytree(fetched, folder / "data")
    shutil.copytree(fetched.parent / "runs" / ".paceline", folder / "runs" / ".paceline")


def see_recorded(project: Project) -> None:
    """Every finished run is in MLflow. `doit train` doesn't wait for a recorder that gets no processor for minutes."""
    for folder in project.run_folders():
        result = folder / "result.json"
        if result.exists() and json.loads(result.read_text())["mlflow_run_id"] is None:
            assert busy() > 1, (folder / "recorder.log").read_text()
            command = tracking.recorder_command(folder, f"sqlite:///{project.folder}/mlflow.db", "paceline")
            # one that another recorder holds is refused after a while: that of a killed command is still at it
            wait_until(partial(_succeeds, command))


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, cwd=ROOT, check=False, timeout=HANG_S).returncode == 0


def mlflow_states(project: Project) -> list[str]:
    """The status of each run in the project's database, which its recorders have filled."""
    see_recorded(project)
    with sqlite3.connect(project.folder / "mlflow.db") as database:
        rows = database.execute("select status from runs where lifecycle_stage = 'active'").fetchall()
    return [str(row[0]) for row in rows]


def wait_for_step(project: Project, step: int, child: subprocess.Popen[str]) -> None:
    """Until metrics.jsonl tells of ``step`` or a later one. Raises AssertionError when the child ends before."""

    def is_reached() -> bool:
        paths = [folder / "metrics.jsonl" for folder in project.run_folders()]
        lines = [line for path in paths if path.exists() for line in _whole_lines(path)]
        return any(json.loads(line)["step"] >= step for line in lines)

    wait_until(is_reached, child)


def _whole_lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines()


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    """Every rank and torchrun of this computer for a run below ``folder``; other tests train runs with the same key."""
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "trainers.classifier" in words and f"{folder}/" in words:
            yield process


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; psutil takes one that nobody has waited for yet for running."""
    rows = psutil.process_iter(["status"])
    alive = {one for one in rows if one.info["status"] != psutil.STATUS_ZOMBIE}
    return [one for one in processes if one in alive]


def interrupt(child: subprocess.Popen[str], number: signal.Signals) -> tuple[str, float]:
    """Send a signal to the controller alone; its output and how many seconds it took to end."""
    began = time.monotonic()
    os.kill(child.pid, number)
    output, _ = child.communicate(timeout=HANG_S)
    return output, time.monotonic() - began
