import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.checkpoint import Checkpoint, CheckpointFolder, Identity
from trainers.core.errors import TrainerError
from trainers.distributed.node_hardware import NodeHardware

OWNER = Identity(config={"optimizer.lr": 0.1, "seed": 0}, dataset_digest="d" * 64, world_size=2, hardware="cpu in fp32")


def checkpoint(step: int) -> Checkpoint:
    weights = torch.full((100,), float(step))
    return Checkpoint(
        step=step,
        epoch=step // 5,
        position=step % 5,
        model={"weight": weights},
        optimizer={"momentum": [weights.clone()]},
        own=torch.zeros(2, 0),
        progress={"train_s": 1.5},
    )


def save(folder: Path, *steps: int, keep: int = 3) -> None:
    checkpoints = CheckpointFolder(folder, OWNER, keep)
    for step in steps:
        checkpoints.save(checkpoint(step))
    checkpoints.wait()


def test_the_newest_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 7, 12)
    (found,) = CheckpointFolder(tmp_path, OWNER, 3).newest_good()
    assert isinstance(found, Checkpoint)
    assert (found.step, found.epoch, found.position, found.progress) == (12, 2, 2, {"train_s": 1.5})
    assert found.model["weight"].equal(torch.full((100,), 12.0))
    assert found.optimizer["momentum"][0].equal(torch.full((100,), 12.0))
    notes = json.loads((tmp_path / "step-00000012.json").read_text())
    assert (notes["step"], notes["world_size"], notes["dataset_digest"]) == (12, 2, "d" * 64)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-0000000{step}.{end}" for step in (3, 4) for end in ("json", "pt")]


@pytest.mark.parametrize("damage", ["truncate", "alter", "no side file", "side file torn"])
def test_a_damaged_newest_one_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 7, 12)
    path, side = tmp_path / "step-00000012.pt", tmp_path / "step-00000012.json"
    content = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(content[:-9])
    elif damage == "alter":
        path.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    elif damage == "no side file":
        side.unlink()
    else:
        side.write_text(side.read_text()[:20])
    warning, found = CheckpointFolder(tmp_path, OWNER, 3).newest_good()
    assert str(warning).startswith("checkpoint step-00000012.pt is skipped: ")
    assert isinstance(found, Checkpoint)
    assert found.step == 7


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 7)
    (tmp_path / ".step-00000012.pt.tmp").write_bytes(b"half")
    list(CheckpointFolder(tmp_path, OWNER, 3).newest_good())
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"config": {"optimizer.lr": 0.2, "seed": 0}}, r"another configuration: optimizer.lr=0.1 \(now 0.2\); delete"),
        ({"dataset_digest": "e" * 64}, "was trained on data dddddddddddd, this run has eeeeeeeeeeee"),
    ],
)
def test_a_checkpoint_of_another_configuration_or_other_data_is_refused(
    tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    save(tmp_path, 7)
    with pytest.raises(TrainerError, match=message):
        list(CheckpointFolder(tmp_path, replace(OWNER, **other), 3).newest_good())


def test_another_world_size_or_device_is_said_and_taken(tmp_path: Path) -> None:
    save(tmp_path, 7)
    other = replace(OWNER, world_size=4, hardware="cuda in bf16")
    warning, second, found = CheckpointFolder(tmp_path, other, 3).newest_good()
    assert str(second).startswith("checkpoint step-00000007.pt comes from cpu in fp32, now it is cuda in bf16: the wei")
    assert "written by 2 ranks, now there are 4: the weights will not be bit-identical" in str(warning)
    assert isinstance(found, Checkpoint)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 512 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_names_path_and_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"step-00000007.pt could not be written \(File too large\): needs 800 "):
        save(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found_before_the_training(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", OWNER, 3)
    folder.check()
    assert not list((tmp_path / "checkpoints").iterdir())
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(TrainerError, match=r"could not be written .* set paths.runs"):
        folder.check()


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    broken = checkpoint(7)
    broken.model["weight"][3] = float("nan")
    folder = CheckpointFolder(tmp_path, OWNER, 3)
    folder.save(broken)
    with pytest.raises(TrainerError, match="weight is not finite after step 7, which is therefore not saved"):
        folder.wait()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_processor_with_other_instructions_is_taken_up_with_a_warning(tmp_path: Path) -> None:
    then = [NodeHardware(device="cpu", cpu="Xeon 8480", cpu_capability="AVX512")] * 2
    now = [then[0], replace(then[1], cpu="EPYC 7302", cpu_capability="AVX2")]
    checkpoints = CheckpointFolder(tmp_path, OWNER, 3, then)
    checkpoints.save(checkpoint(1))
    checkpoints.wait()
    assert len(list(CheckpointFolder(tmp_path, OWNER, 3, then).newest_good())) == 1
    warning, found = CheckpointFolder(tmp_path, OWNER, 3, now).newest_good()
    assert warning == (
        "checkpoint step-00000001.pt was computed on node 1 by Xeon 8480 with AVX512, now it is EPYC 7302 with AVX2: "
        "the weights may not be bit-identical to an undisturbed run"
    )
    assert isinstance(found, Checkpoint)
