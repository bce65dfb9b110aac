"""`kill -9` of the controller at random moments of one run, the same command after each; and many `doit` at once.

    python benchmarks/crash.py [kills] [at once]

After each kill the same command is started again and killed again, at a random moment of the time that an undisturbed
run takes, until it has been killed so often; then it may finish. In the end there must be one run with the weights of
an undisturbed one, one MLflow run that is FINISHED, and no process left. Then 20 commands at once, a few for each of
some keys and the rest for a finished run: each must end well, and nothing may be lost or done twice.
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
from typing import Any

from measure import DOIT, ROOT, surroundings, working

OVERRIDES = ["experiment=quickstart", "trainer.epochs=60"]
SHORT = ["experiment=quickstart", "trainer.max_steps=2"]
KEYS = 4  # distinct runs among the commands at once
QUIET_S = 20.0  # by then agents and recorders of a dead controller are gone, or they count as orphans


def main() -> int:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    at_once = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    print(f"crash safety; {surroundings()}")
    with tempfile.TemporaryDirectory() as temporary:
        bad = killed(Path(temporary, "killed"), kills) + together(Path(temporary, "together"), at_once)
    for line in bad:
        print(f"MISSED: {line}")
    return 1 if bad else 0


def killed(folder: Path, kills: int) -> list[str]:
    """What was lost or doubled after ``kills`` kills of one run."""
    started = time.perf_counter()
    undisturbed = folder / "undisturbed"
    wait(start(undisturbed, OVERRIDES))
    whole_s = time.perf_counter() - started
    disturbed = folder / "disturbed"
    chance = random.Random(0)
    landed = finished_early = 0
    while landed < kills:
        child = start(disturbed, OVERRIDES)
        try:
            child.wait(timeout=chance.uniform(0.0, whole_s))
            finished_early += 1
            forget(disturbed)  # finished before the kill: the next kills need a run that is under way
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)  # the controller alone: what it started must end by itself
            child.wait()
            landed += 1
            states = "".join(state[0] for state in journal(disturbed))
            print(f"  kill {landed}/{kills}; journal {states[-12:] or '(none)'}", flush=True)
    wait(start(disturbed, OVERRIDES))
    print(f"{kills} kills over {whole_s:.1f} s; finished before its kill and begun anew: {finished_early}")
    expected, result = results(undisturbed)[0], results(disturbed)
    bad = [] if len(result) == 1 else [f"{len(result)} finished runs instead of one"]
    if result and result[0]["weights_sha256"] != expected["weights_sha256"]:
        bad.append("the weights differ from those of an undisturbed run")
    if mlflow_states(disturbed) != ["FINISHED"]:
        bad.append(f"MLflow has {mlflow_states(disturbed)} instead of one finished run")
    return bad + orphans(disturbed)


def together(folder: Path, count: int) -> list[str]:
    """What was lost or doubled by ``count`` commands at once."""
    wait(start(folder, SHORT))
    words = [[*SHORT, f"seed={number % KEYS}"] for number in range(count)]
    children = [start(folder, word) for word in words]
    codes = [child.wait() for child in children]
    bad = [] if not any(codes) else [f"exit codes {codes}"]
    if len(results(folder)) != KEYS:
        bad.append(f"{len(results(folder))} finished runs instead of {KEYS}")
    for path in folder.glob("runs/*/journal.jsonl"):
        if path.read_text().count("RUNNING") != 1:
            bad.append(f"{path.parent.name} was launched {path.read_text().count('RUNNING')} times")
    if mlflow_states(folder) != ["FINISHED"] * KEYS:
        bad.append(f"MLflow has {mlflow_states(folder)} instead of {KEYS} finished runs")
    print(f"{count} commands at once for {KEYS} keys: {len(results(folder))} runs, exit codes {sorted(set(codes))}")
    return bad + orphans(folder)


def start(folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"paths.runs={folder}/runs", f"paths.data={folder}/data", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            [*DOIT, "train", *overrides, *where],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def wait(child: subprocess.Popen[bytes]) -> None:
    if child.wait() != 0:
        sys.exit(f"a command that nobody disturbed ended with {child.returncode}: {child.args}")


def forget(folder: Path) -> None:
    """Let the finished run begin anew: without its outputs its key has to be trained again."""
    for path in folder.glob("runs/*"):
        if path.is_dir():
            for name in ("result.json", "summary.json", "checkpoints"):
                target = path / name
                subprocess.run(["rm", "-rf", str(target)], check=True)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in folder.glob("runs/*/result.json")]


def journal(folder: Path) -> list[str]:
    return [
        json.loads(line)["state"]
        for path in folder.glob("runs/*/journal.jsonl")
        for line in path.read_text().splitlines()
    ]


def mlflow_states(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        rows = database.execute("select status from runs where lifecycle_stage = 'active'").fetchall()
    return [str(row[0]) for row in rows]


def orphans(folder: Path) -> list[str]:
    """Processes that still work for a run below ``folder`` after QUIET_S."""
    deadline = time.monotonic() + QUIET_S
    while (left := working(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"left behind: {process.pid} {' '.join(process.info['cmdline'])[:150]}" for process in left]


if __name__ == "__main__":
    sys.exit(main())
