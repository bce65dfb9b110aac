"""Dropout whose mask costs a third on the CPU, where torch draws one random number for every element."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_PER_NUMBER = 4  # elements that share one random 64-bit number, 16 bits each
_LEVELS = 1 << 16


class Dropout(nn.Module):
    """As nn.Dropout; on the CPU ``p`` is rounded to a multiple of 1/65536. Draws from torch's default generator."""

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
        """0 or 1/(1 − p) for each element, in the memory layout of ``values``."""
        count, level = values.numel(), round(self.p * _LEVELS)
        numbers = torch.empty(-(-count // _PER_NUMBER), dtype=torch.int64).random_(-(1 << 63), None)
        kept = numbers.view(torch.int16)[:count] >= level - _LEVELS // 2
        factors = kept.to(values.dtype).mul_(1 / (1 - self.p))
        if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
            n, channels, height, width = values.shape
            return factors.view(n, height, width, channels).permute(0, 3, 1, 2)
        return factors.view(values.shape)
