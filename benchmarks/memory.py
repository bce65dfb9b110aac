"""The controller's memory while it trains: its process tree without the training's own processes.

    python benchmarks/memory.py [runs] [override …]

Without overrides it trains experiment=quickstart cluster=two_node, which needs the lab. Sums PSS (shared
pages are split among their users) and RSS over `doit`, ssh, pssh and the MLflow recorder, ten times a
second; agents, torchrun and ranks are left out. Linux.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from measure import DOIT, ROOT, spread, surroundings

TARGET_MB = 300.0
PERIOD_S = 0.1
TRAINING = ("agent.py", "torchrun", "trainers.classifier")
Usage = dict[str, tuple[float, float]]  # what a process is -> (PSS, RSS) in MB


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    overrides = sys.argv[2:] or ["experiment=quickstart", "cluster=two_node"]
    while_training, whole = [], []
    for index in range(runs):
        training, all_of_it = one_run(overrides)
        while_training.append(total(training))
        whole.append(total(all_of_it))
        print(f"  run {index + 1}/{runs}: peak while training")
        for name, (pss, rss) in sorted(training.items()):
            print(f"    {pss:6.1f} MB PSS {rss:6.1f} MB RSS  {name}")
    kept = max(pss for pss, _ in while_training) < TARGET_MB
    print(f"controller memory, {' '.join(overrides)}; {surroundings()}")
    for name, peaks in (("while training", while_training), ("with evaluation and record", whole)):
        pss_sizes, rss_sizes = [pss for pss, _ in peaks], [rss for _, rss in peaks]
        print(f"{name}: PSS {spread(pss_sizes, 'MB')}; RSS {spread(rss_sizes, 'MB')}")
    print(f"target under {TARGET_MB:.0f} MB of PSS while training: {'kept' if kept else 'MISSED'}")
    return 0 if kept else 1


def one_run(overrides: list[str]) -> tuple[Usage, Usage]:
    """The fullest sample until summary.json (the node half's end), and the fullest of the whole command."""
    training: Usage = {}
    whole: Usage = {}
    with tempfile.TemporaryDirectory() as place:
        words = [*overrides, f"paths.runs={place}/runs", f"tracking.uri=sqlite:///{place}/mlflow.db"]
        child = subprocess.Popen([*DOIT, "train", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
        while child.poll() is None:
            sample = {name: usage for process in controllers(child.pid, place) for name, usage in measured(process)}
            if total(sample) > total(whole):
                whole = sample
            if total(sample) > total(training) and not any(Path(place).glob("runs/*/summary.json")):
                training = sample
            time.sleep(PERIOD_S)
        if child.returncode != 0:
            sys.exit(f"doit train {' '.join(words)} ended with {child.returncode}")
    return training, whole


def controllers(pid: int, place: str) -> Iterator[psutil.Process]:
    """The process and its descendants but the training's, and detached ones that name its runs folder."""
    try:
        yield from descendants(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return
    for process in psutil.process_iter(["ppid", "cmdline"]):
        words = process.info["cmdline"] or []
        if process.info["ppid"] == 1 and place in " ".join(words) and not is_training(words):
            yield from descendants(process)


def descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    try:
        children = process.children()
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            words = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if not is_training(words):
            yield from descendants(child)


def is_training(words: Sequence[str]) -> bool:
    """True for an agent, torchrun or a rank on this machine; an ssh that names one is the controller's."""
    programs = [Path(word).name for word in words[:2]]
    return not any("ssh" in name for name in programs) and any(name in " ".join(words) for name in TRAINING)


def measured(process: psutil.Process) -> Iterator[tuple[str, tuple[float, float]]]:
    """(pid and command, (PSS, RSS) in MB); nothing for a process that has just ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        words = [Path(word).name if word.startswith("/") else word for word in process.cmdline()[:4]]
    except (OSError, psutil.NoSuchProcess):
        return
    sizes_kb = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    yield f"{process.pid} {' '.join(words)}", (sizes_kb["Pss:"] * 1024 / 1e6, sizes_kb["Rss:"] * 1024 / 1e6)


def total(sample: Usage) -> tuple[float, float]:
    return sum(pss for pss, _ in sample.values()), sum(rss for _, rss in sample.values())


if __name__ == "__main__":
    sys.exit(main())
