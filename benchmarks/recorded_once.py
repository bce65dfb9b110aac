"""What reaches MLflow through outages, kills and a crowd: each thing once.

    python -m benchmarks.recorded_once outage [seconds]    an outage, kill -9 of the trainer, kill -9 of the controller
    python -m benchmarks.recorded_once first [tries]       8 first-time runs at once on a fresh sqlite

Trainings, servers, databases and kills are real.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import DOIT, ROOT, chosen, spread, working
from benchmarks.recording import EXPERIMENT, STEPS, metric_rows, only_run, server, started, wait_for
from pipeline.cluster.agent.host.probe import free_ports
from pipeline.tracking import recorder
from pipeline.tracking.destinations import DONE
from tests.pipeline import tracking_folder

AT_ONCE = 8


def outage(folder: Path, seconds: int = 60) -> bool:
    """The server goes, comes back, trainer and controller are killed: what MLflow has, after `doit record`."""
    port, place = free_ports(1)[0], folder / "training"
    steps = 400 * (20 + seconds)  # a fast computer does so many a second, and the kill must come before the last one
    one_core = ["cluster.nproc_per_node=1", "++cluster.env.OMP_NUM_THREADS=1"]  # with all of them it is recorded later
    words = [*STEPS, *one_core, f"trainer.max_steps={steps}", f"tracking.uri=http://127.0.0.1:{port}"]
    with server(folder, port):
        child = started(place, words)
        wait_for(lambda: recorded_steps(folder))
    before = len(recorded_steps(folder))
    print(f"  {before} steps are recorded; the server is gone for {seconds} s", flush=True)
    time.sleep(seconds / 2)
    (trainer, *_) = working(place, "trainers.classifier --config")
    trainer.kill()
    time.sleep(seconds / 4)
    child.kill()
    child.wait()
    time.sleep(seconds / 4)
    wait_for(lambda: not working(place, "pipeline.tracking") and not working(place, "trainers.classifier"))
    run = only_run(place)
    bad = []
    with server(folder, port):
        for number in range(2):
            print(doit(place, "record", f"run={run.name}", words[-1]), flush=True)
            bad += differences(folder, run, f"after doit record, the {'first' if number == 0 else 'second'} time")
        if started(place, words).wait() != 0:
            bad.append("the same doit train does not finish it")
        bad += differences(folder, run, "after the run has been finished")
    for line in bad:
        print(f"MISSED: {line}")
    return not bad


def differences(folder: Path, run: Path, when: str) -> list[str]:
    written = [row["step"] for row in metric_rows(run)]
    has = recorded_steps(folder)
    print(
        f"{when}: {len(written)} steps are written, {len(has)} are in MLflow, {len(set(has))} different ones",
        flush=True,
    )
    return [] if sorted(has) == sorted(set(written)) else [f"{when}: MLflow hasn't each step exactly once"]


def recorded_steps(folder: Path) -> list[int]:
    with sqlite3.connect(f"file:{folder}/server.db?mode=ro", uri=True) as database:
        return [row[0] for row in database.execute("select step from metrics where key = 'train/loss'")]


def doit(place: Path, *words: str) -> str:
    argv = [*DOIT, *words, f"paths.runs={place}/runs"]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return f"  doit {words[0]}: {done.returncode} {done.stdout.strip().splitlines()[-1:]}"


def first(folder: Path, tries: int = 20) -> bool:
    """Recorders of runs that come to the tables of a database that isn't there yet at once: forks of a process that has
    imported mlflow, so that nothing keeps them apart."""
    import pipeline.tracking.mlflow_store  # noqa: F401

    good, taken = 0, []
    for number in range(tries):
        place = folder / f"{number}"
        runs = [tracking_folder.started(place, key=f"{index:012x}") for index in range(AT_ONCE)]
        for run in runs:
            tracking_folder.metrics(run, range(20))
            tracking_folder.end(run)
        began = time.monotonic()
        children = [forked(run, f"sqlite:///{place}/mlflow.db") for run in runs]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        taken.append(time.monotonic() - began)
        with sqlite3.connect(place / "mlflow.db") as database:
            states = database.execute("select status, count(*) from runs group by status").fetchall()
            points = database.execute("select count(*) from metrics where key = 'train/loss'").fetchone()[0]
        good += (codes, states, points) == ([0] * AT_ONCE, [("FINISHED", AT_ONCE)], 20 * AT_ONCE)
        print(f"  try {number + 1}: exit codes {codes}, runs {states}, {points} points, {taken[-1]:.1f} s", flush=True)
        shutil.rmtree(place)
    print(f"{AT_ONCE} first-time runs at once on a fresh sqlite: {good} of {tries} tries; {spread(taken, 's')}")
    return good == tries


def forked(run: Path, uri: str) -> int:
    child = os.fork()
    if child:
        return child
    recorded = recorder.record(run, uri, EXPERIMENT)
    if recorded.state != DONE:
        print(f"  {run.name}: {recorded.message}", flush=True)
    os._exit(0 if recorded.state == DONE else 1)


MEASURED: dict[str, Callable[..., bool]] = {"outage": outage, "first": first}


if __name__ == "__main__":
    sys.exit(chosen(__doc__, MEASURED))
