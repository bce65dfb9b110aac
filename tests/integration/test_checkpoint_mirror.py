"""A run goes on from the copies of its checkpoints where nothing of it is, to the weights of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.integration.commands import Project, wait_for_step
from tests.integration.conftest import FINISHED, with_readings
from tests.s3_fixture import BUCKET
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore

WORDS = [*FINISHED, f"cluster.checkpoint_mirror=s3://{BUCKET}/runs", "trainer.checkpoint_every_steps=10"]


def test_a_killed_run_ends_on_a_computer_that_shares_nothing_with_its_first(
    project: Project, finished: Project, fetched: Path, tmp_path: Path, s3: ObjectStore
) -> None:
    child = project.start("train", *WORDS, "cluster.checkpoint_fetch_s=0.1")
    wait_for_step(project, 20, child)
    wait_until(lambda: any(name.endswith(".json") for name in s3.files()), child)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=HANG_S)
    assert project.doit("stop", *WORDS).returncode == 0  # its ranks go on for the lease; that computer is off
    other = Project(tmp_path / "another computer")
    other.folder.mkdir()
    with_readings(fetched, other.folder)
    done = other.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    said = f"took that of step \\d+ from cluster.checkpoint_mirror=s3://{BUCKET}/runs"
    assert re.search(f"the run folder has no checkpoint; {said}", done.stdout), done.stdout
    assert other.result()["weights_sha256"] == finished.result()["weights_sha256"]
