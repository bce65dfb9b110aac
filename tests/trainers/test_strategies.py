"""Which strategy is taken, how FSDP divides a network, and what is refused."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.tiny_runs import config
from trainers.core.config import ConfigError, ModelConfig, TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.options import parse
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.models import ImageShape, build
from trainers.strategies import build as build_strategy

pytestmark = pytest.mark.slow

PAIR = RankContext(ranks=Ranks(world_size=2, local_world_size=2), device=torch.device("cpu"), backend="gloo")


def configured(**overrides: object) -> TrainConfig:
    return parse(config({key.replace("__", "."): value for key, value in overrides.items()}))


def test_bf16_on_the_wire_needs_nccl() -> None:
    with pytest.raises(ConfigError, match=r"compression=bf16 needs .*nccl.*backend=gloo.*fp16"):
        configured(strategy={"name": "ddp", "backend": "gloo", "compression": "bf16"})
    settings = configured(strategy={"name": "ddp", "compression": "bf16"})
    with pytest.raises(TrainerError, match="compression=bf16 needs the backend nccl, and this run has gloo"):
        build_strategy(settings, torch.nn.Linear(2, 2), PAIR, "fp32")


def test_compression_is_no_setting_of_fsdp() -> None:
    with pytest.raises(ConfigError, match=r"compression is not a field of strategy=fsdp; it has: backend, name"):
        configured(strategy={"name": "fsdp", "compression": "fp16"})


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    said = r"fsdp updates slices .* optimizer=airbench_muon can't; choose optimizer=sgd, optimizer=adam, "
    with pytest.raises(ConfigError, match=said):
        configured(strategy={"name": "fsdp"}, optimizer={"name": "airbench_muon"})


def test_a_network_is_divided_into_parts_of_a_few_megabytes() -> None:
    from trainers.strategies import fsdp  # here: its imports take two seconds

    image = ImageShape(channels=3, height=32, width=32, num_classes=10)
    network = build(ModelConfig(name="resnet50"), image)
    names = {module: name for name, module in network.named_modules()}
    found = {names[part]: sum(item.nbytes for item in part.parameters()) >> 20 for part in fsdp.parts(network)}
    assert {"layer2", "layer3.0", "layer4.1"} <= found.keys()
    assert "layer3" not in found  # 27 MiB
    assert not any(name.startswith("layer2.") for name in found)
    assert all(1 <= size <= 25 for size in found.values())
