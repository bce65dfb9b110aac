from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainers.core.config import ConfigError, OptimizerConfig
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import statistics
from trainers.distributed.ranks import Ranks
from trainers.optimizers import Optimizer, build, peak_lr
from trainers.optimizers.adam import AdamConfig
from trainers.optimizers.adamw import AdamWConfig
from trainers.optimizers.airbench_muon import AirbenchMuonConfig, orthogonalised
from trainers.optimizers.muon import MuonConfig
from trainers.optimizers.own import OwnOptimizerConfig
from trainers.optimizers.sgd import SGDConfig
from trainers.optimizers.torch import TorchConfig
from trainers.training import model_setup
from trainers.training.step import GradScaler

TORCH_CLASSES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW"),
    *("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
SGD = SGDConfig(lr=0.1, weight_decay=0.01)
ADAM = AdamConfig(lr=0.01, weight_decay=0.01)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        (SGDConfig(momentum=0.0, nesterov=False), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ADAM, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01)),
        (AdamWConfig(weight_decay=0.3), lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.3)),
    ],
)
def test_optimizers_do_what_those_of_torch_do(config, make) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = nn.Parameter(torch.linspace(-1, 1, 7)), nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer, reference = build(config, [ours]), make([theirs])
    for _ in range(5):
        for parameter in (ours, theirs):
            parameter.grad = None
            (parameter**3).sum().backward()
        optimizer.step(config.lr)
        reference.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (SGDConfig, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True)),
        (AdamConfig, lambda p: torch.optim.Adam(p, lr=0.01, fused=True)),
        (AdamWConfig, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
        (TorchConfig, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    ],
)
def test_biases_and_norms_are_spared_from_weight_decay_where_that_is_wished(config, make) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = small_network(), small_network()
    settings = config(lr=0.01, weight_decay=0.5, decay_bias_and_norm=False)
    kinds = [[item for item in theirs.parameters() if (item.dim() > 1) is weights] for weights in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.5}, {"params": kinds[1], "weight_decay": 0.0}]
    optimizer = build(settings, [*ours.parameters()])
    found, wanted = train(ours, updates(optimizer), 3), train(theirs, make(groups).step, 3)
    assert all(map(torch.equal, found, wanted))
    for tensors in optimizer.state().values():  # in the order of the parameters, as slices of them are told by
        assert len(tensors) == 1 or all(
            item.dim() == 0 or item.shape == one.shape for item, one in zip(tensors, ours.parameters(), strict=True)
        )


@pytest.mark.parametrize("config", [MuonConfig, AirbenchMuonConfig])
def test_muon_spares_biases_too(config: type[MuonConfig | AirbenchMuonConfig]) -> None:
    biases = []
    for decays in (True, False):
        network = small_network()
        with torch.no_grad():
            for item in network.parameters():
                item.add_(1.0)
        settings = config(lr=0.01, weight_decay=0.1, decay_bias_and_norm=decays)
        before = [item.detach().clone() for item in network.parameters()]
        optimizer = build(settings, [*network.parameters()])
        for item in network.parameters():
            item.grad = torch.zeros_like(item)
        optimizer.step(0.01)
        pairs = zip(before, network.parameters(), strict=True)
        biases.append([bool(torch.equal(a, b)) for a, b in pairs if a.dim() == 1])
    assert biases == [[False] * 3, [True] * 3]


def test_a_parameter_without_gradient_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 parameters got no gradient"):
        build(SGD, [nn.Parameter(torch.zeros(1))]).step(0.1)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_follows_the_world_size_as_named(scaling: str, factor: float) -> None:
    assert math.isclose(peak_lr(SGDConfig(lr=0.1, lr_scaling=scaling), 4), 0.1 * factor)


@pytest.mark.parametrize(("rows", "columns"), [(6, 20), (20, 6), (7, 7)])
def test_orthogonalised_matrices_have_singular_values_near_one_and_the_same_directions(rows: int, columns: int) -> None:
    matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(0))
    found = orthogonalised(matrices, 5)
    values = torch.linalg.svdvals(found)
    assert 0.5 < float(values.min()) < float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ found @ right.mT  # diagonal: no direction was turned into another
    torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=1, dim2=2)), atol=1e-4, rtol=0)


def muon_parameters() -> list[nn.Parameter]:
    """Two filter banks of one shape, one of another, a bias, and a head; as a network would have them."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 3, 3, 3), (4,), (4, 3, 3, 3), (8, 4, 1, 1), (5, 8)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.sin(parameter.detach() * (number + 2))


def test_airbenchs_muon_moves_a_filter_bank_by_lr_and_keeps_its_length() -> None:
    parameters = muon_parameters()
    bank = parameters[3]
    optimizer = build(AirbenchMuonConfig(lr=0.01), parameters)
    for _ in range(2):
        before = bank.detach() / bank.detach().norm()
        set_gradients(parameters)
        optimizer.step(0.01)
    assert float((bank.detach() / math.sqrt(8) - before).norm()) == pytest.approx(0.01, rel=0.05)
    assert float(bank.detach().norm()) == pytest.approx(math.sqrt(8), rel=0.02)


def test_airbenchs_muon_leaves_head_and_biases_to_sgd_with_rates_of_their_own() -> None:
    parameters = muon_parameters()
    theirs = [nn.Parameter(parameters[place].detach().clone()) for place in (1, 4)]
    reference = torch.optim.SGD(
        [
            {"params": theirs[:1], "lr": 0.5, "weight_decay": 0.01 / 0.5},
            {"params": theirs[1:], "lr": 0.25, "weight_decay": 0.01 / 0.25},
        ],
        momentum=0.85,
        nesterov=True,
    )
    optimizer = build(AirbenchMuonConfig(lr=0.1, bias_lr=1.0, head_lr=0.5, weight_decay=0.02), parameters)
    for _ in range(3):
        set_gradients(parameters)
        for item, place in zip(theirs, (1, 4), strict=True):
            item.grad = parameters[place].grad
        optimizer.step(0.05)  # half of the peak
        reference.step()
    torch.testing.assert_close([parameters[place].detach() for place in (1, 4)], [item.detach() for item in theirs])


def test_a_skipped_update_changes_nothing_of_airbenchs_muon() -> None:
    parameters = muon_parameters()
    optimizer = build(AirbenchMuonConfig(), parameters)
    set_gradients(parameters)
    optimizer.step(0.1)
    before = [item.detach().clone() for item in [*parameters, *optimizer.state()["momentum"]]]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step(0.1, torch.ones(()))
    assert all(map(torch.equal, before, [*parameters, *optimizer.state()["momentum"]]))


def test_airbenchs_muon_takes_a_bank_without_any_gradient() -> None:
    parameters = muon_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    build(AirbenchMuonConfig(), parameters).step(0.1)
    assert all(bool(torch.isfinite(item).all()) for item in parameters)


def small_network() -> nn.Sequential:
    """A filter bank, a head and their biases, channels last; always the same weights."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4 * 4, 5))
    return layers.to(memory_format=torch.channels_last)


def train(network: nn.Module, update: Callable[[], object], steps: int) -> list[torch.Tensor]:
    """The weights after so many steps on images that are always the same."""
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        network.zero_grad(set_to_none=True)
        (network(images) ** 2).mean().backward()
        update()
    return [item.detach().clone() for item in network.parameters()]


def updates(optimizer: Optimizer, lr: float = 0.01) -> Callable[[], object]:
    return lambda: optimizer.step(lr)


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_every_usable_class_of_torch_computes_what_it_computes_alone(name: str) -> None:
    ours, theirs = small_network(), small_network()
    fused = {"fused": True} if "fused" in inspect.signature(getattr(torch.optim, name)).parameters else {}
    decay = {} if name == "Rprop" else {"weight_decay": 0.0}
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, **decay, **fused)
    optimizer = build(TorchConfig(class_name=name), [*ours.parameters()])
    found, wanted = train(ours, updates(optimizer), 5), train(theirs, reference.step, 5)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("config", [SGD, ADAM, MuonConfig(), *(TorchConfig(class_name=name) for name in TORCH_CLASSES)])
def test_state_that_is_copied_goes_on_bit_for_bit(config: OptimizerConfig) -> None:
    whole = small_network()
    wanted = train(whole, updates(build(config, [*whole.parameters()])), 5)
    first, second = small_network(), small_network()
    before = build(config, [*first.parameters()])
    train(first, updates(before), 3)
    second.load_state_dict(first.state_dict())
    after = build(config, [*second.parameters()])
    for name, tensors in after.state().items():
        for target, source in zip(tensors, before.state()[name], strict=True):
            target.copy_(source)
    assert all(map(torch.equal, train(second, updates(after), 2), wanted))


def test_muon_gives_torchs_the_filters_as_matrices_and_the_rest_to_adamw() -> None:
    network, alone = small_network(), small_network()
    optimizer = build(MuonConfig(lr=0.01, weight_decay=0.1), [*network.parameters()])
    kept = ["Muon.momentum_buffer", "AdamW.step", "AdamW.exp_avg", "AdamW.exp_avg_sq"]
    assert [*optimizer.state()] == ["updates", *kept]
    shapes = [tuple(item.shape) for item in optimizer.state()["Muon.momentum_buffer"]]
    assert shapes == [(4, 27), (4, 4)]
    rest = [item for item in alone.parameters() if item.dim() == 1 or item.shape == (5, 16)]
    adamw = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, fused=True)
    train(network, updates(optimizer), 1)
    train(alone, adamw.step, 1)
    moved, wanted = dict(network.named_parameters()), dict(alone.named_parameters())
    torch.testing.assert_close([moved["3.weight"], moved["0.bias"]], [wanted["3.weight"], wanted["0.bias"]])
    step = (moved["0.weight"] - wanted["0.weight"] * (1 - 0.01 * 0.1)).flatten(1)
    assert float(torch.linalg.svdvals(step.detach()).max()) == pytest.approx(0.01 * 0.2 * math.sqrt(27), rel=0.3)


@pytest.mark.parametrize("config", [SGD, ADAM, MuonConfig(), TorchConfig(), TorchConfig(class_name="RAdam")])
def test_a_skipped_update_leaves_torchs_optimizers_as_they_were(config: OptimizerConfig) -> None:
    network = small_network()
    optimizer = build(config, [*network.parameters()])
    before = train(network, updates(optimizer), 2)
    state = {name: [item.clone() for item in tensors] for name, tensors in optimizer.state().items()}
    after = train(network, lambda: optimizer.step(0.01, torch.ones(())), 1)
    assert all(map(torch.equal, before, after))
    kept = optimizer.state()
    assert all(torch.equal(a, b) for name in state for a, b in zip(state[name], kept[name], strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_name": "AdamZ"}, r"optimizer.class_name='AdamZ' is no class of torch.optim .*; choose one of: ASGD, "),
        ({"class_name": "LBFGS"}, "class_name=LBFGS can't be used: it evaluates the loss several times in a step"),
        ({"class_name": "Muon"}, "it takes matrices only; optimizer=muon gives it those"),
        ({"arguments": {"bets": 1}}, r"arguments.bets is no argument of torch.optim.AdamW: amsgrad, betas, "),
        ({"arguments": {"lr": 1}}, "optimizer.arguments.lr is said by optimizer.lr; set that"),
        ({"arguments": {"params": 1}}, "optimizer.arguments.params are the model's; leave it out"),
        ({"arguments": {"betas": [0.9]}}, r"torch.optim.AdamW refuses {'betas': \[0.9\]}: IndexError \(tuple index"),
        ({"arguments": {"betas": {"a": 1}}}, r"torch.optim.AdamW refuses .*: KeyError \(0\)"),
        ({"class_name": "RAdam", "arguments": {"capturable": True}},
         "refuses {'capturable': True}: If capturable=True, "),
        ({"arguments": {"betas": [0.9, 2]}}, r"torch.optim.AdamW refuses .*: Invalid beta parameter at index 1: 2"),
        ({"class_name": "Rprop", "weight_decay": 0.1},
         "torch.optim.Rprop has no weight decay; take optimizer.weight_d"),
    ],
)  # fmt: skip
def test_a_class_or_argument_that_torch_has_not_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(TorchConfig(**settings), [nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("name", "said"),
    [("params", "args.params are the model's; leave it out"), ("lr", "said by optimizer.lr; set that")],
)
def test_an_argument_of_ones_own_optimizer_that_it_gets_anyway_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OwnOptimizerConfig(target="my_package.optim:Mine", args={name: 1})


CPU = torch.device("cpu")
ALONE = RankContext(ranks=Ranks(), device=CPU, backend="gloo")


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_the_scale_is_that_of_torch_and_gone_from_the_gradients() -> None:
    grad_scaler, torchs = GradScaler([], CPU, scales=True), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.ones(3))
    reference = torch.optim.SGD([parameter], lr=0.1)
    for step in range(2005):
        value = float("inf") if step in (0, 1, 4) else 2.0
        gradient = torch.full((3,), value)
        parameter.grad = torchs.scale(gradient).detach()
        torchs.step(reference)
        torchs.update()
        grad_scaler.begin()
        scaled = gradient * grad_scaler.scale
        found = grad_scaler.inspect([scaled])
        grad_scaler.end()
        assert float(found) == float(step in (0, 1, 4))
        assert scaled.equal(gradient)
        assert float(grad_scaler.scale) == torchs.get_scale()
    assert (float(grad_scaler.scale), int(grad_scaler.skipped)) == (2.0**14, 3)


def test_a_skipped_update_leaves_weights_momentum_and_batch_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2))
    optimizer = build(SGDConfig(lr=0.1), list(model.parameters()))
    grad_scaler = GradScaler(statistics(model), CPU)
    for value in (1.0, float("nan")):
        before = {name: item.clone() for name, item in model.state_dict().items()}
        momentum = [item.clone() for item in optimizer.state()["SGD.momentum_buffer"]]
        grad_scaler.begin()
        for parameter in model.parameters():
            parameter.grad = None
        model(torch.full((2, 2, 3, 3), value)).sum().backward()
        optimizer.step(0.1, grad_scaler.inspect(optimizer.gradients()))
        grad_scaler.end()
    after = model.state_dict()
    assert all(after[name].equal(item) for name, item in before.items() if item.is_floating_point())
    assert all(map(torch.equal, optimizer.state()["SGD.momentum_buffer"], momentum))
    assert int(grad_scaler.skipped) == 1


@pytest.mark.parametrize(("native", "wanted"), [(True, "bf16"), (False, "fp32")])
def test_auto_takes_bf16_only_where_the_device_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, wanted: str
) -> None:
    monkeypatch.setattr(model_setup, "computes_in_bf16", lambda _: native)
    assert model_setup.agree_on_precision("auto", ALONE) == wanted
    assert model_setup.agree_on_precision("fp32", ALONE) == "fp32"


def test_fp16_on_the_cpu_is_refused() -> None:
    with pytest.raises(TrainerError, match="fp16 needs a GPU; on the CPU choose bf16 or fp32"):
        model_setup.agree_on_precision("fp16", ALONE)
