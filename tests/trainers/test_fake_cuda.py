"""Models and optimizers on the device cuda without a GPU, under torch's FakeTensorMode: shapes and devices, no values.

An operation on tensors of two devices is an error there, and so is one that would wait for the device (``.item()``).

The backward pass is missing: for tensors on cuda autograd asks the driver for the device's context, which there is
none of ("hasPrimaryContext expects a valid device index"). Gradients are zeros instead. Autocast switches itself off
without a GPU, so all of this is in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.trainers.tiny_runs import write_pack
from trainers import models, optimizers
from trainers.core import config, options
from trainers.core.config import DatasetConfig
from trainers.data.augment import Normaliser, normaliser, plan_epoch, training_batch
from trainers.data.pack import MappedPack, open_pack
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training.evaluation import Evaluator

CUDA = torch.device("cuda", 0)
NODE = RankContext(ranks=Ranks(), device=CUDA, backend="nccl")
EVERYTHING = DatasetConfig(
    name="arrays", crop_padding=2, crop_border="reflect", flip=True, alternate_flip=True, cutout=3
)
pytestmark = pytest.mark.filterwarnings("ignore:CUDA is not available")


def names(group: str) -> list[str]:
    found = config.GROUPS[group]
    known = config.option_names(Path(options.__file__).parents[1] / found.package.rpartition(".")[2], found.base)
    return [name for name in known if name != config.OWN]  # what that is only a person knows


LARGE = ("resnet50", "torchvision")  # the same layers as others, many more of them
MODELS = [pytest.param(name, marks=pytest.mark.long if name in LARGE else ()) for name in names("model")]


@pytest.fixture(scope="module")
def fused_kernels() -> Iterator[None]:
    """torch has no fake form of these two kernels, which change their arguments and return nothing."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        library.impl(name, lambda *_, **__: None)
    yield
    library._destroy()


@pytest.fixture
def pack(tmp_path: Path, fused_kernels: None) -> Iterator[MappedPack]:
    """A pack whose tensors pretend to lie on a GPU; until the test ends, all tensors are fake."""
    made = open_pack(write_pack(tmp_path))
    images, labels = made.images.shape, made.labels.shape
    with FakeTensorMode():
        yield replace(
            made,
            images=torch.zeros(images, dtype=torch.uint8, device=CUDA),
            labels=torch.zeros(labels, dtype=torch.int64, device=CUDA),
        )


def network(name: str, pack: MappedPack) -> nn.Module:
    shape = models.ImageShape(channels=1, height=8, width=8, num_classes=pack.manifest.num_classes)
    with CUDA:
        return models.build(options.settings("model", name)(), shape)


def scale(pack: MappedPack) -> Normaliser:
    return normaliser(pack.manifest, normalise=True, device=CUDA)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_and_evaluates_on_its_own_device_and_never_waits_for_it(
    name: str, pack: MappedPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    model = network(name, pack).train()
    plan = plan_epoch(EVERYTHING, pack, seed=0, epoch=1)
    images, labels = training_batch(pack, plan.batch(0, 6), EVERYTHING, scale(pack))
    if isinstance(model, models.Calibrated):
        model.calibrate(images)
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels)
    assert (logits.device, logits.shape, loss.device) == (CUDA, (6, 3), CUDA)
    shown = Evaluator(
        model=model, pack=pack, context=NODE, normalise=scale(pack), precision="fp32", batch_size=6, tta="multicrop"
    )
    totals, chosen = shown.count_up("test")
    assert (totals.device, chosen.device, chosen.shape) == (CUDA, CUDA, (17,))


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize("name", ["small_cnn", "whitened_cnn"])  # they have every kind of parameter
def test_every_optimizer_updates_a_model_and_never_waits_for_the_device(name: str, pack: MappedPack) -> None:
    parameters = [item for item in network(name, pack).parameters() if item.requires_grad]
    shapes = {item.shape for item in parameters if item.dim() > 1}
    for optimizer in names("optimizer"):
        made = optimizers.build(options.settings("optimizer", optimizer)(), parameters)
        for item in parameters:
            item.grad = torch.zeros_like(item)
        made.step(0.1)
        kept = [item for items in made.state().values() for item in items if item.shape in shapes]
        assert kept, optimizer
        assert {item.device for item in kept} == {CUDA}, optimizer


def test_a_mix_of_devices_and_a_wait_for_the_device_are_noticed(pack: MappedPack) -> None:
    with pytest.raises(RuntimeError, match=r"cuda.*cpu|cpu.*cuda"):
        pack.images[:2].float() + torch.zeros(2, 1, 8, 8)
    with pytest.raises(DataDependentOutputException):
        pack.labels.sum().item()
