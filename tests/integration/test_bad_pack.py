"""A data pack whose bytes have changed on the disk: the trainer refuses it, and the same command fixes it."""

from __future__ import annotations

import pytest

from pipeline.lab import Lab
from tests.integration.commands import Project
from tests.lab_fixture import on

WORDS = ("train", "experiment=quickstart", "trainer.max_steps=4", "tracking=none")


@pytest.mark.lab
@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    [
        r"printf '\\001' | dd of=images.bin bs=1 seek=1000 conv=notrunc",
        "sed -i s/scans/skans/ manifest.json; sed -i s/bundled/bondled/ manifest.json",
        ": > labels.bin",
    ],
)
def test_a_pack_that_rots_on_a_host_is_sent_again(project: Project, lab: Lab, damage: str) -> None:
    project.words = ["cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'", "cluster.max_restarts=1"]
    done = project.doit(*WORDS)
    assert done.returncode == 0, done.stdout
    on(lab, "node1", f"cd ~/.cache/paceline/data/*/ && {damage}")
    again = project.doit(*WORDS, "seed=5")
    assert again.returncode == 0, again.stdout
    if "labels" not in damage:  # the size alone tells of that one, before anything starts
        assert "is set aside: the same command makes it or sends it again" in again.stdout
        assert "attempt 1 failed; starting attempt 2 of 2" in again.stdout
