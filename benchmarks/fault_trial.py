"""One disturbed training for benchmarks/faults.py: start it, wait for a moment, disturb it, type it again, look."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measure import DOIT, ROOT

from pipeline.lab import Lab

WORDS = ("experiment=quickstart", "trainer.epochs=8", "trainer.checkpoint_every_steps=10")
SWEEP = ("seed=range(3)", "sweep.slots=1")
SWEEP_TRIALS = 3
LONGEST_S = 400.0  # of one command; who takes longer hangs
SILENT_S = 15.0
QUIET_S = 25.0  # by then what a dead controller left has ended by itself
POLL_S = 0.01


@dataclass
class Command:
    """A controller as a person starts it: what it printed, and the longest time that it printed nothing."""

    child: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    silent_s: float = 0.0
    heard: float = field(default_factory=time.monotonic)
    reader: threading.Thread | None = None

    @classmethod
    def start(cls, argv: list[str], env: dict[str, str]) -> Command:
        child = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        command = cls(child)
        command.reader = threading.Thread(target=command._read, daemon=True)
        command.reader.start()
        return command

    def _read(self) -> None:
        for line in self.child.stdout or ():
            self.note()
            self.lines.append(line.rstrip("\n"))

    def note(self) -> None:
        """A line came, or the silence that was is nobody's fault (it was stopped)."""
        now = time.monotonic()
        self.silent_s = max(self.silent_s, now - self.heard)
        self.heard = now

    def excuse(self) -> None:
        """The silence up to here was made by the fault itself."""
        self.heard = time.monotonic()

    def wait(self) -> int | None:
        """The exit code; None where it hangs (it is killed then)."""
        try:
            code = self.child.wait(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
            return None
        if self.reader is not None:
            self.reader.join(timeout=5)
        self.note()
        return code


@dataclass
class Trial:
    """A run in a folder of its own. ``place`` is local, lab or sweep."""

    folder: Path
    place: str
    lab: Lab | None = None
    clock: Path | None = None  # holds how many seconds the wall clock is ahead; beside it the library that shifts it
    command: Command | None = None

    def argv(self) -> list[str]:
        where = [
            f"paths.runs={self.folder}/runs",
            f"paths.data={self.folder}/data",
            f"tracking.uri=sqlite:///{self.folder}/mlflow.db",
        ]
        if self.place == "lab" and self.lab is not None:
            where += ["cluster=two_node", f"cluster.ssh_config='{self.lab.ssh_config}'", "cluster.connect_timeout_s=3"]
        verb = ["sweep", *SWEEP] if self.place == "sweep" else ["train"]
        return [*DOIT, "--db-file", f"{self.folder}/doit.db", *verb, *WORDS, *where]

    def start(self) -> Command:
        env = {"PYTHONPATH": str(ROOT)}
        if self.clock is not None:
            env |= {"LD_PRELOAD": str(self.clock.with_suffix(".so")), "SHIFTED_CLOCK": str(self.clock)}
        self.command = Command.start(self.argv(), env)
        return self.command

    # ------------------------------------------------------------------------------ what is there
    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("runs/*/key.json"))

    def run_dir(self) -> Path | None:
        """The newest run."""
        return max(self.runs(), key=lambda path: path.stat().st_mtime, default=None)

    def keys(self) -> list[str]:
        return [path.name for path in self.runs()]

    def processes(self) -> Iterator[tuple[psutil.Process, str]]:
        """Every torchrun and rank of the runs here, on whatever host, with its command line.

        Other cases train runs with the same keys at the same time, here and on hosts of their own.
        """
        keys = self.keys()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words = " ".join(process.cmdline())
                if "trainers.classifier" not in words:
                    continue
                if f"{self.folder}/" in words or (any(key in words for key in keys) and self._is_on_a_host(process)):
                    yield process, words

    def _is_on_a_host(self, process: psutil.Process) -> bool:
        """Whether it is in the network namespace of a host of this case's lab."""
        inits = [host.init_pid for host in self.lab.hosts] if self.lab is not None else []
        own, theirs = Path(f"/proc/{process.pid}/ns/net").readlink(), list[Path]()
        for init in inits:
            with contextlib.suppress(OSError):  # a host that was killed
                theirs.append(Path(f"/proc/{init}/ns/net").readlink())
        return own in theirs

    def torchruns(self) -> list[psutil.Process]:
        return [process for process, words in self.processes() if "trainers/torchrun.py" in words]

    def ranks(self) -> list[psutil.Process]:
        return [process for process, words in self.processes() if "trainers/torchrun.py" not in words]

    def supervisors(self) -> list[psutil.Process]:
        """The agents that own a torchrun: what they print goes to agent.log, beside the files of its attempt."""
        found = []
        keys = self.keys()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                log = str(Path(f"/proc/{process.pid}/fd/1").readlink())
                if log.endswith("/agent.log") and (
                    log.startswith(f"{self.folder}/")
                    or (any(key in log for key in keys) and self._is_on_a_host(process))
                ):
                    found.append(process)
        return found

    def children(self, wanted: Callable[[str], bool]) -> list[psutil.Process]:
        """Processes below the controller whose command line is wanted."""
        found = []
        with contextlib.suppress(psutil.Error):
            controller = psutil.Process(self.command.child.pid if self.command else -1)
            for process in controller.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if wanted(" ".join(process.cmdline())):
                        found.append(process)
        return found

    # ----------------------------------------------------------------------------------- moments
    def reached(self, moment: str) -> bool:
        """Whether the moment has come."""
        run_dir = self.run_dir()
        said = "\n".join(self.command.lines) if self.command else ""
        if moment == "probe":
            return bool(re.search(r"^run [0-9a-f]{12}|^sweep [0-9a-f]{12}|^trial 0", said, re.MULTILINE))
        if moment == "evaluation":
            return "finished: test accuracy" in said
        if run_dir is None:
            return False
        if moment == "send":
            return (run_dir / "plan.json").exists()
        if moment == "start":
            return bool(self.torchruns())
        if moment == "steps":
            return _size(run_dir / "metrics.jsonl") > 0
        if moment == "checkpoint":
            home = str(self.lab.hosts[0].home) if self.lab is not None else None
            pattern = f"{home}/.cache/paceline/runs/*/node0/checkpoints/*" if home else None
            places = [*run_dir.glob("checkpoints/*"), *(Path("/").glob(pattern[1:]) if pattern else ())]
            return any(path.name.startswith(("step", ".")) for path in places)
        if moment == "collect":
            return any(run_dir.glob("attempts/*/*.exit.json"))
        if moment == "record":
            return "FINISHED" in _text(run_dir / "journal.jsonl")
        raise ValueError(moment)

    def wait_for(self, moment: str) -> bool:
        """False: the command ended before."""
        if moment == "finished":
            return self.command is not None and self.command.wait() == 0
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline and self.command and self.command.child.poll() is None:
            if self.reached(moment):
                return True
            time.sleep(POLL_S)
        return False

    # -------------------------------------------------------------------------------- afterwards
    def results(self) -> dict[str, dict[str, object]]:
        found = {}
        for path in self.folder.glob("runs/*/result.json"):
            with contextlib.suppress(ValueError, OSError):
                found[path.parent.name] = json.loads(path.read_text())
        return found

    def weights(self) -> list[str]:
        return sorted(str(result.get("weights_sha256")) for result in self.results().values())

    def metrics(self) -> list[tuple[object, object]]:
        """What rank 0 measured, without times, speeds and what the network carried."""
        found = []
        for run in self.runs():
            for line in _text(run / "metrics.jsonl").splitlines():
                value = json.loads(line)
                kept = {
                    k: v for k, v in value["metrics"].items() if "_per_s" not in k and not k.endswith(("_s", "_bytes"))
                }
                if kept:
                    found.append((value["step"], json.dumps(kept, sort_keys=True)))
        return sorted(found, key=str)

    def recorded(self) -> list[str]:
        try:
            with sqlite3.connect(f"file:{self.folder}/mlflow.db?mode=ro", uri=True) as database:
                rows = database.execute("select status from runs where lifecycle_stage = 'active'").fetchall()
        except sqlite3.Error as error:
            return [f"unreadable: {error}"]
        return sorted(str(row[0]) for row in rows)

    def left(self) -> list[str]:
        """Processes that still work for these runs after QUIET_S."""
        deadline = time.monotonic() + QUIET_S
        while (found := [f"{process.pid} {words[-90:]}" for process, words in self.processes()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.3)
        return found


def hints_of(lines: list[str]) -> list[list[str]]:
    """The commands that the last error told to type, for a shell: what stands behind ``try:`` up to a comma."""
    found = []
    for line in lines:
        told = re.search(r"try:? (.*)", line)
        for part in re.split(r", then |, or |; |, and ", told.group(1)) if told else []:
            command = re.match(r"(doit (?!train|sweep)\S+.*|rm -\S+ \S.*|mv \S+ \S.*)", part.strip())
            if command:
                with contextlib.suppress(ValueError):
                    found.append(shlex.split(command.group(1).rstrip(".")))
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
