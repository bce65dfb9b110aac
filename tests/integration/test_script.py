"""`doit train program.script=…`: any script gets a key, hosts, a record and a second call that launches nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import ROOT, Project, interrupt, running, wait_for_step
from tests.integration.test_own_models import typed
from tests.integration.test_provenance import copied
from tests.waiting import wait_until

IN_CI = [pytest.mark.long, pytest.mark.ci]
ALONE = "cluster.nproc_per_node=1 cluster.env.OMP_NUM_THREADS=1 tracking=none"
SCRIPT = """
import argparse, os, sys
import paceline
from step import update
p = argparse.ArgumentParser()
p.add_argument("--lr", type=float)
p.add_argument("--out")
p.add_argument("--resume")
a = p.parse_args()
w = float(open(a.resume).read()) if a.resume else 8.0
for step in range(1, 4):
    w = update(w, a.lr)
    paceline.log(step, loss=w * w)
    if os.environ["RANK"] == "0":
        path = os.path.join(paceline.checkpoints(), "w.bin")
        with open(path + ".tmp", "w") as file:  # the other rank may still be reading the earlier one
            file.write(str(w))
        os.replace(path + ".tmp", path)
        if a.lr == 0.5 and not a.resume:
            sys.exit(3)
if os.environ["RANK"] == "0":
    open(os.path.join(a.out, "w.txt"), "w").write(str(w))
"""

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
DEAF = """
import signal, time, paceline
signal.signal(signal.SIGTERM, signal.SIG_IGN)
paceline.log(1, loss=1)
time.sleep(600)
"""

STANDS_STILL = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
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

OF_GLOBALS = """
import os
rate, steps, vocabulary = 1.0, 1, 1000
exec(open("configurator.py").read())
assert "RANK" not in os.environ, "under torchrun it wants a GPU"
if os.path.exists("data/chars/meta.txt"):
    vocabulary = len(open("data/chars/meta.txt").read())
weight = float(vocabulary)
for step in range(1, steps + 1):
    weight -= rate * weight
    print(f"iter {step}: loss {weight:.4f}, time 1.00ms")
"""
CONFIGURATOR = """
import sys
for word in sys.argv[1:]:
    exec(word[2:] if word.startswith("--") else open(word).read())
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project of the test's own with a script elsewhere; ``words`` name it."""
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "step.py").write_text("def update(w, lr):\n    return w - lr * w\n")
    words = [f"program.script='{folder}/train.py'", "program.args.out={run}", "cluster.nproc_per_node=2"]
    apart = "cluster.env.PACELINE_PROJECT=/nowhere"  # or the stand-in of torchrun would count as the project's
    return Project(tmp_path, words=[*words, apart, "tracking=none"])


@pytest.mark.ci
@pytest.mark.long
def test_a_script_is_swept_and_not_run_twice(project: Project) -> None:
    done = project.doit("sweep", "program.args.lr=0.1,0.2")
    assert done.returncode == 0, done.stdout
    folders = project.run_folders()
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    lowest = (8 * 0.8**3) ** 2
    assert min(result["metrics"]["loss"] for result in results) == pytest.approx(lowest)
    assert {(result["steps"], result["proven"], *result["unkeyed"]) for result in results} == {(3, False)}
    for folder, result in zip(folders, results, strict=True):
        assert {"outputs/w.txt", "checkpoints/w.bin", "metrics.jsonl", "outputs.json"} <= result["files"].keys()
        assert sorted(path.name for path in (folder / "code/_script").iterdir()) == ["step.py", "train.py"]
    again = project.doit("train", "program.args.lr=0.1")
    assert "is finished: loss " in again.stdout
    assert "unproven" in again.stdout
    assert project.doit("runs").stdout.count("unproven") == 2
    (folders[0] / "outputs/w.txt").write_text("other")
    changed = json.loads((folders[0] / "config.json").read_text())["program"]["args"]["lr"]
    assert "outputs/w.txt" in project.doit("why", f"program.args.lr={changed}").stdout
    assert not [*(project.folder / "runs" / "sweeps").glob("*/reports.log")]  # of scripts no process waits to make any


@pytest.mark.ci
@pytest.mark.long
def test_several_seeds_of_a_script_that_sees_none_are_refused_at_both_doors(project: Project) -> None:
    project.words[1] = "program.args.out='{run}'"
    refused = project.doit("sweep", "seed=0,1")
    multirun = [sys.executable, "-m", "pipeline", "--multirun", *project.words, *project.overrides, "seed=0,1"]
    hydra = subprocess.run(multirun, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (refused.returncode, hydra.returncode) == (3, 3), hydra.stderr
    for said in (refused.stdout + refused.stderr, hydra.stderr):
        assert "seed=0: the script never sees it" in said
        assert "try: program.args.seed='{seed}'" in said
    assert project.run_folders() == []


@pytest.mark.ci
@pytest.mark.long
def test_a_script_that_reads_its_settings_by_exec_is_swept_as_it_runs_alone(project: Project) -> None:
    folder = project.folder / "my scripts"
    (folder / "step.py").unlink()
    files = {"train.py": OF_GLOBALS, "configurator.py": CONFIGURATOR, "config/small.py": "steps = 3\n"}
    for name, text in {**files, "data/chars/meta.txt": "abcdefgh"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
    told = ["program.torchrun=false", 'program.args=[config/small.py,"--rate=${program.env.RATE}"]']
    told += [r"program.metrics_pattern='iter (?P<step>\d+): loss (?P<loss>[\d.]+)'"]
    told += ["program.inputs=[configurator.py,config/small.py,'data/chars/*']", "program.env.RATE=0.5,0.25"]
    done = project.doit("sweep", *told)
    assert "2 of 2 trials finished" in done.stdout, done.stdout
    assert "not complete" not in done.stdout
    losses = {}
    for rate in ("0.5", "0.25"):
        argv = [sys.executable, "train.py", "config/small.py", f"--rate={rate}"]
        alone = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True).stdout
        losses[rate] = float(re.findall(r"loss ([\d.]+)", alone)[-1])
    results = [json.loads((run / "result.json").read_text()) for run in project.run_folders()]
    assert sorted(result["metrics"]["loss"] for result in results) == sorted(losses.values()) == [1.0, 3.375]
    assert {(result["attempts"], *result["nproc_per_node"], *result["unkeyed"]) for result in results} == {(1, 1)}
    again = project.doit("sweep", *told)
    assert "2 of 2 trials finished" in again.stdout
    told[-1] = "program.env.RATE=0.5"
    told[2] = "program.metrics_pattern='loss (?P<cost>[\\d.]+)'"
    searched = project.doit("train", *told)
    assert "searching its log for program.metrics_pattern; nothing is trained again" in searched.stdout
    assert "is finished: cost 1" in project.doit("train", *told).stdout
    states = [(run / "journal.jsonl").read_text().count("RUNNING") for run in project.run_folders()]
    assert states == [1, 1]


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
    (project.folder / "my scripts/train.py").write_text(FAILS_AT_EACH_STEP)
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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
    (project.folder / "my scripts/train.py").write_text(PRINTS_AND_IS_KILLED)
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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
    (project.folder / "my scripts/train.py").write_text(PRINTS_ON)
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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
def test_a_script_that_fails_at_one_step_twice_is_not_started_a_third_time(project: Project) -> None:
    done = project.doit("train", "program.args.lr=0.5", "cluster.max_restarts=3")
    assert done.returncode == 1
    assert "it has failed in the same way at step 1 before, so it is not tried again" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_child_that_outlives_its_script_is_named_behind_the_runs_end(project: Project) -> None:
    """It has dropped the environment of its script."""
    words = "['sleep', '600'], env={}, start_new_session=True"
    (project.folder / "my scripts/train.py").write_text(f"import subprocess\nsubprocess.Popen({words})\n")
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
    done = project.doit("train", "program.torchrun=false", "cluster.nproc_per_node=1")
    assert done.returncode == 0, done.stdout
    child = re.search(
        r"WARNING: went on after the script's end, and was ended: (process \d+ \(sleep 600\)); not waited for",
        done.stdout,
    )
    assert child is not None, done.stdout
    behind = done.stdout.partition("FINISHED")[2].splitlines()[1]
    assert behind.startswith("WARNING: ended after the script, and lost what it had not written yet: localhost: ")
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
    (project.folder / "my scripts/train.py").write_text(COUNTS_SIGNALS.replace("FOLDER", str(tmp_path / "said")))
    ranks, project.whole = 2 if torchrun == "true" else 1, True  # torch's own torchrun
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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
    (project.folder / "my scripts/train.py").write_text(SAVES_OR_IGNORES.replace("FOLDER", str(place)))
    project.whole = True  # torch's own torchrun
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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


def test_a_run_that_read_what_its_key_lacks_does_not_count_until_that_is_added(project: Project) -> None:
    folder = project.folder / "my scripts"
    (folder / "lr.txt").write_text("0.25")
    (folder / "train.py").write_text(
        "import pathlib\ntry:\n    pathlib.Path(__file__).parent.joinpath('lr' + '.txt').read_text()\nexcept OSError:\n"
        "    pass\n" + SCRIPT
    )
    words = ("program.args.lr=0.1",)
    first = project.doit("train", *words)
    assert first.returncode == 0, first.stdout
    assert (
        "its key is not complete: _script/lr.txt was looked for and isn't in the snapshot; add it to program.inputs"
        in first.stdout
    )
    assert "train     to do  its key is not complete" in project.doit("plan", *words).stdout
    assert "is finished" in project.doit("train", *words, "program.seal=off").stdout
    again = project.doit("train", *words)
    assert "FINISHED" in again.stdout
    assert "attempt 2 starts from the beginning: no argument of the script has {resume}" in again.stdout
    whole = project.doit("train", *words, "program.inputs=[lr.txt]")
    assert "not complete" not in whole.stdout
    assert "is finished" in project.doit("train", *words, "program.inputs=[lr.txt]").stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_run_whose_data_changed_while_it_went_on_does_not_count(project: Project, tmp_path: Path) -> None:
    data = tmp_path / "texts/a.txt"
    data.parent.mkdir()
    data.write_text("0.25")
    once = tmp_path / "once"
    (project.folder / "my scripts/train.py").write_text(
        "import os, sys, paceline\npath = sys.argv[sys.argv.index('--data') + 1] + '/a.txt'\n"
        f"if not os.path.exists({str(once)!r}):\n    open({str(once)!r}, 'w').close()\n"
        "    open(path, 'w').write('0.75')\npaceline.log(1, loss=float(open(path).read()))\n"
    )
    words = (f"program.args.data='{data.parent}'", "cluster.nproc_per_node=1")
    said = project.doit("train", *words).stdout
    assert "texts/a.txt was changed while the run went on, and the key has the content from before" in said
    data.write_text("0.25")
    assert "train     to do  texts/a.txt was changed while the run went on" in project.doit("plan", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout
    assert project.result()["metrics"] == {"loss": 0.25}
    assert "is finished" in project.doit("train", *words).stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_file_outside_of_the_project_that_changes_repeats_the_run_and_why_names_it(
    project: Project, tmp_path: Path
) -> None:
    values = tmp_path / "elsewhere/values.txt"
    values.parent.mkdir()
    values.write_text("0.25")
    (tmp_path / "my scripts/train.py").write_text(
        f"import paceline\npaceline.log(1, loss=float(open({str(values)!r}).read()))\n"
    )
    words = ("program.args.lr=0.1", "program.torchrun=false", "cluster.nproc_per_node=1")
    assert f"{values} was read outside of the project: no part of the key, but" in project.doit("train", *words).stdout
    assert "is finished" in project.doit("train", *words).stdout
    values.write_text("0.5")
    assert f"{values}, which it read and its key lacks, changed" in project.doit("why", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout
    assert project.result()["metrics"] == {"loss": 0.5}


OF_RANK_ONE = """
import os, paceline
if os.environ["RANK"] == "1":
    open(os.environ["PARTS"] + "/part1.txt").close()
paceline.log(1, loss=1.0)
"""


@pytest.mark.ci
@pytest.mark.long
def test_a_file_that_rank_one_alone_reads_repeats_the_run_when_it_changes(project: Project, tmp_path: Path) -> None:
    project.whole = True  # ranks that are forked have no sitecustomize
    part = tmp_path / "elsewhere/part1.txt"
    part.parent.mkdir()
    part.write_text("1")
    (tmp_path / "my scripts/train.py").write_text(OF_RANK_ONE)
    words = ("program.args.lr=0.1", f"program.env.PARTS='{part.parent}'")
    assert f"{part} was read outside of the project" in project.doit("train", *words).stdout
    assert "is finished" in project.doit("train", *words).stdout
    part.write_text("2")
    assert f"{part}, which it read and its key lacks, changed" in project.doit("why", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_variable_of_the_shell_that_a_script_reads_repeats_the_run_with_another_value(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.whole = True  # each command has this environment
    (tmp_path / "my scripts/train.py").write_text(
        "import os, paceline\npaceline.log(1, loss=len(os.environ['TZ']), lr=len(os.environ['LANG']))\n"
    )
    words = ("program.args.lr=0.1", "program.torchrun=false", "cluster.nproc_per_node=1", "program.env.LANG=C")
    monkeypatch.setenv("TZ", "UTC")
    assert "FINISHED" in project.doit("train", *words).stdout
    for name in ("LANG", "LC_TIME", "USER"):  # in the key, and read by nobody
        monkeypatch.setenv(name, "de_DE")
    assert "is finished" in project.doit("train", *words).stdout
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert "the variable TZ, which it read and its key lacks, changed" in project.doit("why", *words).stdout
    assert "FINISHED" in project.doit("train", *words).stdout
    assert project.result()["metrics"] == {"loss": 10.0, "lr": 1.0}


@pytest.mark.ci
@pytest.mark.long
def test_a_script_whose_output_was_damaged_is_trained_again_and_an_intact_one_is_not(project: Project) -> None:
    words = ("program.args.lr=0.1", "program.args.resume={resume}", "cluster.nproc_per_node=1")
    assert project.doit("train", *words).returncode == 0
    folder = project.only_run()
    output, written = folder / "outputs/w.txt", (folder / "outputs/w.txt").read_text()
    (folder / "result.json").write_text("")
    again = project.doit("train", *words)
    assert "FINISHED" in again.stdout, again.stdout
    assert project.result()["attempts"] == 1
    output.write_text("")
    repeated = project.doit("train", *words).stdout
    assert "FINISHED" in repeated
    place = folder / "attempts/2/before"
    why = f"outputs/w.txt has 0 bytes, {len(written)} were written"
    assert f"earlier files of the script are kept in {place}, as the run is made anew: {why}" in repeated
    assert f"attempt 2 starts from the beginning: its checkpoints were set aside, to {place}/checkpoints" in repeated
    assert (place / "checkpoints/w.bin").is_file()
    assert len((place / "metrics.jsonl").read_text().splitlines()) == 3
    assert (project.result()["attempts"], output.read_text()) == (2, written)
    assert "is finished" in project.doit("train", *words).stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_script_that_ignores_sigterm_is_ended_by_ctrl_c_and_what_comes_next_is_said(project: Project) -> None:
    (project.folder / "my scripts/train.py").write_text(DEAF)
    child = project.start("train", "cluster.nproc_per_node=1")
    wait_for_step(project, 1, child)
    said, seconds = interrupt(child, signal.SIGINT)
    assert "stopped by SIGINT; no process of the run is left" in said
    again = "the same command again; it starts from the beginning: no argument of the script has {resume}"
    assert f"try: {again}\n" in said
    assert (child.returncode, seconds < 15) == (130, True)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("checkpoints", ""),
        ("run", ""),
        *(pytest.param(to, "node0", marks=[pytest.mark.lab, *IN_CI]) for to in ("checkpoints", "run")),
    ],
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


@pytest.mark.ci
@pytest.mark.long
def test_a_script_without_torchrun_is_named_where_it_fails(project: Project) -> None:
    (project.folder / "my scripts/train.py").write_text("import sys; sys.exit(2)")
    project.words = [word for word in project.words if "nproc_per_node" not in word]
    done = project.doit("train", "program.torchrun=false")
    assert "train.py ended with exit code 2" in done.stdout
    assert "torchrun ended" not in done.stdout
    (project.folder / "my scripts/train.py").write_text("raise RuntimeError('one\\n\\n# two')")
    raised = project.doit("train", "program.torchrun=false").stdout
    assert "training failed on localhost, rank 0: RuntimeError: one\n\n# two\n" in raised


@pytest.mark.ci
@pytest.mark.long
def test_the_examples_of_the_page_train_as_printed_and_an_experiment_file_sweeps_the_same_run(
    tmp_path: Path, fetched: Path
) -> None:
    (example, lines, experiment) = re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / "docs/own-scripts.md").read_text(), re.MULTILINE | re.DOTALL
    )[:3]
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, example, ALONE)
    assert done.returncode == 0, done.stdout
    assert "FINISHED" in done.stdout
    done = typed(checkout, experiment, ALONE)
    assert "is finished: loss" in done.stdout, done.stdout
    assert "2 of 2 trials finished" in done.stdout
    assert (len(checkout.runs()), checkout.launches()) == (2, 2)
    done = typed(checkout, lines, "tracking=none")
    assert "2 of 2 trials finished" in done.stdout
    assert "program.args.lr: 0.1 → 0.2" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_the_script_of_the_readme_trains_in_a_new_clone(tmp_path: Path, fetched: Path) -> None:
    typed_there = r"^doit torchrun --nproc-per-node 2 examples/train\.py [^#\n]+"
    (line,) = re.findall(typed_there, (ROOT / "README.md").read_text(), re.MULTILINE)
    checkout = copied(tmp_path / "project", fetched)
    shutil.copytree(ROOT / "examples", checkout.root / "examples")
    done = typed(checkout, line, "tracking=none")
    assert "FINISHED" in done.stdout, done.stdout
    (result,) = (checkout.root / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["metrics"]["loss"] < 0.1
    assert (result.parent / "outputs/model.pt").exists()

    key = result.parent.name
    assert "unproven" in checkout.doit("runs")
    told = checkout.doit("reproduce", f"run={key}")
    assert re.search(rf"REPRODUCED {key}: .*outputs.*are equal", told), told
    assert "unproven" not in checkout.doit("runs")


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param("import sys; sys.exit(3)", r"training failed on localhost, rank 0: ended with exit code 3",
         marks=IN_CI),
        ("input()", r"rank 0: EOFError: EOF when reading a line\n.*File \"\S*train\.py\", line 1"),
        pytest.param("import os; os.chdir('/'); open('model.pt')", r"No such file or directory: 'model\.pt'",
         marks=IN_CI),
        ("print('done')", r"train\.py ended with exit code 0 without \*\.pt$"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_script_is_told_once(project: Project, lines: str, said: str) -> None:
    (project.folder / "my scripts/train.py").write_text(lines)
    done = project.doit("train", "program.args={}", "program.outputs=['*.pt']", "cluster.nproc_per_node=1")
    assert done.returncode == 1
    assert len(re.findall(said, done.stdout, re.MULTILINE | re.DOTALL)) == 1, done.stdout
    assert not (project.only_run() / "result.json").exists()


@pytest.mark.ci
@pytest.mark.long
def test_a_script_whose_rank_stands_still_while_another_waits_for_it_is_ended_and_the_rank_named(
    project: Project,
) -> None:
    (project.folder / "my scripts/train.py").write_text(STANDS_STILL)
    project.whole = True  # the interpreter that the stand-in of torchrun forks runs no sitecustomize
    done = project.doit("train", "cluster.stall_s=5")
    assert done.returncode == 1
    assert re.search(
        r"ERROR: training failed on localhost: no rank has moved for \d+ s: rank 1 on localhost hangs in the script: "
        r"it sleeps \(\S+\) at \S*train\.py:7 in <module>; rank 0 on localhost waits for it\n"
        r"its stack, innermost first:\n  \S+/train\.py:7 in <module>\n",
        done.stdout,
    ), done.stdout


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
    (project.folder / "my scripts/train.py").write_text(OF_TWO_HOSTS)
    project.words = [word for word in project.words if "nproc" not in word and "args" not in word]
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


@pytest.mark.ci
@pytest.mark.long
def test_a_script_stands_where_its_user_stood_and_a_file_beside_it_is_named_or_there(
    tmp_path: Path, fetched: Path
) -> None:
    checkout = copied(tmp_path / "project", fetched)
    (checkout.root / "study/configs").mkdir(parents=True)
    (checkout.root / "study/configs/default.txt").write_text("0.5")
    (checkout.root / "study/train.py").write_text(
        "import paceline\npaceline.log(1, loss=float(open('configs/%s' % 'default.txt').read()))\n"
        "open('r.csv', 'w').write('x')"
    )
    line = "cd study && DOIT_SEEK_FILE=1 doit train program.script=train.py program.torchrun=false "
    failed = typed(checkout, line, ALONE)
    assert failed.returncode == 1
    told = "study/configs/default.txt was looked for and isn't in the snapshot; add it to program.inputs"
    assert told in failed.stdout, failed.stdout
    done = typed(checkout, f"{line} program.inputs=[configs/default.txt] ", ALONE)
    assert done.returncode == 0, done.stdout
    (result,) = (checkout.root / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["metrics"] == {"loss": 0.5}
    assert (result.parent / "outputs/workdir/r.csv").exists()
    assert json.loads((result.parent / "key.json").read_text())["config"]["program"]["workdir"] == "study"
    assert "program.workdir=study" in json.loads((result.parent / "provenance.json").read_text())["overrides"]
