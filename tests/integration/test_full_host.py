"""The disk of a host fills up under a run: who, what, how much, and what fixes it; then the same command goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project, wait_for_step
from tests.lab_fixture import on
from tests.waiting import HANG_S

pytestmark = [pytest.mark.lab, pytest.mark.long]
WORDS = ("experiment=quickstart", "trainer.epochs=20", "trainer.checkpoint_every_steps=10")
SMALL = "/tmp/small disk"


@pytest.fixture
def small_disk(lab: Lab) -> Iterator[str]:
    """A workdir with room for 20 MB on both hosts."""
    for host in lab.hosts:
        done = on(lab, host.name, f"mkdir -p '{SMALL}' && mount -t tmpfs -o size=20m tmpfs '{SMALL}'")
        assert done.returncode == 0, done.stderr
    yield f"{SMALL}/paceline"
    for host in lab.hosts:
        on(lab, host.name, f"umount -l '{SMALL}'")


def test_a_host_whose_disk_fills_is_named_and_the_run_goes_on_when_there_is_room(
    project: Project, lab: Lab, small_disk: str
) -> None:
    project.words = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "tracking=none"]
    undisturbed = project.doit("train", *WORDS)
    assert undisturbed.returncode == 0, undisturbed.stdout
    weights = project.result()["weights_sha256"]
    project.only_run().rename(project.folder / "undisturbed")

    words = (*WORDS, f"cluster.workdir='{small_disk}'")
    child = project.start("train", *words)
    wait_for_step(project, 19, child)
    on(lab, "node0", f"cat /dev/zero >'{SMALL}/filler'")
    output = child.communicate(timeout=HANG_S)[0]
    assert child.returncode == 1, output
    told = (
        rf"ERROR: training failed on node0, rank 0: {SMALL}/paceline/\S+/checkpoints/step-\d+\.pt could not be written"
    )
    assert re.search(
        rf"{told} \(No space left on device\): needs \d+ bytes, \d+ bytes are free there; make room", output
    )
    assert project.states()[-1] == "FAILED"

    on(lab, "node0", f"rm '{SMALL}/filler'")
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert project.result()["weights_sha256"] == weights
