"""The dense and the flattening layer against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.models.small_cnn import Linear


@pytest.mark.parametrize("shape", [(8, 96), (2, 4, 96)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bf16", [False, True])
def test_values_and_gradients_are_those_of_torch(bf16: bool, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours, theirs = Linear(96, 32, bias=bias), nn.Linear(96, 32, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    results = []
    for layer in (ours, theirs):
        values = torch.linspace(-1, 1, 8 * 96).view(shape).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = layer(values)
        outputs.float().square().sum().backward()
        results.append([outputs, values.grad, *(item.grad for item in layer.parameters())])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2**-7 if bf16 else 1e-6, atol=2**-7 if bf16 else 1e-6)
