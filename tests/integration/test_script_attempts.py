"""How a script is stopped and killed, what its next attempt goes on from, and what of it is kept."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, interrupt, running, wait_for_step
from tests.integration.script_project import script_project, use_script
from tests.waiting import wait_until

IN_CI = [pytest.mark.long, pytest.mark.ci]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return script_project(tmp_path)


FINDS_IT_ITSELF = """
import os, pathlib, sys, time, paceline
saved = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "state.txt")
first = int(saved.read_text()) if saved.exists() else 0
once = pathlib.Path.home() / os.environ["ONCE"]
for step in range(first + 1, 11):
    paceline.log(step, loss=step)
    if step == 4:
        saved.write_text(str(step))
    if step == 6 and not once.exists():
        once.touch()
        time.sleep(600)
"""


WAITS_FOR_THE_MIRROR = """
import os, pathlib, sys, time, paceline
(paceline.checkpoints() / "model.bin").write_text("saved")
until = time.monotonic() + 30
while not any(pathlib.Path(sys.argv[2]).glob("*/files-*.json")):
    if time.monotonic() > until:
        sys.exit("nothing has come to the mirror")
    time.sleep(0.1)
"""


def test_a_script_goes_on_from_its_checkpoint_or_it_is_said_that_it_starts_over(project: Project) -> None:
    words = ("program.args.lr=0.5", "cluster.max_restarts=1")
    failed = project.doit("train", *words)
    assert failed.returncode == 1
    assert "starting attempt 2 of 2 from the beginning: no argument of the script has {resume}" in failed.stdout
    done = project.doit("train", *words, "program.args.resume={resume}")
    assert done.returncode == 0, done.stdout
    assert "starting attempt 2 of 2 from its newest checkpoint" in done.stdout
    finished = [folder for folder in project.run_folders() if (folder / "result.json").exists()]
    assert [json.loads((folder / "summary.json").read_text())["metrics"] for folder in finished] == [
        {"loss": pytest.approx((8 * 0.5**4) ** 2)}
    ]


FAILS_AT_EACH_STEP = """
import pathlib, sys, paceline
before = paceline.checkpoints() / "step.txt" if sys.argv[1] == "logs" else paceline.checkpoints() / "last.bin"
step = int(before.read_text()) + 1 if before.exists() else 1
if sys.argv[1] == "logs":
    paceline.log(step, loss=1 / step)
before.write_text(str(step))
sys.exit(3 if step < 4 else 0)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("words", ["[logs]", pytest.param("[saves,'{resume}']", marks=IN_CI)])
def test_a_script_that_advances_before_each_failure_is_started_again(project: Project, words: str) -> None:
    use_script(project, FAILS_AT_EACH_STEP)
    alone = ("program.torchrun=false", "cluster.nproc_per_node=1", "cluster.max_restarts=3")
    done = project.doit("train", f"program.args={words}", *alone)
    assert done.returncode == 0, done.stdout
    assert "attempt 3 failed; starting attempt 4 of 4" in done.stdout


PRINTS_AND_IS_KILLED = """
import os, pathlib, signal, sys
saved = pathlib.Path(sys.argv[1], "epoch.txt")
first = int(saved.read_text()) + 1 if saved.exists() else 1
for epoch in range(first, 6):
    print(f"epoch {epoch} loss: {1 / epoch:.3f}", flush=True)
    if epoch == 2:
        saved.write_text("2")
    if epoch == 4 and first == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("host", ["", pytest.param("node0", marks=[pytest.mark.lab, *IN_CI])])
def test_what_a_killed_attempt_printed_is_recorded_up_to_where_the_next_one_goes_on(
    project: Project, host: str, request: pytest.FixtureRequest
) -> None:
    use_script(project, PRINTS_AND_IS_KILLED)
    words = ["program.args=['{checkpoints}']", "cluster.nproc_per_node=1", "cluster.max_restarts=1"]
    if host:
        lab: Lab = request.getfixturevalue("lab")
        words += ["cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", f"cluster.hosts=[{host}]"]
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert "paceline: note: 2 rows that earlier attempts printed stand before them" in done.stdout
    rows = rows_of(project.only_run() / "metrics.jsonl")
    assert [(row["step"], row["metrics"]["loss"]) for row in rows] == [
        (1, 1),
        (2, 0.5),
        (3, 0.333),
        (4, 0.25),
        (5, 0.2),
    ]


PRINTS_ON = """
import os, pathlib, sys, time
saved = pathlib.Path(sys.argv[1]) / "step.txt"
for step in range(int(saved.read_text()) + 1 if saved.exists() else 1, 61):
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    saved.with_suffix(".tmp").write_text(str(step))
    os.replace(saved.with_suffix(".tmp"), saved)
    time.sleep(0.25)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_what_a_host_printed_after_its_command_was_killed_is_kept_and_recorded(project: Project, lab: Lab) -> None:
    use_script(project, PRINTS_ON)
    words = ["program.args=['{checkpoints}']", "cluster.nproc_per_node=1", "cluster.lease_s=5"]
    words += ["cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]"]
    child = project.start("train", *words)
    wait_until(
        lambda: any("step 3 " in log.read_text() for log in project.folder.glob("runs/*/attempts/1/*.log")), child
    )
    child.kill()
    child.communicate()
    run = project.only_run()
    log = run / "attempts/1/node0.log"
    seen = log.read_text().count("step ")
    time.sleep(9.0)  # its ranks go on for the lease
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert log.read_text().count("step ") > seen + 8
    assert sorted(row["step"] for row in rows_of(run / "metrics.jsonl")) == [*range(1, 61)]


@pytest.mark.ci
@pytest.mark.long
def test_a_child_that_outlives_its_script_is_named_behind_the_runs_end(project: Project) -> None:
    """It has dropped the environment of its script."""
    words = "['sleep', '600'], env={}, start_new_session=True"
    use_script(project, f"import subprocess\nsubprocess.Popen({words})\n")
    done = project.doit("train", "program.torchrun=false", "cluster.nproc_per_node=1")
    assert done.returncode == 0, done.stdout
    child = re.search(
        r"WARNING: went on after the script's end, and was ended: (process \d+ \(sleep 600\)); not waited for",
        done.stdout,
    )
    assert child is not None, done.stdout
    behind = done.stdout.partition("FINISHED")[2].splitlines()[1]
    lost = "WARNING: outlived the script and was ended, so what it had not written yet is lost: localhost: "
    assert behind.startswith(lost)
    assert f"{child[1]}; not waited for" in behind


COUNTS_SIGNALS = """
import os, pathlib, signal, time, paceline
signals = []
signal.signal(signal.SIGTERM, lambda number, _: signals.append(time.monotonic()))
paceline.log(1, loss=1.0)
pathlib.Path("FOLDER", f"begun-{os.environ.get('RANK', 0)}").touch()
while not signals:
    time.sleep(0.01)
while time.monotonic() < signals[0] + 2.6:
    time.sleep(0.01)
pathlib.Path("FOLDER", f"signals-{os.environ.get('RANK', 0)}").write_text(str(len(signals)))
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "torchrun"),
    [
        (signal.SIGTERM, "true"),
        *(pytest.param(number, "true", marks=IN_CI) for number in (signal.SIGINT, signal.SIGHUP)),
        pytest.param(signal.SIGTERM, "false", marks=IN_CI),
    ],
)
def test_each_process_of_a_script_gets_one_sigterm_and_three_seconds(
    project: Project, tmp_path: Path, torchrun: str, number: int
) -> None:
    (tmp_path / "said").mkdir()
    use_script(project, COUNTS_SIGNALS.replace("FOLDER", str(tmp_path / "said")))
    ranks, project.whole = 2 if torchrun == "true" else 1, True  # torch's own torchrun
    child = project.start("train", f"program.torchrun={torchrun}", f"cluster.nproc_per_node={ranks}")
    wait_until(lambda: len([*(tmp_path / "said").glob("begun-*")]) == ranks, child)
    child.send_signal(number)
    said, _ = child.communicate()
    counts = {path.name: path.read_text() for path in (tmp_path / "said").glob("signals-*")}
    assert counts == {f"signals-{rank}": "1" for rank in range(ranks)}, said


SAVES_OR_IGNORES = """
import os, pathlib, signal, sys, time, paceline
rank, folder = os.environ.get("RANK", "0"), pathlib.Path("FOLDER")
def save(number, frame):
    time.sleep(1)
    (folder / "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save if rank == "0" else signal.SIG_IGN)
paceline.log(1, loss=1.0)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("by", ["doit stop", "doit stop, no command", "SIGTERM"])
def test_a_rank_that_saves_within_a_second_has_saved_and_one_that_ignores_sigterm_is_gone(
    project: Project, tmp_path: Path, by: str
) -> None:
    place = tmp_path / "said"
    place.mkdir()
    use_script(project, SAVES_OR_IGNORES.replace("FOLDER", str(place)))
    project.whole = True  # torch's own torchrun
    child = project.start("train", "cluster.nproc_per_node=2")
    wait_until(lambda: all((path := place / f"pid-{rank}").exists() and path.read_text() for rank in range(2)), child)
    ranks = [psutil.Process(int((place / f"pid-{rank}").read_text())) for rank in range(2)]
    key = project.only_run().name
    if by != "doit stop":
        child.send_signal(signal.SIGTERM if by == "SIGTERM" else signal.SIGKILL)
        said, _ = child.communicate()
    if by == "SIGTERM":
        assert "it starts from the beginning: no argument of the script has {resume}" in said
    else:
        stopped = project.doit("stop", f"run={key}").stdout
        start = "typed again, it starts from the beginning: no argument of the script has {resume}"
        attached = "the command that was attached ends as well"
        command = attached if by == "doit stop" else f"no command was attached; {start}"
        assert f"{key} is stopped on localhost; {command}\n" in stopped
        assert "nothing of" not in stopped
        child.wait()
    assert (place / "saved").exists()
    assert running(ranks) == []
    assert project.states()[-1] == "KILLED"
    assert f"nothing of {key} runs on localhost\n" in project.doit("stop", f"run={key}").stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_script_whose_run_folder_is_lost_goes_on_from_the_mirror(project: Project, tmp_path: Path) -> None:
    words = ("program.args.lr=0.5", "program.args.resume={resume}", f"cluster.checkpoint_mirror={tmp_path}/mirror")
    assert project.doit("train", *words).returncode == 1
    shutil.rmtree(project.only_run())
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert "the run folder has no checkpoint; took 2 files that its script had left from" in done.stdout
    summary = json.loads((project.only_run() / "summary.json").read_text())
    assert (summary["steps"], summary["metrics"]) == (3, {"loss": pytest.approx((8 * 0.5**4) ** 2)})


@pytest.mark.ci
@pytest.mark.long
def test_what_a_script_has_saved_comes_to_the_mirror_while_it_runs(project: Project, tmp_path: Path) -> None:
    (tmp_path / "my scripts/train.py").write_text(WAITS_FOR_THE_MIRROR)
    address = f"cluster.checkpoint_mirror={tmp_path}/mirror"
    arguments = ("program.args.out=null", f"program.args.mirror={tmp_path}/mirror", "program.args.resume={resume}")
    alone = ("program.torchrun=false", "cluster.nproc_per_node=1")
    done = project.doit("train", *arguments, *alone, address, "cluster.checkpoint_fetch_s=0.1")
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "host"),
    [("run", ""), pytest.param("checkpoints", "node0", marks=[pytest.mark.lab, *IN_CI])],
)
def test_after_ctrl_c_no_row_of_a_script_is_lost_and_what_it_can_go_on_from_is_said(
    project: Project, place: str, host: str, request: pytest.FixtureRequest
) -> None:
    (project.folder / "my scripts/train.py").write_text(FINDS_IT_ITSELF)
    words = ["train", f"program.args.out={{{place}}}", "cluster.nproc_per_node=1"]
    once = project.folder / "once"
    if host:
        lab: Lab = request.getfixturevalue("lab")
        words += ["cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", f"cluster.hosts=[{host}]"]
        once = Path(f"once-{place}")
    words.append(f"++cluster.env.ONCE='{once}'")
    child = project.start(*words)
    wait_for_step(project, 6, child)
    said, _ = interrupt(child, signal.SIGINT)
    assert child.returncode == 130
    assert "stopped by SIGINT; no process of the run is left" in said
    start = "from the beginning: no argument of the script has {resume}"
    if place == "checkpoints":
        start += "; its checkpoints stay in place, and it goes on from them if it reads them by itself"
    assert f"try: the same command again; it starts {start}\n" in said
    done = project.doit(*words)
    assert done.returncode == 0, done.stdout
    assert f"attempt 2 starts {start}\n" in done.stdout
    folder, steps = project.only_run(), [*range(1, 11)]
    assert [row["step"] for row in rows_of(folder / "metrics.jsonl")] == steps
    before = [row["step"] for row in rows_of(folder / "attempts/2/before/metrics.jsonl")]
    if place == "checkpoints":
        assert before == [5, 6]
        assert "metrics.jsonl begins anew" not in done.stdout
    else:
        assert before == [1, 2, 3, 4, 5, 6]
        rows = "(6 rows, of steps 1 to 6) is kept in attempts/2/before/metrics.jsonl"
        assert f"metrics.jsonl begins anew: what earlier attempts had logged {rows}" in done.stdout


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


OF_TWO_HOSTS = """
import argparse, os, pathlib, sys, paceline
p = argparse.ArgumentParser()
p.add_argument("--to")
p.add_argument("--resume")
a = p.parse_args()
rank = int(os.environ["RANK"])
first, state, model = 0, rank, 8.0
if a.resume:  # as transformers' Trainer: the model is rank 0's, the state of its generator each rank's own
    first = int(a.resume.rpartition("-")[2])
    state = int(pathlib.Path(a.resume, f"rng_state_{rank}.pth").read_text())
    model = float(pathlib.Path(a.resume, "model.bin").read_text())
for step in range(first + 1, 5):
    state, model = state * 31 + 7 + step, model / 2
    paceline.log(step, loss=model)
    print(step, state, file=open("states.csv", "a"))
    folder = pathlib.Path(a.to, f"checkpoint-{step}")
    folder.mkdir()
    (folder / f"rng_state_{rank}.pth").write_text(str(state))
    if rank == 0:
        (folder / "model.bin").write_text(str(model))
        (folder / "trainer_state.json").write_text("{}")
    if step == 2 and not a.resume:
        sys.exit(3)
"""


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_each_host_goes_on_from_its_own_files_and_those_of_all_come_back(project: Project, lab: Lab) -> None:
    use_script(project, OF_TWO_HOSTS)
    hosts = ["cluster=two_node", "cluster.nproc_per_node=1", f"cluster.ssh_config='{lab.ssh_config}'"]
    done = project.doit(
        "train", "program.args.to={checkpoints}", "program.args.resume={resume}", *hosts, "cluster.max_restarts=1"
    )
    assert done.returncode == 0, done.stdout
    assert "node0:- | paceline: note: goes on from a checkpoint: {resume} is checkpoints/checkpoint-2\n" in done.stdout
    run = project.only_run()
    assert project.result()["metrics"] == {"loss": 0.5}
    for rank, folder in enumerate((run, run / "nodes/1")):
        state, rows = rank, []
        for step in range(1, 5):
            state = state * 31 + 7 + step
            rows.append(f"{step} {state}\n")
        assert (folder / "outputs/workdir/states.csv").read_text() == "".join(rows)
        assert (folder / f"checkpoints/checkpoint-4/rng_state_{rank}.pth").read_text() == str(state)
    assert not [*run.glob("nodes/1/checkpoints/*/model.bin")]  # the first host's, and sent to the second
    assert "nodes/1/outputs/workdir/states.csv" in project.result()["files"]
    assert json.loads((run / "nodes/1/dependencies.json").read_text())["unkeyed"] == {}
    assert not (run / "work").exists()
