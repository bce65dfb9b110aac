"""Notices of real runs: one that stalls on two SSH hosts, a sweep in which a trial fails; a reader that leaves."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import ALONE, ROOT, Project, wait_for_step
from tests.integration.test_two_node import ranks_on
from tests.waiting import HANG_S


@pytest.fixture
def told(project: Project) -> Path:
    """A file of which each line is a notice; every command of ``project`` tells there."""
    heard, program = project.folder / "heard of it.jsonl", project.folder / "tell me.py"
    program.write_text("import sys\nwith open(sys.argv[1], 'a') as file:\n    file.write(sys.stdin.read())\n")
    project.words.append(f'notify.command="{shlex.join(["python3", str(program), str(heard)])}"')
    return heard


def notices(heard: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in heard.read_text().splitlines()]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.lab
def test_a_rank_that_stops_on_a_host_is_told_of_and_so_is_the_runs_end(project: Project, told: Path, lab: Lab) -> None:
    project.words += [
        "cluster=two_node",
        f"cluster.ssh_config='{lab.ssh_config}'",
        "cluster.stall_s=5",
        "tracking=none",
    ]
    child = project.start("train", "experiment=quickstart", "trainer.epochs=400")
    wait_for_step(project, 20, child)
    inside = lab.host("node1").init_pid
    assert inside is not None
    stopped = [p for p in psutil.Process(inside).children(recursive=True) if "--config" in p.cmdline()][-1]
    stopped.suspend()
    output, _ = child.communicate(timeout=HANG_S)
    assert child.returncode == 1, output
    stalled, failed = sorted(notices(told), key=lambda notice: str(notice["state"]), reverse=True)
    assert (stalled["kind"], stalled["state"], failed["state"]) == ("run", "STALLED", "FAILED")
    assert stalled["key"] == failed["key"] == project.only_run().name
    assert stalled["hosts"] == failed["hosts"] == ["node0", "node1"]
    assert "rank 1 on node1" in stalled["error"]
    assert "\n" not in failed["error"]
    assert "node1" in failed["text"]
    assert ranks_on(lab) == []


@pytest.mark.ci
@pytest.mark.long
def test_of_a_sweep_its_end_is_told_with_how_many_failed_and_never_twice(project: Project, told: Path) -> None:
    words = ("experiment=quickstart", "trainer.max_steps=8", "optimizer.lr=1e38,0.1", *ALONE, "tracking=none")
    done = project.doit("sweep", *words, "sweep.slots=1")
    assert done.returncode == 1, done.stdout
    (notice,) = notices(told)
    assert (notice["kind"], notice["state"]) == ("sweep", "FAILED")
    assert notice["name"] == "2 trials of digits small_cnn sgd"
    assert notice["error"].startswith("1 of 2 trials failed: training failed on localhost")
    assert (notice["metrics"]["trials_finished"], notice["metrics"]["trials_failed"]) == (1, 1)


@pytest.mark.ci
@pytest.mark.long
def test_a_training_whose_reader_leaves_says_so_once_and_goes_on(project: Project) -> None:
    """As in ``doit train … | head -1``."""
    argv = project.argv("train", "experiment=quickstart", "trainer.epochs=3", *ALONE, "tracking=none")
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stderr.readline().startswith("fetch digits")
        child.stdout.close()
        lost = "nobody reads this command's output any more; doit status shows how it stands"
        assert child.stderr.read().count(lost) == 1
        assert child.wait(timeout=HANG_S) == 0
    assert project.states()[-1] == "FINISHED"
    quiet = project.doit(
        "train", "experiment=quickstart", "trainer.epochs=3", "seed=1", *ALONE, "tracking=none", "-v", "0"
    )
    assert [line.split()[0] for line in quiet.stdout.splitlines()] == ["FINISHED"]


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_behind_stdout_ends_no_training_and_is_told_of_other_commands_in_a_line(project: Project) -> None:
    lost = "what this command says can't be written to its stdout: No space left on device"
    words = ("experiment=quickstart", "trainer.epochs=1", *ALONE, "tracking=none")
    with Path("/dev/full").open("w") as full:

        def said(*argv: str) -> tuple[int, str]:
            done = subprocess.run(
                project.argv(*argv),
                cwd=ROOT,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=HANG_S,
                check=False,
            )
            return done.returncode, done.stderr

        code, told = said("train", *words, "-v", "0")
        assert (code, told) == (0, f"{lost}; doit status shows how it stands\n")
        assert said("runs") == (1, f"ERROR: {lost}\n")
    assert project.states()[-1] == "FINISHED"
    assert not (project.folder / "runs" / ".errors").exists()
