"""`doit train` where an attempt of the run is alive, or has ended well: it is taken up, and nothing is repeated."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipeline.lab import Lab, network, up
from tests.integration.commands import Project, wait_for_step
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.lab

STEPS = 40
SCRIPT = f"""
import pathlib, sys, time, paceline
for step in range(1, {STEPS + 1}):
    paceline.log(step, loss=1 / step)
    time.sleep(0.1)
pathlib.Path(sys.argv[2], "w.txt").write_text("trained")
"""


def of_script(folder: Path, *cluster: str) -> Project:
    """A project with ``SCRIPT``, which has no {resume}."""
    (folder / "train.py").write_text(SCRIPT)
    words = [f"program.script='{folder}/train.py'", "program.args.out={run}", "program.torchrun=false"]
    return Project(folder, words=[*words, *cluster, "cluster.nproc_per_node=1", "tracking=none"])


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("ends_before", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.ci])])
def test_an_attempt_on_a_host_whose_command_was_killed_is_not_repeated(
    tmp_path: Path, lab: Lab, ends_before: bool
) -> None:
    project = of_script(tmp_path, "cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]")
    child = project.start("train")
    wait_for_step(project, 3, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    if ends_before:
        runs = lab.host("node0").home / ".cache" / "paceline" / "runs"
        wait_until(lambda: [*runs.glob(f"{project.only_run().name}*/node0/agent/exit.json")])
    done = project.doit("train")
    assert done.returncode == 0, done.stdout
    assert "attached to attempt 1 on node0" in done.stdout
    result = project.result()
    assert (result["state"], result["attempts"]) == ("FINISHED", 1)
    rows = (project.only_run() / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert (project.only_run() / "outputs" / "w.txt").read_text() == "trained"


@pytest.mark.ci
@pytest.mark.long
def test_an_attempt_on_a_host_that_the_words_call_by_another_name_is_taken_up(tmp_path: Path, lab: Lab) -> None:
    ssh_config = tmp_path / "ssh_config"
    entry = f"Host other\n  HostName {lab.host('node0').address}\n  HostKeyAlias node0\n"
    ssh_config.write_text(entry + lab.ssh_config.read_text().replace("Host node0\n", "Host node0 other\n"))
    project = of_script(tmp_path, "cluster=pssh", f"cluster.ssh_config='{ssh_config}'", "cluster.hosts=[node0]")
    child = project.start("train")
    wait_for_step(project, 3, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    done = project.doit("train", "cluster.hosts=[other]")
    assert done.returncode == 0, done.stdout
    assert "attached to attempt 1 on other" in done.stdout
    assert project.result()["attempts"] == 1
    rows = (project.only_run() / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [*range(1, STEPS + 1)]


@pytest.mark.long  # the wait for a host that took part: tests/pipeline/test_attempting.py
def test_a_host_that_restarts_costs_one_restart(tmp_path: Path, lab: Lab) -> None:
    project = of_script(tmp_path, "cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.hosts=[node0]")
    child = project.start("train", "cluster.max_restarts=1")
    wait_for_step(project, 3, child)
    network.end_processes(lab.host("node0").namespace)
    time.sleep(8)
    up(lab.root, 2)  # starts its ssh server again
    said, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 0, said
    assert "node0 no longer answers: " in said
    assert "training failed on node0: the run's supervisor on this host was killed; the host itself answers" in said
    assert project.result()["attempts"] == 2


@pytest.mark.ci
@pytest.mark.long
def test_what_runs_on_here_is_taken_up_as_well(tmp_path: Path) -> None:
    project, go_on = of_script(tmp_path), tmp_path / "go on"
    waits = f"    while step == {STEPS} and not pathlib.Path({str(go_on)!r}).exists():\n        time.sleep(0.05)\n"
    (tmp_path / "train.py").write_text(SCRIPT.replace("    time.sleep(0.1)\n", waits))  # it ends when the test says so
    child = project.start("train")
    wait_for_step(project, STEPS - 1, child)
    child.kill()
    child.communicate(timeout=HANG_S)
    again = project.start("train")
    assert again.stdout is not None
    said = ""
    for line in again.stdout:
        said += line
        if "attempt" in line:  # it is taken up, or a second one starts
            go_on.touch()
    assert again.wait(timeout=HANG_S) == 0, said
    assert "attached to attempt 1 on localhost" in said
    assert project.result()["attempts"] == 1
