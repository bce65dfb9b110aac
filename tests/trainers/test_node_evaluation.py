from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trainers.tiny_runs import write_pack
from trainers.data.augment import normaliser
from trainers.data.pack import open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training.evaluation import Evaluator, shard, views


@pytest.mark.parametrize(("size", "world_size"), [(10, 1), (10, 3), (2, 5), (0, 2), (7, 7)])
def test_shards_hold_every_sample_exactly_once(size: int, world_size: int) -> None:
    parts = [shard(5, 5 + size, rank, world_size) for rank in range(world_size)]
    assert [index for start, stop in parts for index in range(start, stop)] == list(range(5, 5 + size))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


def test_loss_and_accuracy_are_those_of_the_whole_split_at_once(tmp_path: Path) -> None:
    pack = open_pack(write_pack(tmp_path / "data", test=601))  # more than two evaluation batches
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    context = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    scale = normaliser(pack.manifest, normalise=True, device=context.device)
    result = Evaluator(
        model=model, pack=pack, context=context, normalise=scale, precision="fp32", batch_size=8
    ).evaluate("test")
    start, stop = pack.manifest.splits["test"]
    logits = model((pack.images[start:stop] / 255 - 0.3) / 0.3)
    labels = pack.labels[start:stop]
    assert result.count == 601
    assert result.predictions == logits.argmax(1).tolist()
    assert result.accuracy == (logits.argmax(1) == labels).sum().item() / 601
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


@pytest.mark.parametrize(("tta", "count"), [("none", 1), ("mirror", 2), ("multicrop", 6)])
def test_views_have_the_size_of_the_image_and_weights_that_add_up_to_one(tta: str, count: int) -> None:
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).view(2, 3, 4, 5)
    found = list(views(images, tta))
    assert len(found) == count
    assert sum(weight for weight, _ in found) == 1
    assert all(view.shape == images.shape for _, view in found)
    assert len({bytes(view.flatten().tolist()) for _, view in found}) == count
    assert torch.equal(found[0][1], images)


def test_an_image_and_its_mirror_image_are_judged_alike(tmp_path: Path) -> None:
    folder = write_pack(tmp_path / "data", test=20)
    pack = open_pack(folder)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    context = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")
    scale = normaliser(pack.manifest, normalise=True, device=context.device)
    results = []
    for images in (pack.images, pack.images.flip(3)):
        shown = replace(pack, images=images)
        results.append(
            Evaluator(
                model=model, pack=shown, context=context, normalise=scale, precision="fp32", batch_size=8, tta="mirror"
            ).evaluate("test")
        )
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].predictions == results[1].predictions
