"""Skips an update whose gradients are not finite, without asking the device: it decides by itself.

The gradients are averaged before they are looked at, so every rank decides alike. torch's fused optimizers
take the answer as a tensor and leave parameters and state as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainers.buffers import statistics


class UpdateGuard:
    """``begin()`` before the forward pass, ``inspect()`` once the gradients are averaged, ``end()`` at last.

    ``found`` is 1.0 on the device when this step's update is to be skipped. What a forward pass made of the
    floating-point buffers (batch statistics) is taken back then.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.found = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps of the run so far
        self._inverse_scale = torch.ones((), device=device)
        self._buffers = statistics(model)
        self._before = [item.clone() for item in self._buffers]

    @torch.no_grad()
    def begin(self) -> None:
        """Remember the buffers."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    @torch.no_grad()
    def inspect(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns ``found`` for the optimizer."""
        self.found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found, self._inverse_scale)
        return self.found

    @torch.no_grad()
    def end(self) -> None:
        """Count a skipped update, and undo what it did to the buffers."""
        self.skipped += self.found.to(torch.int64)
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.found > 0, before, buffer))

    def state(self) -> dict[str, list[Tensor]]:
        """What a checkpoint keeps."""
        return {"skipped": [self.skipped]}
