"""Gradients that are too long are shortened, by torch.nn.utils (Pascanu et al. 2013)."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainers.strategies import Layout


class Clipping:
    """``clip()`` once the gradients of the global batch are complete and unscaled; it waits for nothing.

    The norm is taken over the whole gradient: averaged over ranks and micro-batches, with slices of all ranks.
    """

    def __init__(self, layout: Layout, max_norm: float) -> None:
        self._layout, self._max_norm = layout, max_norm
        self.norm = torch.zeros(())  # of the last step, before it was clipped

    @torch.no_grad()
    def clip(self, gradients: list[Tensor]) -> None:
        """Shorten the gradients of the layout's parameters in place, if their norm is above the largest allowed."""
        self.norm = self._layout.whole_norm(get_total_norm(gradients))
        clip_grads_with_norm_(self._layout.parameters, self._max_norm, self.norm)

    def metrics(self) -> dict[str, float]:
        """The norm of the last step before it was clipped, if it is a number. Waits for the device."""
        norm = float(self.norm)
        return {"train/grad_norm": norm} if math.isfinite(norm) else {}
