"""init.weights on the hosts: published files as they come, a head of other classes, and what doesn't fit."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainers.tiny_runs import MakeRun, config, read_summary
from trainers.core.config import ConfigError
from trainers.core.errors import TrainerError
from trainers.core.options import load, parse
from trainers.models import ImageShape, build
from trainers.training.initial_weights import Initial, fit, read, unwrapped
from trainers.training.session import run

SAID = "init.weights=w.pt"


def network(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, classes))


def fitted(target: nn.Module, weights: dict[str, Tensor], classes: int = 3) -> Initial:
    return fit(target, weights, [], "0" * 64, num_classes=classes, setting=SAID)


@pytest.mark.parametrize(
    ("wrap", "notes"),
    [
        (lambda state: state, []),
        (lambda state: {"epoch": 3, "state_dict": state}, ["from its 'state_dict'"]),
        (lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
         ["from its 'model'", "without the prefix 'module.'"]),
        (lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
         ["without the prefix 'module.'", "without the prefix '_orig_mod.'"]),
    ],
)  # fmt: skip
def test_files_are_read_as_they_are_published(wrap: Any, notes: list[str], tmp_path: Path) -> None:
    state = network().state_dict()
    torch.save(wrap(state), tmp_path / "w.pt")
    weights, told, sha256 = read(tmp_path / "w.pt", SAID, None)
    assert (weights.keys(), told) == (state.keys(), notes)
    assert sha256 == hashlib.sha256((tmp_path / "w.pt").read_bytes()).hexdigest()


def test_nothing_but_tensors_is_read(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "w.pt")
    with pytest.raises(
        TrainerError, match=r"init.weights=w.pt is no file of weights alone.*torch.save\(network.state_di"
    ) as error:
        read(tmp_path / "w.pt", SAID, None)
    assert "\x1b" not in str(error.value)
    with pytest.raises(TrainerError, match=r"holds no state dict \(names with tensors\) but list"):
        unwrapped([1], SAID)
    with pytest.raises(TrainerError, match=r"w.pt, the weights of init.weights=w.pt, was altered: sha256"):
        read(tmp_path / "w.pt", SAID, "f" * 64)


def test_a_head_of_other_classes_stays_fresh_and_is_named() -> None:
    source, target = network(5), network(3)
    before = target[3].weight.clone()  # type: ignore[index]
    found = fitted(target, source.state_dict())
    assert torch.equal(target[0].weight, source[0].weight)  # type: ignore[index]
    assert torch.equal(target[3].weight, before)  # type: ignore[index]
    assert found.line() == (
        "initial weights: 7 tensors of init.weights=w.pt; 3.weight, 3.bias fresh, as the file has other classes"
    )


def test_counters_may_lack_and_auxiliary_outputs_are_left_out() -> None:
    state = {name: value for name, value in network().state_dict().items() if not name.endswith("num_batches_tracked")}
    found = fitted(network(), {**state, "aux1.fc.weight": torch.zeros(2)})
    assert (found.loaded, found.fresh, found.left_out) == (8, (), ("aux1.fc.weight",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"0.weight": torch.zeros(2, 3, 3, 3)}, "1 of another shape (0.weight: [2, 3, 3, 3] there, [2, 1, 3, 3] here)"),
        ({"other.bias": torch.zeros(1)}, "1 without a place here (other.bias)"),
        ({"0.bias": None}, "1 missing there (0.bias)"),
        ({"0.bias": torch.zeros(2, dtype=torch.cfloat)}, "1 of another kind (0.bias: complex64 there, float32 here)"),
        ({"0.bias": torch.zeros(2, dtype=torch.long)}, "1 of another kind (0.bias: int64 there, float32 here)"),
        ({"1.num_batches_tracked": torch.tensor(1.0)}, "1 of another kind (1.num_batches_tracked: float32 there, int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_error_with_names_and_shapes_and_nothing_is_copied(
    change: dict[str, Tensor | None], said: str
) -> None:
    target = network()
    before = [item.clone() for item in target.parameters()]
    state = {name: value for name, value in {**network().state_dict(), **change}.items() if value is not None}
    with pytest.raises(TrainerError, match=re.escape(f"{SAID} doesn't fit the network; tensors {said}")):
        fitted(target, state)
    assert all(map(torch.equal, target.parameters(), before))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_by_name_unless_the_network_has_them_too(value: float) -> None:
    target = network()
    before = [item.clone() for item in target.parameters()]
    state = {**network().state_dict(), "3.bias": torch.tensor([0.0, value, 1.0])}
    with pytest.raises(TrainerError, match=r"init.weights=w.pt holds NaN or infinite values in 3.bias: "):
        fitted(target, state)
    assert all(map(torch.equal, target.parameters(), before))
    with torch.no_grad():
        target[3].bias.fill_(value)  # type: ignore[index]
    assert fitted(target, state).loaded == 9


def test_halves_and_doubles_are_taken() -> None:
    for dtype in (torch.half, torch.bfloat16, torch.double):
        assert fitted(network(), network().to(dtype).state_dict()).loaded == 9


def test_torchvisions_weights_fit_its_networks_and_not_the_small_image_variant() -> None:
    from torchvision import models

    state = models.resnet18(num_classes=1000).state_dict()
    image = ImageShape(channels=3, height=32, width=32, num_classes=10)
    own = parse(config({"model": {"name": "torchvision", "arch": "resnet18"}})).model
    found = fitted(build(own, image), state, classes=10)
    assert found.fresh == ("fc.weight", "fc.bias")
    small = parse(config({"model": {"name": "resnet18"}})).model
    with pytest.raises(
        TrainerError, match=r"conv1.weight: \[64, 3, 7, 7\] there, \[64, 3, 3, 3\] here.*model=torchvision"
    ):
        fitted(build(small, image), state, classes=10)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"weights": "a.pt", "run": "seed=1"}, "a run starts from one; take one away"),
        ({"weights": " "}, "init.weights is empty"),
        ({"weights": "a.pt", "sha256": "12"}, "init.sha256='12' must be 64 hex digits"),
    ],
)
def test_what_can_not_be_meant_is_refused(section: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(config({"init": section}))


def test_a_run_starts_from_the_file_says_so_and_keeps_it_in_its_summary(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(init={"weights": "w.pt"}, trainer__freeze=["features.*"], trainer__max_steps=1)
    image = ImageShape(channels=1, height=8, width=8, num_classes=3)
    state = build(load(run_dir / "config.json").model, image).state_dict()
    torch.save(state, run_dir / "init.pt")
    run(run_dir / "config.json")
    assert "\ninitial weights: 8 tensors of init.weights=w.pt\n" in capsys.readouterr().out
    final = torch.load(run_dir / "checkpoints/final.pt", weights_only=True)
    frozen = [name for name in state if name.startswith("features.")]
    assert frozen
    assert all(torch.equal(final[name], state[name]) for name in frozen)
    told = read_summary(run_dir)["init"]
    assert told == {
        "said": SAID,
        "sha256": hashlib.sha256((run_dir / "init.pt").read_bytes()).hexdigest(),
        "fresh": [],
        "left_out": [],
    }
