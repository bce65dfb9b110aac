"""The rule for skipped updates and the scale of fp16, on the CPU."""

import pytest
import torch
from torch import nn

from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import statistics
from trainers.distributed.ranks import Ranks
from trainers.optimizers import build
from trainers.optimizers.sgd import SGDConfig
from trainers.training import model_setup
from trainers.training.step import GradScaler

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
