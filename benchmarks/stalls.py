"""Hangs and slownesses put into one rank by chance: is that rank named, and its kind, and nobody in a healthy run?

    python benchmarks/stalls.py [count] [healthy] [seed]        (Linux, root; raises its own two lab hosts)

Each case is a training in a clone whose step was made to hang (or one that is stopped or slowed down from outside), on
two ranks of this computer or of two lab hosts. It counts as right where the message names that rank, its host and the
kind within ``cluster.stall_s`` + 5 s and a look, and as healthy where a training to its end blames nobody. A line for
each case goes to stalls.jsonl in the working directory.

Where this computer has a GPU, both ranks share it over NCCL, which takes them for two hosts, and there is no lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from measure import DOIT, ROOT, checked, surroundings

from pipeline import lab

STALL_S = 6.0
LONGEST_S = 240.0
ON_GPU = torch.cuda.is_available()
KINDS = {  # kind → words of its message
    "stopped": r"rank {rank} on {host} hangs .* process \d+ is stopped",
    "sleeps in the loader": r"rank {rank} on {host} hangs .*it sleeps in the loading of data",
    "waits for a lock": r"rank {rank} on {host} hangs .*it waits for a lock",
    "spins": r"rank {rank} on {host} hangs .*it computes without end",
    "skips a collective": r"rank {rank} on {host} went on without a collective|rank {rank}: .*collective mismatch",
    "behind a 1 Mb/s link": r"the connection from node[01] to node[01] is too slow",
    "slow": r"rank {rank} on {host} was slow",
}
FAULT = """
import os, threading, time
KIND, RANK, STEP = {kind!r}, {rank}, {step}
step = -1
if {on_gpu}:
    os.environ.update(NCCL_HOSTID="host" + os.environ.get("RANK", ""), NCCL_SOCKET_IFNAME="lo")

def strike(where):
    if step < STEP or int(os.environ["RANK"]) != RANK:
        return
    if KIND == "slow" and where == "loading":
        time.sleep(0.02)
    if KIND == "sleeps in the loader" and where == "loading":
        time.sleep(1e6)
    if KIND == "waits for a lock" and where == "computing":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    while KIND == "spins" and where == "computing":
        pass

def skips():
    global KIND
    if KIND != "skips a collective" or step < STEP or int(os.environ["RANK"]) != RANK:
        return False
    KIND = "skipped"
    return True
"""
PATCHES = (
    ("trainers/training/step.py", "HEARTBEAT.enter(Phase.LOADING)\n", "        fault.strike('loading')\n"),
    ("trainers/training/step.py", "HEARTBEAT.enter(Phase.COMPUTING)\n", "        fault.strike('computing')\n"),
    ("trainers/training/step.py", "            self.grad_scaler.begin()\n", "        fault.step = step\n"),
    ("trainers/training/step.py", "from __future__ import annotations\n", "from trainers import fault\n"),
    ("trainers/distributed/process_group.py", "from __future__ import annotations\n", "from trainers import fault\n"),
    (
        "trainers/distributed/process_group.py",
        '        """Add up over all ranks, in place."""\n',
        "        if fault.skips():\n            return tensor\n",
    ),
)
SHARE_THE_GPU = (
    "trainers/distributed/process_group.py",
    '        TrainerError: nccl without a GPU for every rank of the host, or mpi where torch has none.\n    """\n',
    '    return torch.device("cuda", 0), "nccl"\n',
)


@dataclass(frozen=True)
class Case:
    number: int
    kind: str  # '' for a healthy one
    place: str
    rank: int
    step: int

    @property
    def host(self) -> str:
        return f"node{self.rank}" if self.place == "lab" else "localhost"


def cases(count: int, healthy: int, seed: int) -> list[Case]:
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if not (ON_GPU and kind.startswith("behind"))]
    drawn = [""] * healthy + [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(drawn)
    only = {"behind a 1 Mb/s link": "lab", "skips a collective": "here"}  # over gloo that aborts the other rank at once
    places = [only.get(kind) or chance.choice(["here"] if ON_GPU else ["here", "lab"]) for kind in drawn]
    rows = zip(drawn, places, strict=True)
    return [
        Case(n, kind, place, chance.randrange(2), chance.randrange(25, 120)) for n, (kind, place) in enumerate(rows)
    ]


def main() -> int:
    words = [*sys.argv[1:], *["100", "20", "0"][len(sys.argv) - 1 :]]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # its lab is taken down
    drawn = cases(int(words[0]), int(words[1]), int(words[2]))
    print(f"{len(drawn)} trainings, seed {words[2]}; {surroundings()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="stalls-") as temporary:
        place = Path(temporary)
        hosts = None if ON_GPU else lab.up(place, 2)
        try:
            project = clone(place)
            return counted(drawn, ("", *KINDS), Path("stalls.jsonl"), lambda case: run_case(project, case, hosts))
        finally:
            if hosts is not None:
                lab.down(place)


def counted(
    drawn: Sequence[Case], kinds: Sequence[str], record: Path, outcome_of: Callable[[Case], dict[str, object]]
) -> int:
    """Run the cases, note each in ``record``, and print how many of a kind are right. 0: at least 95 in 100 are."""
    right: Counter[str] = Counter()
    for case in drawn:
        outcome = outcome_of(case)
        right[case.kind] += bool(outcome["right"])
        with record.open("a", encoding="utf-8") as file:
            print(json.dumps(asdict(case) | outcome), file=file)
        print(f"{case.number:>3} {case.kind or 'healthy'}, {case.place}, rank {case.rank}: {outcome}", flush=True)
    for kind in kinds:
        total = sum(case.kind == kind for case in drawn)
        print(f"| {kind or 'healthy'} | {total} | {right[kind]} |")
    return 0 if sum(right.values()) >= 0.95 * len(drawn) else 1


def clone(place: Path) -> Path:
    """A clone of the project in which the step may hang."""
    project = place / "project"
    checked(["git", "clone", "--quiet", str(ROOT), str(project)], cwd=place)
    for name, before, added in (*PATCHES, SHARE_THE_GPU) if ON_GPU else PATCHES:
        path = project / name
        text = path.read_text()
        if text.count(before) != 1:
            sys.exit(f"{name} has {before!r} {text.count(before)} times; benchmarks/stalls.py has to follow")
        path.write_text(text.replace(before, before + added))
    return project


def run_case(project: Path, case: Case, hosts: lab.Lab | None) -> dict[str, object]:
    (project / "trainers" / "fault.py").write_text(
        FAULT.format(kind=case.kind, rank=case.rank, step=case.step, on_gpu=ON_GPU)
    )
    where = [f"cluster.ssh_config={hosts.ssh_config}", "cluster=two_node"] if case.place == "lab" and hosts else []
    if ON_GPU:  # the plan lets two ranks share a GPU over gloo alone
        where += ["cluster.nproc_per_node=2", "strategy.backend=gloo"]
    if case.kind == "stopped":  # a fork of the warm parent shows no variables, by which the rank is found
        where.append("cluster.warm=false")
    epochs = {"": 60, "slow": 15}.get(case.kind, 20000)
    runs = project.parent / f"runs{case.number}"
    words = [*where, f"trainer.epochs={epochs}", f"cluster.stall_s={STALL_S:g}", "tracking=none"]
    words += [f"paths.runs={runs}", f"paths.data={project.parent}/data", "experiment=quickstart"]
    blame = re.compile(r"no rank has moved|is too slow|was slow")
    reached = re.compile(r"epoch +\d+/\d+ +step +(\d+)/")

    def strikes(line: str) -> bool:
        match = reached.search(line)
        return match is not None and int(match[1]) >= case.step

    try:
        code, lines, after_s = follow(
            project, words, strikes, lambda: strike_from_outside(case, runs, hosts), blame, ends_at="is too slow"
        )
    finally:
        if case.kind.startswith("behind") and hosts:
            lab.restore(hosts, f"node{case.rank}")
    said = "\n".join(lines)
    wanted = KINDS.get(case.kind, "").format(rank=case.rank, host=case.host)
    right = re.search(wanted, said) is not None if wanted else not blame.search(said) and code == 0
    verdict = next((line for line in lines if blame.search(line)), "")
    return {"right": right, "after_s": after_s, "said": verdict or ("" if right else said[-600:])}


def follow(
    project: Path,
    words: Sequence[str],
    strikes: Callable[[str], bool],
    strike: Callable[[], None],
    blame: re.Pattern[str],
    *,
    ends_at: str | None = None,
) -> tuple[int, list[str], float | None]:
    """Run `doit train` with these words to its end, at most LONGEST_S.

    Args:
        strikes: whether the training has reached the step of the fault, by a line of it; then ``strike`` is called.
        blame: what a message that names a culprit has; the run is interrupted at one that holds ``ends_at``.

    Returns:
        Its exit code, its lines, and the seconds from the fault to the first message.
    """
    child = subprocess.Popen(
        [*DOIT, "train", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(LONGEST_S, child.send_signal, (signal.SIGINT,))
    watchdog.start()
    struck, named, lines = 0.0, 0.0, list[str]()
    try:
        for line in child.stdout or ():
            lines.append(line.rstrip())
            if not struck and strikes(line.rstrip()):
                struck = time.monotonic()
                strike()
            if struck and not named and blame.search(line):
                named = time.monotonic()
                if ends_at is not None and ends_at in line:
                    child.send_signal(signal.SIGINT)
    finally:
        watchdog.cancel()
        if child.poll() is None and sys.exc_info()[0] is not None:
            child.send_signal(signal.SIGINT)
        child.wait()
    return child.returncode, lines, round(named - struck, 1) if named and struck else None


def strike_from_outside(case: Case, runs: Path, hosts: lab.Lab | None) -> None:
    if case.kind == "stopped":
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ()
                key = next(path.name for path in runs.iterdir() if (path / "key.json").exists())
                if mine.get("RANK") == str(case.rank) and mine.get("TORCHELASTIC_RUN_ID", "").startswith(key):
                    process.suspend()
    elif case.kind.startswith("behind") and hosts:
        lab.limit(hosts, f"node{case.rank}", 1.0)


if __name__ == "__main__":
    sys.exit(main())
