"""A running average of the weights, by torch.optim.swa_utils (Polyak, Juditsky 1992; as an exponential average)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """The average of ``parameters`` (tensors that are trained in place; slices of tensors with fsdp).

    As torch's AveragedModel: it begins with the weights after the first step. Buffers such as batch statistics aren't
    averaged, they are those of the newest weights.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        from torch.optim.swa_utils import get_ema_multi_avg_fn  # imports torch._dynamo

        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = list(parameters)
        self.values = [item.detach().clone() for item in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step ``step`` of the run (from 0)."""
        if step:
            self._update(self.values, self._parameters, step)
        else:
            torch._foreach_copy_(self.values, self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the network has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """The network gets the averaged weights and ``values`` the others, bit for bit."""
        for weights, average in zip(self._parameters, self.values, strict=True):
            before = weights.detach().clone()
            weights.copy_(average)
            average.copy_(before)
