"""FSDP on two real ranks: the weights of ddp, exact when resumed, and checkpoints that others can read."""

from __future__ import annotations

import gc
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.trainers import other_model
from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.test_resume import DiedError
from tests.trainers.tiny_runs import MakeRun, read_summary
from trainers.core.options import load
from trainers.distributed.ranks import read_ranks
from trainers.models import ImageShape, build
from trainers.training import evaluation
from trainers.training.loop import Trainer
from trainers.training.session import run

IMAGE = ImageShape(channels=1, height=8, width=8, num_classes=3)


def own_folder(run_dir: Path) -> Path:
    """The run folder of this rank's node: node 1 has one of its own, as on hosts that share none."""
    node_rank = read_ranks().node_rank
    return run_dir if node_rank == 0 else run_dir.with_name(f"{run_dir.name} on node {node_rank}")


def train(run_dir: Path, *, until: int | None = None) -> None:
    """A training in this process; ``until``: it dies there."""
    next_port()
    if until is None:
        run(own_folder(run_dir) / "config.json")
        return
    original = Trainer._one_step

    def dying(self: Trainer, *arguments: object) -> object:
        if self.step == until:
            raise DiedError
        return original(self, *arguments)  # type: ignore[arg-type]

    with patch.object(Trainer, "_one_step", dying), pytest.raises(DiedError):
        run(own_folder(run_dir) / "config.json")
    gc.collect()  # else its process group may go in a callback on one of gloo's threads, which would join itself


def weights(run_dir: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(run_dir / "checkpoints" / "final.pt", weights_only=True)
    return found


def train_alike(folder: Path) -> None:
    from trainers.strategies import fsdp  # here: collecting the tests would take every worker two seconds more

    other_model.stand_in("resnet18")
    fsdp._SMALLEST_BYTES = 50  # convolutions and dense layers are parts of their own, as a large network's are
    for name in ("ddp", "fsdp", "again"):
        train(folder / name)
    for until in (4, 9):
        train(folder / "killed", until=until)
        if until == 9 and read_ranks().rank == 0:
            tear(folder / "killed" / "checkpoints" / "step-00000008.pt")
    train(folder / "killed")


def tear(newest: Path) -> None:
    """Alter the newest checkpoint: the one before is to be used."""
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(name, marks=pytest.mark.long) for name in ("adam", "torch"))]
)
def test_fsdp_trains_to_the_weights_of_ddp_and_resumes_to_the_bit(
    make_run: MakeRun, tmp_path: Path, optimizer: str
) -> None:
    network = {"name": "small_cnn", "width": 4, "dropout": 0.0} if optimizer != "sgd" else {"name": "resnet18"}
    settings = {
        "model": network,  # Adam makes much of the bias before a batch normalisation, whose gradient is mere noise
        "optimizer": {"name": optimizer, "lr": 0.01},
        "trainer__accumulate_steps": 2,
        "trainer__checkpoint_every_steps": 2,
        "trainer__checkpoint_every_epochs": 3,
        "trainer__keep_best": True,
        "trainer__clip_norm": 0.2,
        "trainer__ema": 0.5,
    }
    make_run("ddp", **settings)
    for name in ("fsdp", "again", "killed"):
        make_run(name, **settings, strategy={"name": "fsdp"})
    call_on_ranks("tests.trainers.test_sharding:train_alike", tmp_path, groups=6)
    found = {name: read_summary(tmp_path / name) for name in ("ddp", "fsdp", "again", "killed")}
    assert found["fsdp"]["strategy"] == "fsdp"
    assert found["again"]["weights_sha256"] == found["killed"]["weights_sha256"] == found["fsdp"]["weights_sha256"]
    ddp, fsdp = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    assert ddp.keys() == fsdp.keys()
    for name, value in ddp.items():
        torch.testing.assert_close(fsdp[name], value, rtol=1e-3, atol=1e-4, msg=partial("{}: {}".format, name))
    names = [sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) for name in ("ddp", "fsdp")]
    assert names[0] == names[1], "checkpoints are whole"
    assert (tmp_path / "fsdp" / "checkpoints" / "best.pt").exists()
    if optimizer != "sgd":
        build(load(tmp_path / "fsdp" / "config.json").model, IMAGE).load_state_dict(fsdp)


def train_apart(folder: Path) -> None:
    other_model.stand_in("resnet18")
    with patch.dict(evaluation._SMALLEST_BATCH, cpu=4):  # 3 batches of one rank, 2 of the other
        train(folder / "whole")
        train(folder / "apart", until=9)
        if read_ranks().rank == 0:
            shutil.copytree(folder / "apart", folder / "alone")
        train(folder / "apart")


def train_alone(folder: Path) -> None:
    other_model.stand_in("resnet18")
    train(folder / "alone")


def test_checkpoints_lie_on_the_first_host_alone_and_fit_other_world_sizes(make_run: MakeRun, tmp_path: Path) -> None:
    settings = {
        "model": {"name": "resnet18"},
        "trainer__precision": "bf16",
        "trainer__skip_nonfinite": True,
        "trainer__checkpoint_every_steps": 2,
        "strategy": {"name": "fsdp"},
    }
    for name in ("whole", "whole on node 1", "apart", "apart on node 1"):
        make_run(name, **settings)
    call_on_ranks("tests.trainers.test_sharding:train_apart", tmp_path, nnodes=2, nproc=1, groups=3)
    whole, apart = read_summary(tmp_path / "whole"), read_summary(tmp_path / "apart")
    assert apart["weights_sha256"] == whole["weights_sha256"]
    assert list((tmp_path / "apart on node 1").glob("checkpoints/*")) == []
    call_on_ranks("tests.trainers.test_sharding:train_alone", tmp_path, nproc=1)
    alone = read_summary(tmp_path / "alone")
    assert (alone["world_size"], alone["steps"], alone["strategy"]) == (1, 15, "fsdp")
