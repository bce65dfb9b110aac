"""What the view of a running training costs: processor time of the process that draws it, fed as a real one is.

    python -m benchmarks.live_view [--hosts 32] [--seconds 20]

Each host tells its beat once a second, rank 0 a line of metrics and a line for people every other second, as a
training of 32 hosts does. The terminal is a real one (a pty) of 50 lines and 120 columns, which somebody reads.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from fcntl import ioctl
from pathlib import Path

from pipeline.cluster.events import LogLine
from pipeline.core.specs import LaunchPlan, NodePlan
from pipeline.live.screen import Screen
from pipeline.live.state import RunPicture, RunState
from trainers.contract.beats import NodeBeat, Phase, RankBeat, Usage

RANKS = 8
WARM_UP_S = 3.0


def main() -> None:
    """Start the part that draws on a pty of its own, and tell what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--drawing", action="store_true", help="be that part")
    asked = parser.parse_args()
    if asked.drawing:
        print(json.dumps(drawn(asked.hosts, asked.seconds)))
        return
    master, slave = pty.openpty()
    ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    argv = [sys.executable, "-m", "benchmarks.live_view", *sys.argv[1:], "--drawing"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm-256color"})
    os.close(slave)
    threading.Thread(target=_read, args=(master,), daemon=True).start()
    found = json.loads(child.communicate()[0])
    print(
        f"{asked.hosts} hosts of {RANKS} ranks: {found['view']:.1%} of one core for view and events, "
        f"{found['events']:.1%} for the events alone"
    )


def drawn(hosts: int, seconds: float) -> dict[str, float]:
    """Parts of one core: with the view, and with the same events that nobody looks at."""
    with tempfile.TemporaryDirectory() as folder:
        picture = RunPicture(RunState(key="cf08486f7c19", title="digits small_cnn sgd", batch=4096), Path(folder))
        with Screen(picture) as screen:
            fed(screen, Path(folder), hosts, WARM_UP_S)  # imports
            view = fed(screen, Path(folder), hosts, seconds)
        with Screen() as screen:
            events = fed(screen, Path(folder), hosts, seconds / 4)
    return {"view": view, "events": events}


def fed(screen: Screen, folder: Path, hosts: int, seconds: float) -> float:
    """Tell the screen what a training tells; the processor time of this process in seconds per second."""
    names = [f"node{number:02d}.cluster" for number in range(hosts)]
    screen.show_event(_plan(names))
    screen.show_event(LogLine(host=names[0], rank=0, text="batch 4096 (16 a rank), 190 steps an epoch, 38,000 steps"))
    began, cpu = time.monotonic(), time.process_time()
    second = 0
    while time.monotonic() - began < seconds:
        second += 1
        for number, name in enumerate(names):
            screen.show_event(_beat(name, number, 4 * second))
        if second % 2 == 0:
            _write_metrics(folder / "metrics.jsonl", 4 * second)
            screen.say(f"{names[0]}:0 | epoch 1/200  step {4 * second}/38,000  loss 2.2800  15,321 images/s")
        time.sleep(max(0.0, began + second - time.monotonic()))
    return (time.process_time() - cpu) / (time.monotonic() - began)


def _beat(name: str, number: int, step: int) -> NodeBeat:
    usage = Usage(
        cpu=0.73 + step % 7 / 100, memory_bytes=31 * 10**9 + step, memory_total_bytes=250 * 10**9,
        received_per_s=1.2e8 + step * 1000, sent_per_s=1.1e8 + step,
    )  # fmt: skip
    ranks = tuple(
        RankBeat(
            rank=number * RANKS + local, pid=1, step=step + (local + number) % 2, phase=Phase.COMPUTING, moves=step,
            for_s=0.1, collectives=step, own_s=1.0 * step,
        )
        for local in range(RANKS)
    )  # fmt: skip
    return NodeBeat(host=name, ranks=ranks, usage=usage)


def _plan(names: list[str]) -> LaunchPlan:
    nodes = tuple(
        NodePlan(
            node_rank=number, host=name, identity=name, address=name, argv=(), env={}, run_dir="", data_dir="",
            state_dir="", first_rank=number * RANKS, nproc_per_node=RANKS,
        )
        for number, name in enumerate(names)
    )  # fmt: skip
    return LaunchPlan(
        run_key="k", run_id="k-1", attempt=1, launcher="pssh", master_addr="", master_port=0,
        world_size=len(names) * RANKS, lease_s=1.0, nodes=nodes,
    )  # fmt: skip


def _write_metrics(path: Path, step: int) -> None:
    metrics = {"train/loss": 2.28, "train/images_per_s": 15321.0, "lr": 0.1}
    row = {"t": time.time(), "step": step, "epoch": 1, "metrics": metrics, "attempt": "k-1", "doing": "training"}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _read(master: int) -> None:
    try:
        while os.read(master, 65536):
            pass
    except OSError:
        return


if __name__ == "__main__":
    main()
