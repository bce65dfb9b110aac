"""What recording in MLflow costs the training.

    python -m benchmarks.recording steps [pairs] [ranks]     a step with everything on, beside everything off
    python -m benchmarks.recording start [rounds]            the first step, with servers that are down or silent
    python -m benchmarks.recording upload [uploads]          a step while a 45 MB checkpoint goes over HTTP

Trainings and servers are real. Steps are the differences between the times of neighbouring lines of
metrics.jsonl with ``trainer.log_every_steps=1``, inside an epoch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.measure import DOIT, ROOT, chosen, spread, working
from pipeline import tracking
from pipeline.cluster.agent.host.probe import free_ports
from pipeline.config.schema import TrackingConfig
from pipeline.core.processes.process import LEAST, set_priority
from pipeline.tracking import mlflow_ui as ui
from pipeline.tracking.client import Recorder
from tests.pipeline import tracking_folder

TARGET_STEP_MS, TARGET_START_S = 1.0, 0.2
STEPS = ["experiment=quickstart", "trainer.epochs=4000", "trainer.log_every_steps=1", "trainer.eval_every_epochs=4000",
         "trainer.checkpoint_every_epochs=4000"]  # fmt: skip
EVERYTHING = ["tracking.system_metrics=true"]
if importlib.util.find_spec("tensorboard"):
    EVERYTHING += ["tracking.tensorboard=true"]
CHECKPOINT_BYTES = 45_000_000
EXPERIMENT = "paceline"


# ------------------------------------------------------------------------------------------- the step
def steps(folder: Path, pairs: int = 5, ranks: int = 1, count: int = 1200) -> bool:
    """A step with system metrics, MLflow, TensorBoard files and the live view − with none of them: by the clock, and
    the processor time of rank 0, which other work hardly touches. Each run is killed after ``count`` steps."""
    words = [*STEPS, f"cluster.nproc_per_node={ranks}"]
    store = [f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    on, off = [*words, *EVERYTHING, *store], [*words, "tracking=none"]
    prepared(folder)
    stepped(folder / "warm", off, 1, view=False)  # makes the data pack
    more: dict[str, list[float]] = {"p50": [], "p99": [], "processor time": []}
    for pair in range(pairs):
        found: dict[bool, dict[str, float]] = {}
        for is_on in (True, False) if pair % 2 == 0 else (False, True):
            found[is_on] = stepped(folder / f"{pair}-{is_on}", on if is_on else off, count, view=is_on)
        for name, values in more.items():
            values.append(found[True][name] - found[False][name])
            shown = f"{found[True][name]:.2f} ms with everything, {found[False][name]:.2f} ms with nothing"
            print(f"  pair {pair + 1}, {name}: {shown}", flush=True)
    for name, values in more.items():
        print(f"{name} of a step, {ranks} rank(s), {count} steps: {spread(values, 'ms')} more; target {TARGET_STEP_MS}")
    return statistics.median(more["p99"]) <= TARGET_STEP_MS


def stepped(place: Path, words: list[str], count: int, *, view: bool) -> dict[str, float]:
    """Train so many steps, with the view on a terminal of its own or with plain lines; milliseconds a step."""
    child = started(place, words, view=view)
    wait_for(lambda: lines(place) > 0, child)
    (rank, *_) = working(place, "trainers.classifier --config")
    before, used = lines(place), processor_s(rank)
    wait_for(lambda: lines(place) > count, child)
    cost = 1000 * (processor_s(rank) - used) / max(1, lines(place) - before)
    end_all(place, child)
    took = sorted(1000 * step for _, step in durations(only_run(place)))
    return {"p50": took[len(took) // 2], "p99": took[int(0.99 * len(took))], "processor time": cost}


def lines(place: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in place.glob("runs/*/metrics.jsonl"))


def processor_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def started(place: Path, words: list[str], *, view: bool = False) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True, exist_ok=True)
    argv = [*DOIT, "train", *words, f"paths.runs={place}/runs", f"paths.data={place.parent}/data"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    if not view:
        with (place / "output").open("ab") as output:
            return subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    terminal, other = pty.openpty()
    child = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=other, stderr=other)
    os.close(other)
    threading.Thread(target=read_all, args=(terminal, place / "output"), daemon=True).start()
    return child


def read_all(terminal: int, output: Path) -> None:
    with output.open("ab") as file:
        try:
            while data := os.read(terminal, 1 << 16):
                file.write(data)
        except OSError:  # nobody holds its other end any more
            os.close(terminal)


def durations(run: Path) -> list[tuple[float, float]]:
    """(unix time of its end, seconds) of each step that began in the same epoch."""
    rows = metric_rows(run)
    near = [(a, b) for a, b in pairwise(rows) if (a["epoch"], a["step"] + 1) == (b["epoch"], b["step"])]
    return [(b["t"], b["t"] - a["t"]) for a, b in near]


def metric_rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [
        row
        for row in map(json.loads, (line for line in lines if line.endswith("\n")))
        if "train/loss" in row["metrics"]
    ]


def only_run(place: Path) -> Path:
    (run,) = (path.parent for path in place.glob("runs/*/config.json"))
    return run


def prepared(folder: Path) -> None:
    """The tables of a database, which a first record would make."""
    subprocess.run(tracking.prepare_command(f"sqlite:///{folder}/mlflow.db"), cwd=ROOT, check=True)


# ------------------------------------------------------------------------------------------- the start
def start(folder: Path, rounds: int = 5) -> bool:
    """From the command to the first step, later by how much than with ``tracking=none``; each killed after it."""
    words = ["experiment=quickstart", "trainer.epochs=1000", "trainer.log_every_steps=1"]
    with unreachable() as silent:
        servers = {
            "none": "tracking=none",
            "a port that refuses": f"tracking.uri=http://127.0.0.1:{free_ports(1)[0]}",
            "an address that never answers": f"tracking.uri=http://127.0.0.1:{silent}",
        }
        taken: dict[str, list[float]] = {name: [] for name in servers}
        first_step(folder / "warm", [*words, servers["none"]])
        for number in range(rounds):
            names = list(servers)[:: 1 if number % 2 == 0 else -1]
            for name in names:
                taken[name].append(first_step(folder / f"{number}-{names.index(name)}", [*words, servers[name]]))
            print("  " + "; ".join(f"{name} {taken[name][-1]:.2f} s" for name in servers), flush=True)
        calls = {name: call_ms(folder, servers[name].partition("=")[2]) for name in list(servers)[1:]}
    kept = True
    for name, call in calls.items():
        later = [a - b for a, b in zip(taken[name], taken["none"], strict=True)]
        kept &= statistics.median(later) <= TARGET_START_S
        print(f"{name}: the first step {spread(later, 's')} later; target {TARGET_START_S}")
        print(f"  of it the call that starts the recorder: {spread(call, 'ms')}")
    return kept


def call_ms(folder: Path, uri: str, times: int = 20) -> list[float]:
    """All that the controller does for the record before a run goes on."""
    run = tracking_folder.started(folder / "call")
    config: Any = SimpleNamespace(tracking=TrackingConfig(enabled=True, uri=uri))
    taken = []
    for _ in range(times):
        recorder = Recorder(run, config, folder)
        began = time.perf_counter()
        recorder.start()
        taken.append(1000 * (time.perf_counter() - began))
        end_all(run)
    return taken


def first_step(place: Path, words: list[str]) -> float:
    """Seconds from the command to the first line of metrics; everything of the run is killed then."""
    began = time.time()
    child = started(place, words)
    wait_for(lambda: lines(place) > 0, child)
    end_all(place, child)
    return float(metric_rows(only_run(place))[0]["t"]) - began


def end_all(place: Path, child: subprocess.Popen[bytes] | None = None) -> None:
    if child is not None:
        child.kill()
        child.wait()
    while found := working(place):
        for process in found:
            process.kill()
        time.sleep(0.05)


@contextmanager
def unreachable() -> Iterator[int]:
    """A port where a connection is neither taken nor refused: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = int(server.getsockname()[1])
        waiting = [socket.socket() for _ in range(4)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port
        for client in waiting:
            client.close()


# ------------------------------------------------------------------------------------------- the checkpoint
def upload(folder: Path, uploads: int = 6, between_s: float = 3.0) -> bool:
    """Steps of a training while the recorder of a finished one sends its checkpoint to `mlflow server`, and between."""
    with server(folder, gives_way=True) as url:  # stands for one on another computer
        serving = subprocess.Popen(
            tracking.serve_command(url, EXPERIMENT), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        record_beside(folder, serving, "warm")
        words = [*STEPS, "cluster.nproc_per_node=1", "tracking=none"]
        child = started(folder / "training", words)
        wait_for(lambda: lines(folder / "training") > 0, child)
        windows = []
        for number in range(uploads):
            time.sleep(between_s)
            began = time.time()
            record_beside(folder, serving, f"{number}")
            windows.append((began, time.time()))
        time.sleep(between_s)
        end_all(folder / "training", child)
        serving.communicate("")
    print(f"a record with {CHECKPOINT_BYTES / 1e6:g} MB took {spread([b - a for a, b in windows], 's')}")
    return compared(durations(only_run(folder / "training")), windows, between_s)


def record_beside(folder: Path, serving: subprocess.Popen[str], name: str) -> None:
    """Have a finished run with a large checkpoint recorded by the process that records a sweep's."""
    run = tracking_folder.started(folder / f"finished-{name}", key=name.rjust(12, "0"))
    tracking_folder.metrics(run, range(20))
    tracking_folder.end(run)
    (run / "checkpoints/final.pt").write_bytes(os.urandom(CHECKPOINT_BYTES))
    assert serving.stdin is not None
    assert serving.stdout is not None
    serving.stdin.write(json.dumps({"id": 0, "run_dir": str(run)}) + "\n")
    serving.stdin.flush()
    answer = json.loads(serving.stdout.readline())
    if answer["error"] is not None or not list(folder.glob("artifacts/**/final.pt")):
        sys.exit(f"not recorded: {answer}")
    shutil.rmtree(run)


def compared(found: list[tuple[float, float]], windows: list[tuple[float, float]], between_s: float) -> bool:
    more = {"p50": [], "p99": []}
    for began, ended in windows:
        beside = sorted(1000 * took for at, took in found if began <= at <= ended)
        alone = sorted(1000 * took for at, took in found if began - between_s <= at < began)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            a, b = beside[int(share * len(beside))], alone[int(share * len(alone))]
            more[name].append(a - b)
            print(f"  {name}: {a:.2f} ms beside the upload (of {len(beside)} steps), {b:.2f} ms before it")
    for name, values in more.items():
        print(f"{name} of a step: {spread(values, 'ms')} more while a checkpoint is sent; target {TARGET_STEP_MS}")
    return statistics.median(more["p99"]) <= TARGET_STEP_MS


@contextmanager
def server(folder: Path, port: int | None = None, *, gives_way: bool = False) -> Iterator[str]:
    """A real `mlflow server` on sqlite, as `doit ui` starts it; its address."""
    uri = f"sqlite:///{folder}/server.db"
    if not (folder / "server.db").exists():
        subprocess.run(tracking.prepare_command(uri), cwd=ROOT, check=True)
    argv, env, url = ui.server_command(uri, port or free_ports(1)[0])
    with (folder / "server.log").open("ab") as log:
        child = subprocess.Popen(
            argv, cwd=folder, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    if gives_way:
        set_priority(child.pid, LEAST)
    try:
        wait_for(lambda: answers(f"{url}/health"), child)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5.0):
        return True
    return False


def wait_for(condition: Callable[[], object], child: subprocess.Popen[bytes] | None = None) -> None:
    until = time.monotonic() + 600.0
    while not condition():
        if child is not None and child.poll() is not None:
            sys.exit(f"ended with {child.returncode}: {child.args}")
        if time.monotonic() > until:
            sys.exit("waited in vain")
        time.sleep(0.2)


MEASURED: dict[str, Callable[..., bool]] = {
    "steps": steps, "start": start, "upload": upload,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(chosen(__doc__, MEASURED))
