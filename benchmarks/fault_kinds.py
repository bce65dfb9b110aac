"""What is done to a training by benchmarks/faults.py. Each fault returns what undoes it (or None)."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from fault_trial import Trial

from pipeline.lab import cut, restore

Undo = Callable[[], None] | None
Fault = Callable[[Trial, random.Random], Undo]

EARLY = ("probe", "send", "start")
TRAINING = ("steps", "checkpoint", "evaluation")
LATE = ("collect", "record")


@dataclass(frozen=True)
class Kind:
    """``moments`` at which it makes sense, ``places`` (local, lab, sweep) where it can be done."""

    fault: Fault
    moments: tuple[str, ...]
    places: tuple[str, ...] = ("local", "lab")


def _send(processes: list[psutil.Process], number: int, chance: random.Random, every: bool = False) -> None:
    for process in processes if every or not processes else [chance.choice(processes)]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def controller(number: int) -> Fault:
    def fault(trial: Trial, chance: random.Random) -> Undo:
        if trial.command is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(trial.command.child.pid, number)

    return fault


def rank(number: int) -> Fault:
    return lambda trial, chance: _send(trial.ranks(), number, chance)


def torchrun(number: int) -> Fault:
    return lambda trial, chance: _send(trial.torchruns(), number, chance)


def supervisor(number: int) -> Fault:
    return lambda trial, chance: _send(trial.supervisors(), number, chance)


def recorder(trial: Trial, chance: random.Random) -> Undo:
    return _send(trial.children(lambda words: "pipeline.tracking" in words), signal.SIGKILL, chance, every=True)


def reporter(trial: Trial, chance: random.Random) -> Undo:
    return _send(trial.children(lambda words: "pipeline.evaluation" in words), signal.SIGKILL, chance, every=True)


def stream(trial: Trial, chance: random.Random) -> Undo:
    """One connection to a host breaks (locally the pipe to the agent)."""
    return _send(trial.children(lambda words: "-m pipeline" not in words), signal.SIGKILL, chance)


def everything(trial: Trial, chance: random.Random) -> Undo:
    """As after a power cut: controller, agents, torchruns and ranks at once."""
    supervisors = trial.supervisors()
    controller(signal.SIGKILL)(trial, chance)
    _send([*supervisors, *trial.torchruns(), *trial.ranks()], signal.SIGKILL, chance, every=True)


def paused(find: Callable[[Trial], list[psutil.Process]], longest_s: float) -> Fault:
    """SIGSTOP, and SIGCONT some seconds later."""

    def fault(trial: Trial, chance: random.Random) -> Undo:
        processes = find(trial)
        chosen = [chance.choice(processes)] if processes else []
        _send(chosen, signal.SIGSTOP, chance, every=True)
        time.sleep(chance.uniform(1.0, longest_s))
        _send(chosen, signal.SIGCONT, chance, every=True)
        if trial.command is not None:
            trial.command.excuse()

    return fault


def _controller(trial: Trial) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [psutil.Process(trial.command.child.pid)] if trial.command else []
    return []


def _ssh_servers(trial: Trial) -> list[psutil.Process]:
    found = []
    for host in trial.lab.hosts if trial.lab else ():
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(host.sshd_pid)
            found += [process for process in server.children(recursive=True) if process.name().startswith("sshd")]
    return found


def link(longest_s: float) -> Fault:
    """A host's link is down for a while."""

    def fault(trial: Trial, chance: random.Random) -> Undo:
        host = chance.choice(trial.lab.hosts).name
        cut(trial.lab, host)
        time.sleep(chance.uniform(0.5, longest_s))
        restore(trial.lab, host)

    return fault


def folder_removed(trial: Trial, chance: random.Random) -> Undo:
    for _ in range(20):  # ranks that write at the same time make parts of it anew
        if trial.run_dir() is None:
            return
        shutil.rmtree(trial.run_dir() or "", ignore_errors=True)


def host_folder_removed(trial: Trial, chance: random.Random) -> Undo:
    host = chance.choice(trial.lab.hosts)
    for folder in host.home.glob(".cache/paceline/runs/*"):
        shutil.rmtree(folder, ignore_errors=True)


def disk_full(trial: Trial, chance: random.Random) -> Undo:
    """The folder of the runs stands on a small disk of its own (see ``faults.small_disk``); it is filled."""
    path = trial.folder / "runs" / ".filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    return lambda: path.unlink(missing_ok=True)


def clock_library(clock: Path) -> None:
    """Build what shifts the wall clock of a process by the seconds that ``clock`` holds."""
    clock.write_text("0\n")
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", clock.with_suffix(".so"), source, "-ldl"], check=True)


def clock(shift_s: int) -> Fault:
    def fault(trial: Trial, chance: random.Random) -> Undo:
        if trial.clock is not None:
            trial.clock.write_text(f"{shift_s}\n")

    return fault


def damaged(pattern: str, how: str, first: int = signal.SIGKILL) -> Fault:
    """The controller is killed, then a file is damaged; before the same command comes again."""

    def fault(trial: Trial, chance: random.Random) -> Undo:
        if first:
            controller(first)(trial, chance)
        if first and chance.random() < 0.5:
            trial.left()  # ranks end by themselves; else the next command meets them
        found = sorted(trial.folder.glob(pattern))
        if found:
            damage(chance.choice(found), how, chance)

    return fault


def damage(path: Path, how: str, chance: random.Random) -> None:
    data = path.read_bytes()
    if how == "remove":
        path.unlink()
        return
    at = chance.randrange(len(data)) if data else 0
    changed = {
        "cut": data[:at],
        "empty": b"",
        "flip": data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :] if data else b"x",
        "nuls": data + b"\0" * 512 + b"\n",
        "garbage": data + b'{"step": null}\n[1, 2\n',
        "null": b"null\n",
    }[how]
    stat = path.stat()
    path.write_bytes(changed)
    if chance.random() < 0.5:  # a time stamp proves nothing
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def database_gone(trial: Trial, chance: random.Random) -> Undo:
    controller(signal.SIGKILL)(trial, chance)
    trial.left()
    (trial.folder / "mlflow.db").unlink(missing_ok=True)


ALL = (*EARLY, *TRAINING, *LATE)
RUN = "runs/[0-9a-f]*/"
KINDS: dict[str, Kind] = {
    "controller SIGKILL": Kind(controller(signal.SIGKILL), ALL, ("local", "lab", "sweep")),
    "controller SIGTERM": Kind(controller(signal.SIGTERM), ALL, ("local", "lab", "sweep")),
    "controller SIGINT": Kind(controller(signal.SIGINT), ALL, ("local", "lab", "sweep")),
    "rank SIGKILL": Kind(rank(signal.SIGKILL), ("start", *TRAINING), ("local", "lab", "sweep")),
    "rank SIGSEGV": Kind(rank(signal.SIGSEGV), TRAINING),
    "torchrun SIGKILL": Kind(torchrun(signal.SIGKILL), ("start", *TRAINING)),
    "agent SIGKILL": Kind(supervisor(signal.SIGKILL), ("start", *TRAINING), ("local", "lab", "sweep")),
    "recorder SIGKILL": Kind(recorder, (*TRAINING, "record")),
    "report SIGKILL": Kind(reporter, ("evaluation", "collect")),
    "power cut": Kind(everything, ALL),
    "stream cut": Kind(stream, ("start", *TRAINING, "collect")),
    "controller stopped": Kind(paused(_controller, 12.0), ALL),
    "rank stopped": Kind(paused(Trial.ranks, 8.0), ("start", *TRAINING)),
    "torchrun stopped": Kind(paused(Trial.torchruns, 8.0), ("start", *TRAINING)),
    "agent stopped": Kind(paused(Trial.supervisors, 12.0), ("start", *TRAINING)),
    "ssh server stopped": Kind(paused(_ssh_servers, 12.0), (*EARLY, *TRAINING, "collect"), ("lab",)),
    "link down, short": Kind(link(2.0), (*EARLY, *TRAINING, "collect"), ("lab",)),
    "link down, long": Kind(link(14.0), (*EARLY, *TRAINING, "collect"), ("lab",)),
    "run folder removed": Kind(folder_removed, (*TRAINING, "start", "collect")),
    "host's folder removed": Kind(host_folder_removed, ("start", *TRAINING), ("lab",)),
    "disk full": Kind(disk_full, (*EARLY, *TRAINING, *LATE), ("local", "lab")),
    "clock +1 h": Kind(clock(3600), ALL, ("local",)),
    "clock -1 h": Kind(clock(-3600), ALL, ("local",)),
    "metrics: NULs": Kind(damaged(f"{RUN}metrics.jsonl", "nuls"), ("steps", "checkpoint")),
    "metrics: cut": Kind(damaged(f"{RUN}metrics.jsonl", "cut"), ("steps", "checkpoint", "finished")),
    "metrics: garbage": Kind(damaged(f"{RUN}metrics.jsonl", "garbage"), ("checkpoint", "finished")),
    "checkpoint: bit": Kind(damaged(f"{RUN}checkpoints/step-*.pt", "flip"), ("steps", "checkpoint")),
    "checkpoint: cut": Kind(damaged(f"{RUN}checkpoints/step-*.pt", "cut"), ("steps", "checkpoint")),
    "checkpoint: sidecar null": Kind(damaged(f"{RUN}checkpoints/step-*.json", "null"), ("steps", "checkpoint")),
    "checkpoint: sidecar gone": Kind(damaged(f"{RUN}checkpoints/step-*.json", "remove"), ("checkpoint",)),
    "weights: bit": Kind(damaged(f"{RUN}checkpoints/final.pt", "flip"), ("record", "finished")),
    "journal: garbage": Kind(damaged(f"{RUN}journal.jsonl", "garbage"), ("steps", "finished")),
    "journal: null": Kind(damaged(f"{RUN}journal.jsonl", "null"), ("steps", "record")),
    "result: bit": Kind(damaged(f"{RUN}result.json", "flip"), ("finished",)),
    "result: null": Kind(damaged(f"{RUN}result.json", "null"), ("finished",)),
    "key: bit": Kind(damaged(f"{RUN}key.json", "flip"), ("steps", "finished")),
    "key: null": Kind(damaged(f"{RUN}key.json", "null"), ("steps", "finished")),
    "config: cut": Kind(damaged(f"{RUN}config.json", "cut"), ("steps", "finished")),
    "summary: null": Kind(damaged(f"{RUN}summary.json", "null"), ("collect", "record", "finished")),
    "predictions: bit": Kind(damaged(f"{RUN}predictions.json", "flip"), ("collect", "record", "finished")),
    "provenance: null": Kind(damaged(f"{RUN}provenance.json", "null"), ("steps", "finished")),
    "report: null": Kind(damaged(f"{RUN}evaluation/report.json", "null"), ("record", "finished")),
    "tracking: null": Kind(damaged(f"{RUN}tracking.json", "null"), ("steps", "record")),
    "code snapshot: bit": Kind(damaged(f"{RUN}code/trainers/training/*.py", "flip"), ("steps", "finished")),
    "data pack: bit": Kind(damaged("data/digits-*/images.bin", "flip"), ("steps", "probe")),
    "data pack: cut": Kind(damaged("data/digits-*/*.bin", "cut"), ("steps", "probe")),
    "data pack: manifest null": Kind(damaged("data/digits-*/manifest.json", "null"), ("steps", "finished")),
    "plan: gone": Kind(damaged(f"{RUN}plan.json", "remove"), ("steps", "finished")),
    "database gone": Kind(database_gone, ("steps", "record")),
}


def small_disk(folder: Path) -> Callable[[], None]:
    """``folder``, made and mounted with room for 16 MiB. Returns what unmounts it."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=True)
    return lambda: subprocess.run(["umount", "-l", str(folder)], check=False) and None
