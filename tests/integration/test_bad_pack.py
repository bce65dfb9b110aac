"""A data pack whose bytes have changed on the disk: the trainer refuses it, and the same command fixes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.data import manifest
from pipeline.lab import Lab
from tests.integration.commands import ALONE, Project
from tests.lab_fixture import on

WORDS = ("train", "experiment=quickstart", "trainer.max_steps=4", "tracking=none")


def rot(folder: Path) -> None:
    """Flip a bit as an ageing disk does: no stamp tells of it."""
    path = folder / "images.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)
    noted = json.loads((folder / manifest.STAMPS).read_text())
    (folder / manifest.STAMPS).write_text(json.dumps({**noted, "images.bin": manifest.stamp(path)}))


@pytest.mark.long  # that a rank refuses it and sets it aside: tests/trainers/test_node_data.py
@pytest.mark.parametrize("verb", ["train", "fetch"])
def test_a_pack_that_rots_here_is_made_again(project: Project, verb: str) -> None:
    project.words = [*ALONE]
    (pack,) = (project.folder / "data").glob("digits-*")
    before = (pack / "images.bin").read_bytes()
    assert project.doit("fetch", "experiment=quickstart").returncode == 0  # its copy is known to be right
    rot(pack)
    failed = project.doit(*WORDS)
    assert failed.returncode == 1
    assert "images.bin was altered: its sha256 is" in failed.stdout, failed.stdout
    assert f"{pack} is set aside: the same command makes it or sends it again" in failed.stdout
    done = project.doit(*(WORDS if verb == "train" else ("fetch", "experiment=quickstart")))
    assert done.returncode == 0, done.stdout
    assert (pack / "images.bin").read_bytes() == before


@pytest.mark.lab
@pytest.mark.long
def test_a_pack_that_rotted_on_a_host_is_sent_again_by_the_next_attempt(project: Project, lab: Lab) -> None:
    project.words = ["cluster=two_node", "cluster.hosts=[{name: node1}]", f"cluster.ssh_config='{lab.ssh_config}'"]
    (pack,) = (project.folder / "data").glob("digits-*")
    digest = json.loads((pack / "manifest.json").read_text())["digest"]
    there = lab.host("node1").home / ".cache/paceline/data" / digest
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(pack, there)
    rot(there)
    done = project.doit(*WORDS, "seed=4", "cluster.max_restarts=1")
    assert done.returncode == 0, done.stdout
    assert "is set aside: the same command makes it or sends it again" in done.stdout
    assert "attempt 1 failed; starting attempt 2 of 2" in done.stdout
    assert (there / "images.bin").read_bytes() == (pack / "images.bin").read_bytes()


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
