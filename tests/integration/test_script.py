"""`doit train program.script=…`: any script gets a key, hosts, a record and a second call that launches nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import ROOT, Project
from tests.integration.script_project import script_project, without_arguments
from tests.integration.test_own_models import typed
from tests.integration.test_provenance import copied

ALONE = "cluster.nproc_per_node=1 cluster.env.OMP_NUM_THREADS=1 tracking=none"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return script_project(tmp_path)


STANDS_STILL = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(3):
    if step == 2 and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
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
def test_a_script_that_reads_its_settings_by_exec_is_swept_as_it_runs_alone(project: Project) -> None:
    folder = project.folder / "my scripts"
    (folder / "step.py").unlink()
    files = {"train.py": OF_GLOBALS, "configurator.py": CONFIGURATOR, "config/small.py": "steps = 3\n"}
    for name, text in {**files, "data/chars/meta.txt": "abcdefgh"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    without_arguments(project)
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
        ("import sys; sys.exit(3)", r"training failed on localhost, rank 0: ended with exit code 3"),
        ("input()", r"rank 0: EOFError: EOF when reading a line\n.*File \"\S*train\.py\", line 1"),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_script_is_told_once(project: Project, lines: str, said: str) -> None:
    (project.folder / "my scripts/train.py").write_text(lines)
    done = project.doit("train", "program.args={}", "cluster.nproc_per_node=1")
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
