"""A sweep whose controller is killed (-9) again and again, against the same sweep undisturbed.

    python benchmarks/kill_sweep.py [kills] [seed] [window_s]        (Linux, root; raises the lab, leaves it up)

Six trials on two lab hosts, one host each. The controller is killed at random moments, up to ``window_s`` after its
start (0.6 of the undisturbed time), each time resumed by the same command; a sweep that finishes before all kills are
done is followed by another one with new seeds. In the end every sweep must have 6 finished runs, 6 MLflow runs
FINISHED, the weights of an undisturbed one, no run started again after its end, and no process left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from measure import DOIT, ROOT, checked, surroundings

TRIALS = 6
EPOCHS = 8


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    checked([*DOIT, "lab", "hosts=2"], cwd=ROOT)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        done, sweeps = 0, 0
        while done < kills:
            place = Path(temporary)
            began = time.monotonic()
            finish(place / f"undisturbed{sweeps}", sweeps)
            length_s = time.monotonic() - began
            window_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.6 * length_s
            killed = disturb(place / f"disturbed{sweeps}", sweeps, kills - done, window_s, chance)
            done += killed
            found = verify(place / f"undisturbed{sweeps}", place / f"disturbed{sweeps}")
            problems += found
            print(f"sweep {sweeps}: killed {killed} times; {'; '.join(found) or 'as undisturbed'}", flush=True)
            sweeps += 1
    print(f"kill -9 of the controller, {done} times in {sweeps} sweep(s); {surroundings()}")
    print(
        "\n".join(problems) or f"each time {TRIALS} finished runs, {TRIALS} MLflow runs, equal weights, no process left"
    )
    return 1 if problems else 0


def command(place: Path, sweep: int) -> list[str]:
    place.mkdir(exist_ok=True)
    seeds = f"seed=range({sweep * TRIALS},{(sweep + 1) * TRIALS})"
    where = [f"paths.runs={place}/runs", f"tracking.uri=sqlite:///{place}/mlflow.db", "cluster=two_node"]
    words = ["experiment=quickstart", f"trainer.epochs={EPOCHS}", seeds, "sweep.nodes=1", *where]
    return [*DOIT, "sweep", *words]


def finish(place: Path, sweep: int) -> None:
    """The sweep to its end; the benchmark ends where it fails."""
    checked(command(place, sweep), cwd=ROOT)


def disturb(place: Path, sweep: int, kills: int, window_s: float, chance: random.Random) -> int:
    """Kill and resume until the sweep is finished or ``kills`` are done, then finish it. How many hit."""
    for number in range(kills):
        wait_s = chance.uniform(0.2, window_s)
        with (place.parent / f"{place.name}.log").open("ab") as log:
            child = subprocess.Popen(command(place, sweep), cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            child.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            print(f"  kill {number + 1} after {wait_s:.1f} s: {summary(place)}", flush=True)
            continue
        finish(place, sweep)  # it was done: says so, starts nothing
        return number
    finish(place, sweep)
    return kills


def summary(place: Path) -> str:
    folders = [path.parent for path in (place / "runs").glob("*/key.json")]
    done = sum((folder / "result.json").exists() for folder in folders)
    return f"{done} runs finished, {len(folders) - done} begun"


def verify(undisturbed: Path, disturbed: Path) -> list[str]:
    """What isn't as it must be, a line each."""
    problems = []
    expected, found = weights(undisturbed), weights(disturbed)
    if len(found) != TRIALS:
        problems.append(f"{len(found)} finished runs")
    problems += [f"{key}: other weights" for key in expected if found.get(key) != expected[key]]
    if (states := recorded(disturbed)) != ["FINISHED"] * TRIALS:
        problems.append(f"MLflow's runs are {states}")
    problems += [f"{name} was started again after its end" for name in restarted(disturbed)]
    problems += [f"process {pid} is left" for pid in left(found)]
    return problems


def weights(place: Path) -> dict[str, str]:
    results = [json.loads(path.read_text()) for path in (place / "runs").glob("*/result.json")]
    return {result["key"]: result["weights_sha256"] for result in results}


def recorded(place: Path) -> list[str]:
    with sqlite3.connect(place / "mlflow.db") as database:
        return [row[0] for row in database.execute("select status from runs where lifecycle_stage = 'active'")]


def restarted(place: Path) -> list[str]:
    found = []
    for path in (place / "runs").glob("*/journal.jsonl"):
        states = [json.loads(line)["state"] for line in path.read_text().splitlines()]
        if "FINISHED" in states and "RUNNING" in states[states.index("FINISHED") :]:
            found.append(path.parent.name)
    return found


def left(keys: dict[str, str]) -> list[int]:
    """Ranks and agents of these runs, and companions without a controller (they end by themselves in seconds)."""
    deadline = time.monotonic() + 20
    while True:
        pids = [process.pid for process in psutil.process_iter(["cmdline"]) if works_for(process, keys)]
        if not pids or time.monotonic() > deadline:
            return pids
        time.sleep(0.5)


def works_for(process: psutil.Process, keys: dict[str, str]) -> bool:
    words = " ".join(process.info["cmdline"] or [])
    return "trainers.classifier" in words and any(key in words for key in keys)


if __name__ == "__main__":
    sys.exit(main())
