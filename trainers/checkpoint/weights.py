"""Plain weights (contiguous, on the CPU) and their digest."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def plain(model: nn.Module) -> dict[str, Tensor]:
    """Copy a state dict to contiguous CPU tensors, which stock torch loads with load_state_dict."""
    return {
        name: value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, value in model.state_dict().items()
    }


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over name, dtype, shape and raw bytes of contiguous CPU tensors, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # ctypes, because torch exposes a tensor's bytes only through numpy, which a node need not have
        if value.nbytes:
            total.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return total.hexdigest()
