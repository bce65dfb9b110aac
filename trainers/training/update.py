"""Steps around an optimizer update: skip non-finite gradients, clip gradients, average weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainers.strategies import Layout

_FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0, 0.5, 2000


class GradScaler:
    """Skips an update whose gradients are not finite, and scales the loss for fp16, all on the device.

    The gradients are averaged before they are checked, so every rank decides alike. torch's fused optimizers take
    ``found_inf`` as a tensor: 1.0 leaves parameters and state unchanged. For a skipped update, the floating-point
    buffers in ``statistics`` are restored to their values before the forward pass. The scale follows the rule of
    torch.amp.GradScaler (Micikevicius et al.: Mixed precision training, 2018), which restores no batch statistics and
    counts no skipped update.

    Call ``begin()`` before the forward pass, ``inspect()`` after the gradients are averaged, and ``end()`` last.
    """

    def __init__(self, statistics: Sequence[Tensor], device: torch.device, *, scales: bool = False) -> None:
        self._scales = scales
        self.scale = torch.full((), _FIRST_SCALE if scales else 1.0, device=device)  # factor of the loss
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the last change of the scale
        self.found_inf = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps of the run so far
        self._buffers = [*statistics]
        self._before = [item.clone() for item in self._buffers]

    @torch.no_grad()
    def begin(self) -> None:
        """Save the buffers."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    @torch.no_grad()
    def inspect(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scale in place. Returns ``found_inf`` for the optimizer."""
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())
        return self.found_inf

    @torch.no_grad()
    def end(self) -> None:
        """Count a skipped update, restore its buffers, and choose the next scale."""
        self.skipped += self.found_inf.to(torch.int64)
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.found_inf > 0, before, buffer))
        if self._scales:
            torch._amp_update_scale_(self.scale, self._good_steps, self.found_inf, _GROWTH, _BACKOFF, _GROWTH_STEPS)

    def state(self) -> dict[str, list[Tensor]]:
        """Return the tensors that a checkpoint keeps."""
        return {"skipped": [self.skipped], "scale": [self.scale, self._good_steps]}


@torch.no_grad()
def clip(layout: Layout, max_norm: float, gradients: list[Tensor]) -> Tensor:
    """Scale the gradients of the layout's parameters in place with torch.nn.utils (Pascanu et al. 2013).

    Call it when the gradients of the global batch are complete and unscaled. Doesn't wait for the device.

    Returns:
        The norm before, a scalar: that of the whole gradient, averaged over ranks and micro-batches, and including the
        slices of all ranks.
    """
    norm = layout.whole_norm(get_total_norm(gradients))
    clip_grads_with_norm_(layout.parameters, max_norm, norm)
    return norm


class WeightAverage:
    """Exponential running average of the weights, by torch.optim.swa_utils (Polyak, Juditsky 1992).

    ``parameters`` are tensors that are trained in place; with fsdp, slices of tensors. Like torch's AveragedModel, the
    average starts with the weights after the first step. Buffers such as batch statistics are not averaged: the newest
    values are used.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = list(parameters)
        self.values = [item.detach().clone() for item in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step ``step`` of the run (from 0) to the average."""
        if step:
            self._update(self.values, self._parameters, step)
        else:
            torch._foreach_copy_(self.values, self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the network has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the network's weights and the averaged weights in ``values``, bit for bit."""
        for weights, average in zip(self._parameters, self.values, strict=True):
            before = weights.detach().clone()
            weights.copy_(average)
            average.copy_(before)
