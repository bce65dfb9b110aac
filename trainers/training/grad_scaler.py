"""Skips an update whose gradients are not finite, and scales the loss of fp16; the device decides by itself.

The gradients are averaged before they are looked at, so every rank decides alike. torch's fused optimizers
take the answer as a tensor and leave parameters and state as they were. The scale follows the rule of
torch.amp.GradScaler (Micikevicius et al.: Mixed precision training, 2018), which restores no batch statistics
and counts no skipped update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0, 0.5, 2000


class GradScaler:
    """``begin()`` before the forward pass, ``inspect()`` once the gradients are averaged, ``end()`` at last.

    ``found`` is 1.0 on the device when this step's update is to be skipped. What a forward pass made of ``statistics``
    (the floating-point buffers) is taken back then.
    """

    def __init__(self, statistics: Sequence[Tensor], device: torch.device, *, scales: bool = False) -> None:
        self._scales = scales
        self.scale = torch.full((), _FIRST_SCALE if scales else 1.0, device=device)  # multiply the loss with it
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the scale changed
        self.found = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps of the run so far
        self._buffers = [*statistics]
        self._before = [item.clone() for item in self._buffers]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    @torch.no_grad()
    def inspect(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scale in place. Returns ``found`` for the optimizer."""
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found, self.scale.reciprocal())
        return self.found

    @torch.no_grad()
    def end(self) -> None:
        """Count a skipped update, undo what it did to the buffers, and choose the next scale."""
        self.skipped += self.found.to(torch.int64)
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.found > 0, before, buffer))
        if self._scales:
            torch._amp_update_scale_(self.scale, self._good_steps, self.found, _GROWTH, _BACKOFF, _GROWTH_STEPS)

    def state(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps."""
        return {"skipped": [self.skipped], "scale": [self.scale, self._good_steps]}
