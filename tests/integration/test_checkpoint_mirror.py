"""A run goes on from the copies of its checkpoints where nothing of it is, to the weights of an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.integration.commands import Project, processes_of
from tests.integration.conftest import FINISHED, with_readings
from tests.s3_fixture import BUCKET
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore

WORDS = [*FINISHED, f"cluster.checkpoint_mirror=s3://{BUCKET}/runs", "trainer.checkpoint_every_steps=10"]


@pytest.mark.ci
@pytest.mark.long
def test_a_killed_run_ends_on_a_computer_that_shares_nothing_with_its_first(
    project: Project, finished: Project, fetched: Path, tmp_path: Path, s3: ObjectStore
) -> None:
    child = project.start("train", *WORDS, "cluster.checkpoint_fetch_s=0.1")
    wait_until(lambda: any(project.folder.glob("runs/*/checkpoints/step-*.json")), child)
    ranks = list(processes_of(project.folder))
    for process in ranks:  # else they may be done before the first copy
        with suppress(psutil.NoSuchProcess):  # a rank that was just starting a program
            process.suspend()
    wait_until(lambda: any(name.endswith(".json") for name in s3.files()), child)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate(timeout=HANG_S)
    for process in ranks:  # they would go on for their lease
        with suppress(psutil.NoSuchProcess):
            process.kill()
    other = Project(tmp_path / "another computer")
    other.folder.mkdir()
    with_readings(fetched, other.folder)
    done = other.doit("train", *WORDS)
    assert done.returncode == 0, done.stdout
    said = f"took that of step \\d+ from cluster.checkpoint_mirror=s3://{BUCKET}/runs"
    assert re.search(f"the run folder has no checkpoint; {said}", done.stdout), done.stdout
    assert re.search(r"^resumed from step \d+", done.stdout, re.MULTILINE), done.stdout
    assert other.result()["weights_sha256"] == finished.result()["weights_sha256"]
