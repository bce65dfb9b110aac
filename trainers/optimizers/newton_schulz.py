"""The nearest matrix with orthonormal rows (or columns), roughly, from matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the odd polynomial a·x + b·x³ + c·x⁵: steep at 0, so that a few rounds bring singular values near 1 (0.7 to 1.2).
# Bernstein, Newhouse: Old optimizer, new norm, 2024; coefficients from Jordan's description of Muon.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """Newton–Schulz on [n, rows, columns]; returns the same shape in fp32. In bf16 on a GPU, whose units it fits."""
    values = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    values = values / (values.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value above 1
    upright = values.shape[1] > values.shape[2]
    if upright:  # the products are as large as the shorter side
        values = values.mT
    for _ in range(iterations):
        square = values @ values.mT
        values = _LINEAR * values + (_CUBIC * square + _QUINTIC * square @ square) @ values
    result: Tensor = values.mT if upright else values
    return result.float()
