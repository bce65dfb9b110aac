"""Equal weights on any number of ranks (trainer.shards): the order of sums, and real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.trainers import other_model
from tests.trainers.ranks import call_on_ranks, next_port
from tests.trainers.test_resume import DiedError
from tests.trainers.tiny_runs import MakeRun, config, metrics_lines, read_summary
from trainers.core.config import ConfigError, TrainerConfig
from trainers.core.options import parse
from trainers.data.augment import EpochPlan
from trainers.distributed.rank_state import pairwise_sum
from trainers.strategies.sums import EarlierParts
from trainers.training.loop import Trainer
from trainers.training.session import run


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_lists_added_one_by_one_on_any_number_of_ranks_give_the_bits_of_one_tree(ranks: int) -> None:
    rows = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    wanted = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + ((rows[4] + rows[5]) + (rows[6] + rows[7]))
    assert not wanted.equal(sum(rows[1:], rows[0]))  # the order does decide
    sums = []
    for own in rows.clone().chunk(ranks):
        weight = torch.zeros(1000)
        earlier = EarlierParts({"weight": weight})
        for row in own[:-1]:
            weight.grad = row
            earlier.take()
        last = own[-1].clone()
        earlier.add_to([last], [weight])
        sums.append(last)
    assert pairwise_sum(torch.stack(sums)).equal(wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trainer.shards": 6}, r"trainer.shards=6 must be 0 \(off\) or a power of two"),
        ({"trainer.shards": -1}, r"trainer.shards=-1 must be 0"),
        ({"strategy": {"name": "fsdp"}}, "strategy=fsdp makes them depend on it; take strategy=ddp, or trainer.shards"),
        ({"strategy.compression": "fp16"}, "take strategy.compression=none, or trainer.shards=0"),
        ({"trainer.compile": True}, "take trainer.compile=false"),
        ({"trainer.deterministic": False}, "take trainer.deterministic=true"),
        ({"optimizer.lr_scaling": "linear"}, "take optimizer.lr_scaling=none"),
    ],
)
def test_what_would_make_the_weights_depend_on_the_ranks_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(config({"trainer.shards": 4, **settings}))


def test_ranks_that_cannot_take_equal_blocks_are_told_which_numbers_can() -> None:
    trainer = TrainerConfig(shards=4)
    for world_size in (1, 2, 4):
        trainer.check_ranks(world_size)
    for world_size in (3, 8):
        with pytest.raises(ConfigError, match=rf"shards=4 can't be shared evenly by {world_size} .*can: 1, 2, 4$"):
            trainer.check_ranks(world_size)


SETTINGS: dict[str, object] = {
    "model": {"name": "resnet18"},  # other_model, which has batch normalisation and dropout
    "trainer__shards": 8,
    "trainer__global_batch_size": 32,
    "trainer__log_every_steps": 4,
    "trainer__checkpoint_every_steps": 3,
}


EXTRAS = {"trainer__clip_norm": 0.2, "trainer__ema": 0.8, "trainer__class_weights": "balanced"}
SMALL_CNN = {"name": "small_cnn", "width": 4, "hidden": 16}  # its second convolution lies channels last in memory


def train(folder: Path) -> None:
    """Each run in ``folder``; one that has death.json and no checkpoint yet dies at the step that stands there."""
    other_model.stand_in("resnet18")
    torch.set_num_threads(1)
    for run_dir in sorted(folder.glob("run*")):
        if (run_dir / "summary.json").exists():
            continue
        if "TEST_PORTS" in os.environ:
            next_port()
        death = run_dir / "death.json"
        if not death.exists() or (run_dir / "checkpoints").exists():
            run(run_dir / "config.json")
            continue
        with patch.object(Trainer, "_one_step", dying_at(int(death.read_text()))), pytest.raises(DiedError):
            run(run_dir / "config.json")


def dying_at(step: int) -> Callable[[Trainer, EpochPlan, int], None]:
    one_step = Trainer._one_step

    def dying(self: Trainer, plan: EpochPlan, position: int) -> None:
        if self.step == step:
            raise DiedError
        one_step(self, plan, position)

    return dying


def on(nodes: int, ranks: int, folder: Path, groups: int) -> None:
    call_on_ranks("tests.trainers.test_shards:train", folder, nnodes=nodes, nproc=ranks, groups=groups)


def outcome(run_dir: Path) -> tuple[object, ...]:
    """All that the ranks must not change: weights, and the lines of metrics.jsonl but for the clock's."""
    lines = metrics_lines(run_dir)
    for line in lines:
        line["metrics"].pop("train/images_per_s", None)
    return read_summary(run_dir)["weights_sha256"], [(line["step"], line["metrics"]) for line in lines]


@pytest.mark.ci
@pytest.mark.long
def test_one_two_and_four_ranks_end_with_the_same_weights_and_metrics(make_run: MakeRun, tmp_path: Path) -> None:
    topologies = ((1, 1), (1, 2), (2, 1), (1, 4))
    for nodes, ranks in topologies:
        name, pack = f"{nodes}x{ranks}", {"train": 200}
        lower = {"trainer__precision": "bf16", "trainer__skip_nonfinite": True, "model": SMALL_CNN}
        make_run(f"{name}/run-bf16", pack=pack, **{**SETTINGS, **lower})
        make_run(f"{name}/run-fp32", pack=pack, **SETTINGS, trainer__accumulate_steps=2, **EXTRAS)
        on(nodes, ranks, tmp_path / name, 2)
    for kind in ("run-bf16", "run-fp32"):
        found = {f"{nodes}x{ranks}": outcome(tmp_path / f"{nodes}x{ranks}" / kind) for nodes, ranks in topologies}
        assert found == dict.fromkeys(found, found["1x1"])


def test_a_run_that_loses_a_host_or_gains_ranks_goes_on_as_if_nothing_had_been(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """Killed in the middle of an epoch on two hosts, two steps after a checkpoint and two after a logged loss."""
    for name in ("run-lost", "run-gained", "run-whole"):
        (make_run(name, pack={"train": 200}, **SETTINGS) / "death.json").write_text("11")
    (tmp_path / "run-whole" / "death.json").unlink()
    on(2, 1, tmp_path, 3)
    (tmp_path / "more").mkdir()
    gained = (tmp_path / "run-gained").rename(tmp_path / "more" / "run-gained")
    assert not (tmp_path / "run-lost" / "summary.json").exists()
    on(1, 1, tmp_path, 1)
    on(1, 4, tmp_path / "more", 1)
    for run_dir, ranks in ((tmp_path / "run-lost", 1), (gained, 4)):
        assert read_summary(run_dir)["world_size"] == ranks
        assert outcome(run_dir) == outcome(tmp_path / "run-whole")
