"""Killed before any one of its file operations, a checkpoint folder never loses its newest good checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.test_checkpoint import OWNER, checkpoint
from trainers.checkpoint import Checkpoint, CheckpointFolder, read_verified, step_files


class KilledError(BaseException):
    """Stands for SIGKILL: from then on nothing changes on the disk any more."""


@dataclass
class Disk:
    """Counts the operations that change the folder; all from ``dies_at`` (from 1) on fail."""

    dies_at: int | None
    count: int = 0

    def watched(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.dies_at is not None and self.count >= self.dies_at:
                raise KilledError
            return operation(*arguments, **options)

        return counted


def train(folder: Path, keep: int, *, dies_at: int | None = None) -> tuple[int, list[str]]:
    """Save steps 1 to 3, from the newest good one on. Operations that were done, and the warnings."""
    folder.mkdir(exist_ok=True)
    disk = Disk(dies_at)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "truncate"), (shutil, "rmtree")):
            patch.setattr(owner, name, disk.watched(getattr(owner, name)))
        checkpoints = CheckpointFolder(folder, OWNER, keep)
        try:
            *warnings, last = [None, *checkpoints.newest_good()]
            first = last.step + 1 if isinstance(last, Checkpoint) else 1
            for step in range(first, 4):
                checkpoints.save(checkpoint(step))
                checkpoints.wait()
        except KilledError:
            return disk.count, []
        finally:
            checkpoints.close()
    return disk.count, [str(warning) for warning in warnings if warning is not None]


def good_steps(folder: Path) -> list[int]:
    found = []
    for path in step_files(folder):
        try:
            found.append(read_verified(path).step)
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_killed_before_any_operation_and_again_in_the_resumed_run(tmp_path: Path, keep: int) -> None:
    operations, _ = train(tmp_path / "whole", keep)
    wanted = sorted(path.name for path in (tmp_path / "whole").rglob("*"))
    assert operations >= 3 * 2 + (3 - keep) * 2
    for first in range(1, operations + 1):
        for second in (1, 2, 3, 5):
            folder = tmp_path / f"{first}-{second}"
            train(folder, keep, dies_at=first)
            before = good_steps(folder)
            train(folder, keep, dies_at=second)
            assert max(good_steps(folder), default=0) >= max(before, default=0), (first, second)
            train(folder, keep)
            assert good_steps(folder) == list(range(4 - keep, 4)), (first, second)
            assert sorted(path.name for path in folder.rglob("*")) == wanted, (first, second)


def test_a_checkpoint_without_its_json_is_set_aside_said_once_and_cleaned_up_later(tmp_path: Path) -> None:
    train(tmp_path, 1, dies_at=4)  # files of step 1, and the weights of step 2
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000001.json",
        "step-00000001.pt",
        "step-00000002.pt",
    ]
    for expected in (1, 0):
        *warnings, found = CheckpointFolder(tmp_path, OWNER, 1).newest_good()
        assert len(warnings) == expected
        assert all(str(text).startswith("checkpoint step-00000002.pt is skipped: ") for text in warnings)
        assert isinstance(found, Checkpoint)
        assert found.step == 1
    assert [path.name for path in tmp_path.glob("*.bad")] == ["step-00000002.pt.bad"]
    train(tmp_path, 1)
    assert not list(tmp_path.glob("*.bad"))


def test_a_checkpoint_of_a_later_step_does_not_cost_the_one_just_written(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, OWNER, 1)
    for step in (9, 3):
        folder.save(checkpoint(step))
        folder.wait()
    assert good_steps(tmp_path) == [3, 9]
