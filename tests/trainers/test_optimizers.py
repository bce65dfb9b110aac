import math

import pytest
import torch
from torch import nn

from trainers.optimizers import build, peak_lr
from trainers.optimizers.adam import AdamConfig
from trainers.optimizers.muon import MuonConfig
from trainers.optimizers.newton_schulz import orthogonalised
from trainers.optimizers.sgd import SGDConfig

SGD = SGDConfig(lr=0.1, weight_decay=0.01)
ADAM = AdamConfig(lr=0.01, weight_decay=0.01)


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (SGD, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        (SGDConfig(momentum=0.0, nesterov=False), lambda p: torch.optim.SGD(p, lr=0.1)),
        (ADAM, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01)),
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


def test_muon_moves_a_filter_bank_by_lr_and_keeps_its_length() -> None:
    parameters = muon_parameters()
    bank = parameters[3]
    optimizer = build(MuonConfig(lr=0.01), parameters)
    for _ in range(2):
        before = bank.detach() / bank.detach().norm()
        set_gradients(parameters)
        optimizer.step(0.01)
    assert float((bank.detach() / math.sqrt(8) - before).norm()) == pytest.approx(0.01, rel=0.05)
    assert float(bank.detach().norm()) == pytest.approx(math.sqrt(8), rel=0.02)


def test_muon_leaves_head_and_biases_to_sgd_with_rates_of_their_own() -> None:
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
    optimizer = build(MuonConfig(lr=0.1, bias_lr=1.0, head_lr=0.5, weight_decay=0.02), parameters)
    for _ in range(3):
        set_gradients(parameters)
        for item, place in zip(theirs, (1, 4), strict=True):
            item.grad = parameters[place].grad
        optimizer.step(0.05)  # half of the peak
        reference.step()
    torch.testing.assert_close([parameters[place].detach() for place in (1, 4)], [item.detach() for item in theirs])


def test_muon_computes_banks_of_one_shape_together_as_it_would_alone() -> None:
    together, alone = muon_parameters(), muon_parameters()
    set_gradients(together)
    set_gradients(alone)
    build(MuonConfig(), together).step(0.1)
    build(MuonConfig(), [alone[0], alone[4]]).step(0.1)
    torch.testing.assert_close(together[0], alone[0])


def test_a_skipped_update_changes_nothing_of_muon() -> None:
    parameters = muon_parameters()
    optimizer = build(MuonConfig(), parameters)
    set_gradients(parameters)
    optimizer.step(0.1)
    before = [item.detach().clone() for item in [*parameters, *optimizer.state()["momentum"]]]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step(0.1, torch.ones(()))
    assert all(map(torch.equal, before, [*parameters, *optimizer.state()["momentum"]]))


def test_muon_takes_a_bank_without_any_gradient() -> None:
    parameters = muon_parameters()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    build(MuonConfig(), parameters).step(0.1)
    assert all(bool(torch.isfinite(item).all()) for item in parameters)
