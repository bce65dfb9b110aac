from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import MakeRun, write_pack
from trainers.core.config import ConfigError, DatasetConfig, TrainerConfig
from trainers.core.errors import TrainerError
from trainers.core.options import load
from trainers.data.augment import augmented, bordered, cut_out, plan_epoch
from trainers.data.pack import Gatherer, MappedPack, open_pack
from trainers.data.randomness import below, epoch_order, key, random_bits
from trainers.data.step_plan import plan_steps
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training import session
from trainers.training.loop import Trainer

DATASET = DatasetConfig(name="arrays", crop_padding=2, flip=True)


@pytest.fixture
def pack(tmp_path: Path) -> MappedPack:
    return open_pack(write_pack(tmp_path / "data"))


def global_batches(pack: MappedPack, world_size: int, accumulate: int = 1) -> list[list[int]]:
    """Sample ids of each global batch of two epochs, put together from what each rank takes."""
    config = TrainerConfig(epochs=2, global_batch_size=8, accumulate_steps=accumulate)
    steps = plan_steps(config, pack.manifest, world_size)
    batches = []
    for step in range(steps.total):
        epoch, position = steps.place(step)
        plan = plan_epoch(DATASET, pack, seed=3, epoch=epoch)
        ranks = [plan.batch(steps.first_sample(position, rank), steps.rank_batch_size) for rank in range(world_size)]
        batches.append([int(sample) for part in ranks for sample in part.index])
    return batches


def test_global_batches_are_the_same_on_one_two_and_four_ranks(pack: MappedPack) -> None:
    alone = global_batches(pack, 1)
    assert len(alone) == 14  # 60 images give 7 batches of 8 an epoch; 4 images are left out
    assert global_batches(pack, 2) == alone
    assert global_batches(pack, 4) == alone
    assert global_batches(pack, 2, accumulate=2) == alone


def test_a_sample_is_augmented_alike_whichever_rank_has_it(pack: MappedPack) -> None:
    plan = plan_epoch(DATASET, pack, seed=3, epoch=1)
    whole = plan.batch(0, 8)
    halves = [plan.batch(0, 4), plan.batch(4, 4)]
    together = torch.cat([augmented(pack.images[half.index], half, DATASET) for half in halves])
    assert augmented(pack.images[whole.index], whole, DATASET).equal(together)


def test_a_crop_is_the_window_of_the_padded_image_and_a_flip_its_mirror(pack: MappedPack) -> None:
    plan = plan_epoch(DATASET, pack, seed=3, epoch=0).batch(0, 20)
    images = pack.images[plan.index]
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    assert plan.top is not None
    assert plan.left is not None
    assert plan.mirrored is not None
    assert set(plan.mirrored.tolist()) == {True, False}
    for number, image in enumerate(augmented(images, plan, DATASET)):
        top, left = int(plan.top[number]), int(plan.left[number])
        window = padded[number, :, top : top + 8, left : left + 8]
        assert image.equal(window.flip(2) if plan.mirrored[number] else window)


def test_a_remainder_names_the_nearest_good_batch_sizes(pack: MappedPack) -> None:
    with pytest.raises(TrainerError, match=r"global_batch_size=10 does not divide among 4 .* values: 8, 12$"):
        plan_steps(TrainerConfig(global_batch_size=10), pack.manifest, 4)
    with pytest.raises(TrainerError, match=r"nearest good values: 4$"):
        plan_steps(TrainerConfig(global_batch_size=3), pack.manifest, 4)


def test_with_accumulation_a_remainder_names_sizes_that_fit_it(pack: MappedPack) -> None:
    config = TrainerConfig(global_batch_size=10, accumulate_steps=3)
    with pytest.raises(TrainerError, match=r"among 2 ranks × 3 micro-batches .*; nearest good values: 6, 12$"):
        plan_steps(config, pack.manifest, 2)
    steps = plan_steps(TrainerConfig(global_batch_size=12, accumulate_steps=3), pack.manifest, 2)
    assert (steps.rank_batch_size, steps.micro_batch_size, steps.parts) == (6, 2, 2)


def test_a_train_split_smaller_than_one_batch_is_refused(pack: MappedPack) -> None:
    with pytest.raises(TrainerError, match=r"stripes has 60 images, fewer than one .* of 64; .* at most 56$"):
        plan_steps(TrainerConfig(global_batch_size=64), pack.manifest, 8)


def test_max_steps_ends_a_run_in_the_middle_of_an_epoch(pack: MappedPack) -> None:
    config = TrainerConfig(epochs=2, global_batch_size=8, max_steps=9)
    assert plan_steps(config, pack.manifest, 1).total == 9


def mirrored(pack: MappedPack, epoch: int, order: str) -> dict[int, bool]:
    config = DatasetConfig(name="arrays", flip=True, alternate_flip=order == "alternating")
    plan = plan_epoch(config, pack, seed=3, epoch=epoch)
    assert plan.mirrored is not None
    return dict(zip(plan.index.tolist(), plan.mirrored.tolist(), strict=True))


def test_an_alternating_flip_turns_every_sample_round_in_each_epoch(pack: MappedPack) -> None:
    first, second, third = (mirrored(pack, epoch, "alternating") for epoch in range(3))
    assert 15 < sum(first.values()) < 45
    assert second == {sample: not turned for sample, turned in first.items()}
    assert third == first
    assert mirrored(pack, 1, "random") not in (first, second)


def test_a_reflected_border_is_that_of_torch(pack: MappedPack) -> None:
    images = pack.images[:5]
    wanted = torch.nn.functional.pad(images.float(), (3, 3, 3, 3), mode="reflect")
    assert torch.equal(bordered(images, 3, "reflect").float(), wanted)


def test_a_crop_reflects_no_more_than_there_is(pack: MappedPack) -> None:
    config = DatasetConfig(name="arrays", crop_padding=8, crop_border="reflect")
    with pytest.raises(TrainerError, match=r"crop_padding=8 reflects more than the 8×8 images have"):
        plan_epoch(config, pack, seed=0, epoch=0)


def test_cutout_sets_a_square_to_the_mean_wherever_its_middle_lies(pack: MappedPack) -> None:
    config = DatasetConfig(name="arrays", cutout=3)
    plan = plan_epoch(config, pack, seed=3, epoch=0)
    assert plan.hole_y is not None
    assert plan.hole_x is not None
    found = cut_out(torch.ones(60, 2, 8, 8), plan, 3)
    for number, (y, x) in enumerate(zip(plan.hole_y.tolist(), plan.hole_x.tolist(), strict=True)):
        wanted = torch.ones(2, 8, 8)
        wanted[:, max(0, y - 1) : y + 2, max(0, x - 1) : x + 2] = 0
        assert torch.equal(found[number], wanted)
    assert len({*zip(plan.hole_y.tolist(), plan.hole_x.tolist(), strict=True)}) > 30
    assert set(plan.hole_y.tolist()) == set(range(8))


def test_cuda_graphs_and_micro_batches_are_refused_together() -> None:
    settings = {"accumulate_steps": 2, "compile_mode": "reduce-overhead"}
    TrainerConfig(**settings)  # type: ignore[arg-type]  # without compile nothing is replayed
    with pytest.raises(ConfigError, match=r"reduce-overhead can't go with trainer.accumulate_steps=2: .*=default, or"):
        TrainerConfig(**settings, compile=True)  # type: ignore[arg-type]


def test_a_training_with_a_gatherer_sees_what_one_with_resident_data_sees(make_run: MakeRun) -> None:
    resident, mapped = (trained(make_run(name), gathered=name == "mapped") for name in ("resident", "mapped"))
    assert all(map(torch.equal, resident, mapped))


def trained(run_dir: Path, *, gathered: bool) -> list[torch.Tensor]:
    """The weights after a training without its evaluation."""
    pack, context = open_pack(run_dir / "data"), RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    if gathered:
        pack = replace(pack, row_reader=Gatherer(pack.images, pack.labels, context.device))
    trainer = Trainer(load(run_dir / "config.json"), pack, context, run_dir)
    trainer.prepare()
    trainer.train()
    trainer.close()
    return [item.detach() for item in trainer.model.parameters()]


@pytest.mark.parametrize(
    ("splits", "batch", "said"),
    [
        ({"train": (0, 160), "val": (160, 160), "test": (160, 200)}, 128,
         "\n32 of the 160 train images are left out of each epoch: they fill no batch of 128 (others each time; a "
         "smaller trainer.global_batch_size leaves out fewer)"
         "\nno val images, so no val accuracy: dataset.val_size=N takes N of the training images"),
        ({"train": (0, 1257), "val": (1257, 1437), "test": (1437, 1797)}, 64, ""),
    ],
)  # fmt: skip
def test_images_that_an_epoch_leaves_out_and_an_empty_val_split_are_said(
    pack: MappedPack, splits: dict[str, tuple[int, int]], batch: int, said: str
) -> None:
    manifest = pack.manifest._replace(splits=splits)
    assert session._unused(plan_steps(TrainerConfig(global_batch_size=batch), manifest, 1), manifest) == said


def test_the_mixing_function_gives_the_published_splitmix64_numbers() -> None:
    first = random_bits(0, torch.tensor([1, 2, 3]))
    assert [value & (2**64 - 1) for value in first.tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_the_order_of_an_epoch_never_changes_between_versions() -> None:
    assert epoch_order(0, 0, 8).tolist() == [3, 0, 1, 5, 2, 7, 4, 6]
    assert epoch_order(7, 3, 8).tolist() == [2, 5, 6, 0, 4, 3, 1, 7]


def test_every_epoch_visits_every_sample_once_in_an_order_of_its_own() -> None:
    first, second = epoch_order(0, 0, 1000), epoch_order(0, 1, 1000)
    assert first.sort().values.equal(torch.arange(1000))
    assert not first.equal(second)


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    assert len({key(1, 2), key(2, 1), key(1, 2, 0), key(1, 3), key(0, 2)}) == 5


def test_numbers_below_a_limit_are_spread_evenly() -> None:
    bits = random_bits(key(5), torch.arange(90_000))
    for shift in (0, 24, 40):
        counts = below(bits, shift, 9).bincount(minlength=9)
        assert counts.numel() == 9
        assert (counts - 10_000).abs().max() < 500  # five standard deviations
