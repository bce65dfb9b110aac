"""Which strategy is taken, how FSDP divides a network, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import MakeRun, config
from trainers.checkpoint import sealed
from trainers.core.config import ConfigError, ModelConfig, TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.options import parse
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.models import ImageShape, build
from trainers.optimizers.adam import AdamConfig
from trainers.optimizers.sgd import SGDConfig
from trainers.strategies import build as build_strategy
from trainers.strategies.auto import choose, optimizer_bytes
from trainers.training.session import run

pytestmark = pytest.mark.slow

GIB = 1 << 30
PAIR = RankContext(ranks=Ranks(world_size=2, local_world_size=2), device=torch.device("cpu"), backend="gloo")


def configured(**overrides: object) -> TrainConfig:
    return parse(config({key.replace("__", "."): value for key, value in overrides.items()}))


@pytest.mark.parametrize(
    ("parameter_bytes", "world_size", "wanted", "why"),
    [
        (GIB, 2, "ddp", "take 4.0 GiB, which is at most half of a rank's 8.0 GiB of memory"),
        (GIB + GIB // 2, 3, "fsdp", "take 6.0 GiB, more than half of a rank's 8.0 GiB of memory; in 3 slices 2.0 GiB"),
        (9 * GIB, 1, "ddp", "there is one rank"),
    ],
)
def test_auto_follows_from_the_state_and_the_memory(
    parameter_bytes: int, world_size: int, wanted: str, why: str
) -> None:
    state_bytes = 2 * parameter_bytes  # Adam's
    name, reason = choose(parameter_bytes, state_bytes, device_bytes=8 * GIB, world_size=world_size)
    assert name == wanted
    assert why in reason


def test_the_optimizers_state_is_counted_without_making_it() -> None:
    weights = [torch.nn.Parameter(torch.zeros(10, 10)), torch.nn.Parameter(torch.zeros(5))]
    assert optimizer_bytes(SGDConfig(), weights) == 4 * 105
    assert optimizer_bytes(AdamConfig(), weights) == 2 * 4 * 105 + 2 * 4


def test_auto_says_what_it_took_and_why(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(strategy={"name": "auto"}, trainer__max_steps=1)
    run(run_dir / "config.json")
    lines = capsys.readouterr().out.splitlines()
    what = "strategy ddp: every rank has the whole model"
    assert lines[2] == f"{what} (strategy=auto: there is one rank, and nothing to share)"


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
    from trainers.strategies import fsdp  # here: its imports take two seconds

    said = r"fsdp updates slices .* optimizer=airbench_muon can't; choose optimizer=sgd, optimizer=adam, "
    with pytest.raises(ConfigError, match=said):
        configured(strategy={"name": "fsdp"}, optimizer={"name": "airbench_muon"})
    chosen_by_auto = configured(strategy={"name": "auto"}, optimizer={"name": "airbench_muon"})
    with pytest.raises(ConfigError, match=said):
        fsdp.build(chosen_by_auto, torch.nn.Linear(2, 2), PAIR, "fp32")


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


def test_a_checkpoint_of_the_other_strategy_is_refused_under_auto(make_run: MakeRun, tmp_path: Path) -> None:
    run_dir = make_run(strategy={"name": "auto"}, trainer__max_steps=2)
    run(run_dir / "config.json")
    side = run_dir / "checkpoints" / "step-00000002.json"
    side.write_text(json.dumps(sealed({**json.loads(side.read_text()), "strategy": "fsdp"})))
    with pytest.raises(TrainerError, match=r"was written with fsdp, and strategy=auto takes ddp .*start afresh"):
        run(run_dir / "config.json")
