"""A training of which all but the ranks was killed at once: the same command starts no second one beside them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, running, wait_for_step, with_readings
from tests.shared_fixture import made_once
from tests.waiting import HANG_S, wait_until

TRAINING = ("experiment=quickstart", "trainer.epochs=40", "++cluster.env.OMP_NUM_THREADS=1", "tracking=none")
_PLAIN = pytest.param("false", marks=[pytest.mark.long, pytest.mark.ci])
WARM = pytest.mark.parametrize("warm", ["true", _PLAIN], ids=["warm ranks", "ranks that torchrun starts"])


def ranks_of(where: str) -> list[psutil.Process]:
    """The ranks of this computer and of lab hosts that have a path with ``where`` in it as an argument."""
    shown = {one: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    of_run = {one: words for one, words in shown.items() if "trainers.classifier" in words and where in words}
    return [one for one, words in of_run.items() if "torchrun.py" not in words]


def end(child: subprocess.Popen[str], others: list[psutil.Process]) -> None:
    """Kill the controller and ``others``, none of which sees another one end."""
    controller = psutil.Process(child.pid)
    killed = [*controller.children(recursive=True), controller, *others]
    for process in killed:
        process.suspend()
    for process in killed:
        process.kill()
    child.communicate(timeout=HANG_S)


def weights(project: Project) -> str:
    return str(project.result()["weights_sha256"])


@pytest.fixture(scope="session")
def undisturbed(shared: Path, fetched: Path) -> str:
    """The digest of the weights of a training with two ranks that nobody disturbs."""

    def train(folder: Path) -> None:
        with_readings(fetched, folder)
        done = Project(folder).doit("train", *TRAINING, "cluster.nproc_per_node=2")
        assert done.returncode == 0, done.stdout

    return weights(Project(made_once(shared / "undisturbed ranks", train)))


def orphaned(project: Project, *words: str) -> list[psutil.Process]:
    """The two ranks of a training on this computer, of which everything else was killed at once."""
    child = project.start("train", *words)
    wait_for_step(project, 60, child)
    entry = json.loads(next(project.only_run().glob("attempts/1/agent-*/agent.json")).read_text())
    orphans = ranks_of(f"{project.folder}/")
    assert len(orphans) == 2
    end(child, [*{*orphans[0].parents()[:2], psutil.Process(entry["pid"])}])
    assert running(orphans) == orphans
    return orphans


@pytest.mark.ci
@pytest.mark.long
@WARM
def test_orphaned_ranks_are_ended_before_the_next_attempt_trains(project: Project, undisturbed: str, warm: str) -> None:
    project.whole = True
    words = (*TRAINING, "cluster.nproc_per_node=2", f"cluster.warm={warm}")
    orphans = orphaned(project, *words)
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    pids = ", ".join(str(one.pid) for one in sorted(orphans, key=lambda one: one.pid))
    over = "attempt 1 is over on localhost: its agent is gone; what lives on of it is ended first: processes"
    assert f"{over} {pids}\n" in done.stdout
    assert not running(orphans)
    assert weights(project) == undisturbed


@pytest.mark.ci
@pytest.mark.long
@WARM
def test_orphaned_ranks_that_train_to_the_end_are_gone_then_and_nothing_is_repeated(
    project: Project, undisturbed: str, warm: str
) -> None:
    project.whole = True
    words = (*TRAINING, "cluster.nproc_per_node=2", f"cluster.warm={warm}")
    orphans = orphaned(project, *words)
    wait_until(lambda: not running(orphans))
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert (project.result()["attempts"], weights(project)) == (1, undisturbed)


@pytest.mark.ci
@pytest.mark.long
def test_metrics_that_are_damaged_after_the_ranks_have_ended_are_made_again(project: Project) -> None:
    child = project.start("train", *TRAINING, "cluster.nproc_per_node=1", "trainer.checkpoint_every_steps=50")
    wait_for_step(project, 100, child)
    end(child, [])
    folder = project.only_run()
    wait_until((folder / "summary.json").exists)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": null}\n')
    done = project.doit("train", *TRAINING, "cluster.nproc_per_node=1", "trainer.checkpoint_every_steps=50")
    assert done.returncode == 0, done.stdout
    why = "WARNING: files of the ranks were changed since they wrote them; the next attempt starts from the checkpoint"
    assert why in done.stdout
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert project.result()["attempts"] == 2


@pytest.mark.ci
@pytest.mark.long
def test_the_killed_parent_of_warm_ranks_is_named_and_no_rank_outlives_it(project: Project) -> None:
    project.whole = True
    child = project.start("train", *TRAINING, "cluster.nproc_per_node=2")
    wait_for_step(project, 1, child)
    ranks = ranks_of(f"{project.folder}/")
    torchrun, parent = ranks[0].parents()[:2]
    parent.kill()
    said, _ = child.communicate(timeout=HANG_S)
    assert "training failed on localhost: the warm parent of the ranks (trainers/ranks.py) ended while they ran" in said
    assert "torchrun ended" not in said
    assert not running((torchrun, *ranks))


@pytest.mark.long  # on this computer: above
@pytest.mark.lab
@WARM
def test_orphaned_ranks_on_hosts_are_ended_before_the_next_attempt_trains(
    project: Project, undisturbed: str, lab: Lab, warm: str
) -> None:
    words = (*TRAINING, "cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", f"cluster.warm={warm}")
    child = project.start("train", *words)
    wait_for_step(project, 60, child)
    orphans = ranks_of(json.loads((project.only_run() / "plan.json").read_text())["run_id"])
    assert len(orphans) == 2
    on_hosts = [one for host in lab.hosts for one in psutil.Process(host.init_pid).children(recursive=True)]
    end(child, [one for one in on_hosts if one not in orphans and one.name().startswith("python")])
    assert running(orphans) == orphans
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    for host in ("node0", "node1"):
        over = f"attempt 1 is over on {host}: its agent is gone; what lives on of it is ended first: processes "
        assert over in done.stdout
    assert not running(orphans)
    assert weights(project) == undisturbed
