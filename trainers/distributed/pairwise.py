"""Sums in the order of a balanced binary tree over the parts of a global batch, on any number of ranks.

((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)): a rank holds 1, 2, 4, … neighbouring parts, that is a whole branch.
It sums its branch alone, and the ranks' sums are added in the same tree. Floating-point addition is commutative but
not associative, so the tree alone determines the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pairwise_sum(rows: Tensor) -> Tensor:
    """Sum [n, …] → […] pairwise, for n a power of two; overwrites ``rows``."""
    while len(rows) > 1:
        pairs = rows.view(len(rows) // 2, 2, *rows.shape[1:])
        rows = pairs[:, 0].add_(pairs[:, 1])
    return rows[0]


class PairwiseSum:
    """Pairwise sum of lists of tensors that arrive one by one. Of n lists it holds at most log2(n) + 1."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Tensor]]] = []  # partial sums with their number of lists: 4, 2, 1

    def forget(self) -> None:
        """Start a new sum."""
        self._waiting = []

    def add(self, tensors: list[Tensor]) -> None:
        """Add the next list, whose tensors may be overwritten from now on."""
        count = 1
        while self._waiting and self._waiting[-1][0] == count:
            _, earlier = self._waiting.pop()
            torch._foreach_add_(earlier, tensors)
            tensors, count = earlier, 2 * count
        self._waiting.append((count, tensors))

    def waiting(self) -> list[list[Tensor]]:
        """Return the partial sums, in the order in which they must be added to the last list."""
        return [tensors for _, tensors in reversed(self._waiting)]
