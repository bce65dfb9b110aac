"""Linear and Flatten with faster backward passes on the CPU.

torch's own cost a small network more than its convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Linear):
    """nn.Linear with the same weights, under autocast's rules.

    On the CPU under autocast, torch computes the weight's gradient transposed and in bf16, and copies it to fp32
    element by element: 10 ns each, half of a small network's step. This class computes the product in the other order,
    which gives the gradient in memory order.
    """

    def forward(self, values: Tensor) -> Tensor:
        ours = values.dim() == 2 and values.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not ours or not torch.is_grad_enabled():
            return super().forward(values)
        lower = torch.get_autocast_dtype("cpu")
        result: Tensor = _Dense.apply(values.to(lower), self.weight, self.bias, lower)
        return result


class _Dense(torch.autograd.Function):
    """Compute values [n, in] × weight [out, in] + bias [out] (or None) → [n, out] in ``lower``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, lower: torch.dtype) -> Tensor:
        small = weight.to(lower)
        ctx.save_for_backward(values, small)
        ctx.dtype, ctx.has_bias = weight.dtype, bias is not None
        return functional.linear(values, small, None if bias is None else bias.to(lower))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        values, small = ctx.saved_tensors
        bias = gradient.sum(0).to(ctx.dtype) if ctx.has_bias else None
        return gradient @ small, (gradient.t() @ values).to(ctx.dtype), bias, None


class Flatten(nn.Module):
    """nn.Flatten, [n, C, H, W] → [n, C·H·W], whose gradient has the memory layout of the maps.

    With nn.Flatten the gradient is channels first. Preceding layers in channels-last layout (dropout, ReLU, pooling)
    would then compute across two layouts, at ten times the cost.
    """

    def forward(self, maps: Tensor) -> Tensor:
        result: Tensor = _Flat.apply(maps)
        return result


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: Tensor) -> Tensor:
        ctx.shape = maps.shape
        ctx.layout = _layout(maps)
        return maps.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.reshape(ctx.shape).contiguous(memory_format=ctx.layout)


def _layout(maps: Tensor) -> torch.memory_format:
    last = maps.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format
