"""Two convolutions and two dense layers: the network of the PyTorch MNIST example, for any image size. Source:
https://github.com/pytorch/examples/tree/main/mnist (1,199,882 parameters for 1×28×28 and 10 classes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.core.config import ConfigError, ModelConfig, at_least
from trainers.models import ImageShape

_LOST_PIXELS = 4  # two 3×3 convolutions without padding
_SMALLEST_PIXELS = _LOST_PIXELS + 2  # one 2×2 pooling window must be left


@dataclass(kw_only=True)
class SmallCNNConfig(ModelConfig):
    """Two convolutions and two dense layers, after the PyTorch MNIST example.

    Attributes:
        width: filters of the first convolution; the second has twice as many.
        hidden: outputs of the first dense layer.
        dropout: share of values dropped after the convolutions; twice this before the last layer.
    """

    name: str = "small_cnn"
    width: int = 32
    hidden: int = 128
    dropout: float = 0.25

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)
        at_least("model.hidden", self.hidden, 1)
        if not 0 <= self.dropout < 0.5:
            raise ConfigError(f"model.dropout={self.dropout} must lie in [0, 0.5)")


class SmallCNN(nn.Module):
    """Maps float images [n, C, H, W] to logits [n, classes]. H and W at least 6."""

    def __init__(self, config: SmallCNNConfig, image: ImageShape) -> None:
        super().__init__()
        pooled = ((image.height - _LOST_PIXELS) // 2) * ((image.width - _LOST_PIXELS) // 2)
        self.features = nn.Sequential(
            nn.Conv2d(image.channels, config.width, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(config.width, 2 * config.width, 3),
            nn.MaxPool2d(2),  # pool before the ReLU: the same values for a quarter of the ReLU's work
            nn.ReLU(inplace=True),
            Dropout(config.dropout),
        )
        self.classifier = nn.Sequential(
            Flatten(),
            Linear(2 * config.width * pooled, config.hidden),
            nn.ReLU(inplace=True),
            Dropout(2 * config.dropout),
            Linear(config.hidden, image.num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def build(config: SmallCNNConfig, image: ImageShape) -> nn.Module:
    """Build the network. Raises ConfigError if the images are smaller than 6×6."""
    if min(image.height, image.width) < _SMALLEST_PIXELS:
        raise ConfigError(
            f"model=small_cnn needs images of at least {_SMALLEST_PIXELS}×{_SMALLEST_PIXELS} pixels, "
            f"the data has {image.height}×{image.width}; choose model=resnet18 or larger images"
        )
    return SmallCNN(config, image)


_PER_NUMBER = 4  # elements that share one random 64-bit number of Dropout, 16 bits each
_LEVELS = 1 << 16


class Linear(nn.Linear):
    """nn.Linear with the same weights, under autocast's rules.

    On the CPU, torch computes the weight's gradient transposed and in bf16, and copies it element by element: half of a
    small network's step. Here the product has the other order, which gives the gradient in memory order.
    """

    def forward(self, values: Tensor) -> Tensor:
        is_slow_case = values.dim() == 2 and values.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if not is_slow_case or not torch.is_grad_enabled():
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
    """nn.Flatten, [n, C, H, W] → [n, C·H·W], whose gradient has the memory layout of the maps (channels last).
    Otherwise the layers in front of it would compute with tensors of two layouts, at ten times the cost.
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


class Dropout(nn.Module):
    """nn.Dropout; on the CPU ``p`` is rounded to a multiple of 1/65536. Uses torch's default generator."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, values: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return values
        if values.device.type != "cpu":
            return functional.dropout(values, self.p)
        return values * self._factors(values)

    def _factors(self, values: Tensor) -> Tensor:
        """Return 0 or 1/(1 − p) for each element, in the memory layout of ``values``."""
        count, level = values.numel(), round(self.p * _LEVELS)
        # torch draws 64 bits at a time: take four numbers of 16 bits, −32768 to 32767, from each
        numbers = torch.empty(-(-count // _PER_NUMBER), dtype=torch.int64).random_(-(1 << 63), None)
        drawn = numbers.view(torch.int16)[:count]
        kept = torch.ge(drawn, level - _LEVELS // 2, out=torch.empty_like(drawn))  # 0 or 1
        factors = _times(kept, 1 / (1 - self.p), values.dtype)
        if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
            n, channels, height, width = values.shape
            return factors.view(n, height, width, channels).permute(0, 3, 1, 2)
        return factors.view(values.shape)


def _times(ones: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Convert int16 [n] of 0 and 1 to 0 and ``factor`` in ``dtype``."""
    if dtype.itemsize != ones.element_size():
        return ones.to(dtype).mul_(factor)
    # multiply by the bit pattern of the 16-bit float: ten times as fast as a conversion
    bits = int(torch.tensor(factor, dtype=dtype).view(torch.int16))
    return ones.mul_(bits).view(dtype)
