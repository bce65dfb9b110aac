"""30 planted faults: does `doit triage KEY --json` say what failed, where and what next, within 1,000 tokens?

    python benchmarks/triage.py [NAME...]        (Linux, root for those on two lab hosts; names choose some)

Each fault is a run of its own, in a clone of the project: a script or a configuration that fails, or something that is
done to the run from outside. An answer is right where its ``failed`` or its evidence names the cause, ``where`` the
rank or host at fault, and ``next`` what mends it, as the table of faults says. Tokens are counted as words and signs,
or as a quarter of the characters, whichever is more. A line for each fault goes to triage.jsonl here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measure import DOIT, ROOT, checked, surroundings

from pipeline import lab

MOST_TOKENS = 1_000
BEGIN = """\
import os, sys, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
for step in range(3):
    total = torch.ones(1); dist.all_reduce(total)
    print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)
"""
ON_RANK_1 = "\nif rank == 1:\n    {}\ndist.barrier()\ntime.sleep(600)\n"
CLASSIFIER = ("experiment=quickstart", "trainer.epochs=400", "tracking=none", "cluster.warm=false")


@dataclass(frozen=True)
class Fault:
    """``code`` is what rank 1 of a script does; ``words`` are a training of the classifier instead.

    ``failed``, ``where`` and ``next`` are patterns of a right answer; ``strike`` is done to the run once it trains.
    """

    code: str = ""
    failed: str = ""
    where: str = "rank 1"
    next: str = "doit torchrun|doit train"
    words: tuple[str, ...] = ()
    strike: Callable[[Trial], None] | None = None
    begin: str = BEGIN
    on_lab: bool = False
    arguments: tuple[str, ...] = ()


@dataclass
class Trial:
    """One fault under way: the folder of its runs, its command, the lab's hosts."""

    project: Path
    runs: Path
    command: subprocess.Popen[str]
    hosts: lab.Lab | None
    lines: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return next(path.parent for path in self.runs.glob("*/key.json"))


def ranks(trial: Trial) -> list[psutil.Process]:
    """The processes of the run's ranks, in the order of the ranks; without cluster.warm they have their variables."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("TORCHELASTIC_RUN_ID", "").startswith(trial.run.name) and "RANK" in environment:
                found.setdefault(int(environment["RANK"]), process)
    return [found[rank] for rank in sorted(found)]


def to_rank_1(number: int) -> Callable[[Trial], None]:
    return lambda trial: ranks(trial)[1].send_signal(number)


def to_command(number: int) -> Callable[[Trial], None]:
    return lambda trial: trial.command.send_signal(number)


def lose_node1(trial: Trial) -> None:
    assert trial.hosts is not None
    lab.cut(trial.hosts, "node1")


def damage_result(trial: Trial) -> None:
    trial.command.wait()
    path = trial.run / "result.json"
    path.write_text(path.read_text().replace('"steps"', '"stepz"', 1))


FAULTS = {
    "exception": Fault("raise ValueError('no such column: price')", "ValueError: no such column: price"),
    "missing-package": Fault("import not_installed_here", "No module named 'not_installed_here'", next="install"),
    "missing-file": Fault("open('data/train.csv')", r"FileNotFoundError.*data/train\.csv"),
    "not-allowed": Fault("open('/proc/1/mem/x')", "NotADirectoryError|PermissionError"),
    "shapes": Fault("torch.ones(2, 3) @ torch.ones(4, 5)", "mat1 and mat2 shapes cannot be multiplied"),
    "no-gpu": Fault("torch.ones(1, device='cuda')", "CUDA|NVIDIA"),
    "assertion": Fault("assert step == 5, 'the data ends too early'", "AssertionError: the data ends too early"),
    "key-error": Fault("{'lr': 1}['learning_rate']", "KeyError: 'learning_rate'"),
    "index": Fault("[1, 2][5]", "IndexError: list index out of range"),
    "recursion": Fault("f = lambda n: f(n + 1); f(0)", "RecursionError"),
    "memory": Fault("torch.empty(10**14)", "can't allocate memory|DefaultCPUAllocator", next="batch|memory"),
    "damaged-file": Fault(
        "open('w.pt', 'wb').write(b'nonsense'); torch.load('w.pt')", "UnpicklingError|Unsupported|invalid"
    ),
    "not-json": Fault("import json; json.loads('{\"lr\": ')", "JSONDecodeError"),
    "not-utf8": Fault("b'\\xff'.decode()", "UnicodeDecodeError"),
    "full-disk": Fault("open('/dev/full', 'w', buffering=1).write('x\\n')", "No space left on device", next="free"),
    "exit-3": Fault("sys.exit(3)", "exit code 3|SIGABRT"),
    "exit-at-once": Fault("os._exit(7)", "exit code 7"),
    "segfault": Fault("import ctypes; ctypes.string_at(0)", "SIGSEGV|signal 11"),
    "abort": Fault("os.abort()", "SIGABRT|signal 6"),
    "killed-by-itself": Fault("os.kill(os.getpid(), 9)", "SIGKILL|signal 9", next="memory"),
    "loader-worker": Fault(
        "from torch.utils.data import DataLoader\n    class D(torch.utils.data.Dataset):\n"
        "        def __len__(self): return 4\n"
        "        def __getitem__(self, i): raise OSError('truncated image 3.jpg')\n"
        "    list(DataLoader(D(), num_workers=1))",
        r"truncated image 3\.jpg",
    ),
    "other-shape-in-a-collective": Fault(
        "dist.all_reduce(torch.ones(7))", "mismatch|another collective|op.preamble", where="rank [01]",
        arguments=("cluster.stall_s=6",),
    ),
    "skips-a-collective": Fault(
        "time.sleep(600)", "rank 1.*(hangs|sleeps|without)|hangs", next="doit", arguments=("cluster.stall_s=6",)
    ),
    "wrong-argument": Fault(
        begin="import argparse\np = argparse.ArgumentParser(); p.add_argument('--lr', type=float)\n"
        "p.parse_args(['--lr', 'fast'])\n", code="pass", failed="invalid float value: 'fast'", where="rank [01]"
    ),
    "import-by-name": Fault(
        begin="import importlib\nimportlib.import_module('broken' + '_module')\n", code="pass", where="rank [01]",
        failed="No module named 'broken_module'", next=r"program.inputs=\[broken_module.py\]",
    ),
    "rank-killed": Fault(words=CLASSIFIER, strike=to_rank_1(9), failed="SIGKILL|signal 9", next="memory"),
    "rank-stopped": Fault(
        words=(*CLASSIFIER, "cluster.stall_s=6"), strike=to_rank_1(signal.SIGSTOP), failed="is stopped", next="doit"
    ),
    "interrupted": Fault(words=CLASSIFIER, strike=to_command(signal.SIGINT), where="", next="goes on"),
    "command-killed": Fault(words=CLASSIFIER, strike=to_command(9), where="", next="goes on|status"),
    "own-model": Fault(
        words=(*CLASSIFIER, "model=own", "model.target=my_net:Net"), failed="RuntimeError: my net is wrong",
        where="rank [01]",
    ),
    "altered": Fault(
        words=("experiment=quickstart", "trainer.epochs=1", "tracking=none"), strike=damage_result,
        failed="result.json", where="", next="doit",
    ),
    "host-lost": Fault(
        words=CLASSIFIER, strike=lose_node1, failed="node1", where="node1", next="preflight", on_lab=True
    ),
    "rank-killed-on-a-host": Fault(
        words=CLASSIFIER, strike=to_rank_1(9), failed="node1, rank 1", where="node1 rank 1", next="memory", on_lab=True
    ),
}  # fmt: skip


def main() -> int:
    chosen = {name: FAULTS[name] for name in sys.argv[1:]} or FAULTS
    print(f"{len(chosen)} faults; {surroundings()}", flush=True)
    right = 0
    with tempfile.TemporaryDirectory(prefix="triage-") as temporary:
        place = Path(temporary)
        checked(["git", "clone", "--quiet", str(ROOT), str(place / "project")], cwd=place)
        (place / "project" / "broken_module.py").write_text("def f(:\n")
        (place / "project" / "my_net.py").write_text(
            "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.w = torch.nn.Linear(64, 10)\n\n    def forward(self, x):\n"
            "        raise RuntimeError('my net is wrong')\n"
        )
        hosts = lab.up(place, 2) if any(fault.on_lab for fault in chosen.values()) else None
        try:
            for name, fault in chosen.items():
                answer = triaged(place, name, fault, hosts)
                missed = judged(fault, answer)
                right += not missed
                with Path("triage.jsonl").open("a", encoding="utf-8") as record:
                    print(json.dumps({"fault": name, "missed": missed, "answer": answer}), file=record)
                print(f"{name}: {', '.join(missed) or 'right'}, {tokens(answer)} tokens", flush=True)
        finally:
            if hosts is not None:
                lab.down(place)
    print(f"{right} of {len(chosen)} right")
    return 0 if right >= len(chosen) * 28 / 30 else 1


def triaged(place: Path, name: str, fault: Fault, hosts: lab.Lab | None) -> dict[str, object]:
    """The answer about a run that the fault ended."""
    project, runs = place / "project", place / f"runs-{name}"
    where = [f"cluster.ssh_config={hosts.ssh_config}", "cluster=two_node"] if fault.on_lab and hosts else []
    common = [f"paths.runs={runs}", f"paths.data={place}/data", *where, *fault.arguments]
    if fault.words:
        words = ["train", *fault.words, *common]
    else:
        (project / f"{name}.py").write_text(fault.begin + ON_RANK_1.format(fault.code))
        words = ["torchrun", *common, "tracking=none", "--nproc-per-node", "2", f"{name}.py"]
    command = subprocess.Popen(
        [*DOIT, *words], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        text=True, env={**os.environ, "PYTHONPATH": str(project)},
    )  # fmt: skip
    trial = Trial(project, runs, command, hosts if fault.on_lab else None)
    trains = False
    for line in command.stdout or ():
        trial.lines.append(line.rstrip())
        if fault.strike is not None and not trains and re.search(r"epoch +1/|step +1", line):
            trains = True
            fault.strike(trial)
    command.wait()
    if trial.hosts is not None:
        lab.restore(trial.hosts, "node1")
    if not [*runs.glob("*/key.json")]:
        return {"refused": "\n".join(trial.lines)[-1500:]}
    time.sleep(1)
    said = subprocess.run(
        [*DOIT, "triage", trial.run.name, "--json", f"paths.runs={runs}"], cwd=project, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(project)},
    )  # fmt: skip
    try:
        answer: dict[str, object] = json.loads(said.stdout)
    except json.JSONDecodeError:
        return {"refused": said.stdout + said.stderr}
    return answer


def judged(fault: Fault, answer: dict[str, object]) -> Sequence[str]:
    """What is wrong with the answer."""
    data = answer.get("data")
    if not isinstance(data, dict):
        return ["no answer"]
    missed = []
    said = f"{data['failed']}\n" + "\n".join(data["evidence"].values())
    if not re.search(fault.failed, said):
        missed.append("cause")
    if not re.search(fault.where, f"{data['where']}\n{data['failed']}"):
        missed.append("place")
    if not re.search(fault.next, data["next"]):
        missed.append("next")
    if tokens(answer) > MOST_TOKENS:
        missed.append("length")
    return missed


def tokens(answer: dict[str, object]) -> int:
    text = json.dumps(answer)
    return max(len(re.findall(r"\w+|[^\w\s]", text)), len(text) // 4)


if __name__ == "__main__":
    sys.exit(main())
