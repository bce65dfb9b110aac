"""A run whose folder is gone goes on from the copies of its checkpoints, to the weights of an undisturbed run."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.commands import Project, wait_for_step
from tests.integration.conftest import FINISHED
from tests.waiting import HANG_S, wait_until


@pytest.mark.long
def test_a_removed_run_goes_on_from_the_mirror_with_the_same_weights(
    project: Project, finished: Project, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    words = [*FINISHED, f"cluster.checkpoint_mirror=file://{mirror}", "trainer.checkpoint_every_steps=10"]
    words.append("cluster.checkpoint_fetch_s=0.1")
    child = project.start("train", *words)
    wait_for_step(project, 20, child)
    wait_until(lambda: bool(list(mirror.glob("*/step-*.json"))), child)
    child.send_signal(signal.SIGINT)
    output = child.communicate(timeout=HANG_S)[0]
    assert child.returncode != 0, output
    shutil.rmtree(project.only_run())
    done = project.doit("train", *words)
    assert done.returncode == 0, done.stdout
    assert "the run folder has no checkpoint; took that of step " in done.stdout
    assert project.result()["weights_sha256"] == finished.result()["weights_sha256"]
