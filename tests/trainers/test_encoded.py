"""Packs that keep image files: made by the controller half, read by the node half."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.data.datasets.folder import FolderConfig
from pipeline.data.manifest import Pack
from pipeline.data.store import fetch
from tests.trainers.ranks import call_on_ranks
from tests.trainers.tiny_runs import config, read_summary
from trainers.core.config import DatasetConfig
from trainers.core.errors import TrainerError
from trainers.core.options import load
from trainers.data.augment import plan_epoch
from trainers.data.pack import MappedPack, RowRequest, open_pack, prepare_for
from trainers.data.step_plan import plan_steps
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.exporting import export
from trainers.training.loop import Trainer

CPU = torch.device("cpu")
CROPPED = DatasetConfig(name="folder", random_resized_crop=0.2, flip=True)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pack]:
    """The same photos of different sizes as pixels and as files."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number, name in enumerate(("cat", "dog", "fox")):
        (root / name).mkdir()
        for index in range(20):
            size = (11 + index % 3, 14 - index % 4, 3)
            image = random.integers(0, 120, size, dtype=np.uint8)
            image[:, :, number] += 130
            Image.fromarray(image).save(root / name / f"{index}.{'jpg' if index % 2 else 'png'}", quality=95)
    wanted = FolderConfig(source=str(root), image_size=8, holdout=12, val_size=6)
    limits = {"pixels": 8.0, "files": 0.0}
    return {kind: fetch(replace(wanted, decoded_limit=limit), root / ".data") for kind, limit in limits.items()}


def opened(pack: Pack, smallest_crop: float = 0.0) -> MappedPack:
    return prepare_for(open_pack(pack.path), CPU, smallest_crop)


def run_folder(folder: Path, pack: Pack, **overrides: Any) -> Path:
    shutil.copytree(pack.path, folder / "data")
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    (folder / "config.json").write_text(json.dumps(config(dotted)))
    return folder


def test_files_decode_to_the_pixels_of_a_decoded_pack(packs: dict[str, Pack]) -> None:
    pixels_, files = opened(packs["pixels"]), opened(packs["files"])
    assert packs["files"].manifest.files is not None
    assert packs["files"].manifest.mean == packs["pixels"].manifest.mean
    images, labels = files.rows(torch.arange(60), CPU)
    assert images.equal(pixels_.images)
    assert labels.equal(pixels_.labels)


def test_a_computer_that_names_no_cores_reads_files_too(
    packs: dict[str, Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS: it was an AttributeError."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert opened(packs["files"]).labels.numel() > 0


def trained(run_dir: Path) -> list[torch.Tensor]:
    settings = load(run_dir / "config.json")
    pack = prepare_for(open_pack(run_dir / "data"), CPU, settings.dataset.random_resized_crop)
    context = RankContext(ranks=Ranks(), device=CPU, backend="gloo")
    trainer = Trainer(settings, pack, context, run_dir)
    trainer.prepare()
    trainer.train()
    trainer.test()
    trainer.close()
    return [item.detach() for item in trainer.model.parameters()]


def test_a_training_from_files_has_the_weights_of_one_from_pixels(packs: dict[str, Pack], tmp_path: Path) -> None:
    pixels_, files = (trained(run_folder(tmp_path / kind, packs[kind])) for kind in ("pixels", "files"))
    assert all(map(torch.equal, pixels_, files))


def global_batch(pack: MappedPack, world_size: int) -> torch.Tensor:
    """The images of the second step, put together from what each rank decodes."""
    from trainers.core.config import TrainerConfig

    steps = plan_steps(TrainerConfig(global_batch_size=12), pack.manifest, world_size)
    plan = plan_epoch(CROPPED, pack, seed=3, epoch=1)
    parts = [plan.batch(steps.first_sample(1, rank), steps.rank_batch_size) for rank in range(world_size)]
    assert pack.row_reader is not None
    return torch.cat([pack.row_reader.take(part.row_request)[0] for part in parts])


def test_a_random_resized_crop_is_the_same_on_any_number_of_ranks_and_another_in_each_epoch(
    packs: dict[str, Pack],
) -> None:
    pack = opened(packs["files"], 0.2)
    alone = global_batch(pack, 1)
    assert alone.equal(global_batch(pack, 2))
    assert alone.equal(global_batch(pack, 4))
    plan = plan_epoch(CROPPED, pack, seed=3, epoch=1).batch(12, 12)
    assert not alone.equal(pack.rows(plan.index, CPU)[0])
    crops = [plan_epoch(CROPPED, pack, seed=3, epoch=epoch).crops for epoch in range(2)]
    assert crops[0] is not None
    assert not torch.equal(crops[0], crops[1])  # type: ignore[arg-type]


def test_files_read_ahead_are_those_of_the_plan_and_others_don_t_disturb_them(packs: dict[str, Pack]) -> None:
    pack = opened(packs["files"])
    assert pack.row_reader is not None
    order = torch.randperm(42, generator=torch.Generator().manual_seed(0))
    batches = [RowRequest(part) for part in order.split(5)]
    pack.row_reader.expect(batches)
    whole = opened(packs["pixels"]).images
    for wanted in [RowRequest(torch.arange(3)), *batches, batches[0]]:
        assert pack.row_reader.take(wanted)[0].equal(whole[wanted.samples])
    pack.row_reader.close()


def test_pixels_can_t_be_cropped_as_files_are(packs: dict[str, Pack]) -> None:
    with pytest.raises(TrainerError, match=r"resized_crop=0.2 is cut from the files, .* dataset.decoded_limit=0"):
        opened(packs["pixels"], 0.2)


def test_an_image_that_breaks_later_is_named_with_its_number(packs: dict[str, Pack], tmp_path: Path) -> None:
    folder = shutil.copytree(packs["files"].path, tmp_path / "pack")
    places = np.fromfile(folder / "places.bin", dtype="<i8").reshape(-1, 2)
    with (folder / "images.bin").open("r+b") as file:
        file.seek(places[7][0])
        file.write(bytes(20))
    pack = prepare_for(open_pack(folder), CPU)
    name = json.loads((folder / "names.json").read_text())[7]
    with pytest.raises(TrainerError, match=rf"image 7 \({name}\): its [\d,]+ bytes are no JPEG"):
        pack.rows(torch.arange(10), CPU)


def test_without_pillow_the_command_that_installs_it_is_told(
    packs: dict[str, Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trainers.data.encoded", "trainers.data.image_files"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TrainerError, match=r"PIL isn't installed here to decode them; install it: .*install.* pillow"):
        opened(packs["files"])


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_one_and_two_ranks_train_from_files_to_the_same_weights(packs: dict[str, Pack], tmp_path: Path) -> None:
    settings = {"dataset__random_resized_crop": 0.3, "trainer__epochs": 2, "trainer__shards": 2}
    alone, two = (run_folder(tmp_path / name, packs["files"], **settings) for name in ("alone", "two"))
    weights = []
    for run_dir, ranks in ((alone, 1), (two, 2)):
        call_on_ranks("tests.trainers.test_pruned:train_on_this_rank", run_dir, nproc=ranks)
        weights.append(read_summary(run_dir)["weights_sha256"])
    assert weights[0] == weights[1]
    export(alone, tmp_path / "network.pt2")  # what doit predict computes with: raises if its classes are others
    assert (tmp_path / "network.pt2").is_file()
