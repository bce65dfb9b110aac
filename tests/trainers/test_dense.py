"""The dense and the flattening layer against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainers.models.layers import Flatten, Linear


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


def test_the_weight_gradient_lies_in_memory_as_the_weight_does() -> None:
    layer = Linear(16, 4)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 16)).float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_gradient_of_flattened_maps_lies_in_memory_as_the_maps_do(layout: torch.memory_format) -> None:
    maps = torch.arange(2.0 * 3 * 4 * 5).view(2, 3, 4, 5).contiguous(memory_format=layout).requires_grad_()
    flat, seen = Flatten()(maps * 1), []
    assert flat.equal(maps.flatten(1))
    assert flat.grad_fn is not None
    flat.grad_fn.next_functions[0][0].register_prehook(lambda gradients: seen.append(gradients[0]))
    flat.backward(flat.detach())
    assert seen[0].equal(maps)
    assert seen[0].is_contiguous(memory_format=layout)
