"""Sums whose order is a balanced binary tree over the parts of a global batch, whichever rank computes which part.

((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)): a rank holds 1, 2, 4, … neighbouring parts, that is a whole branch.
It adds up its branch alone, and the ranks' sums are added in the same tree. Floating-point addition is commutative
but not associative, so the tree decides the bits, and nothing else does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pairwise_sum(rows: Tensor) -> Tensor:
    """[n, …] → […], n a power of two; overwrites ``rows``."""
    while len(rows) > 1:
        pairs = rows.view(len(rows) // 2, 2, *rows.shape[1:])
        rows = pairs[:, 0].add_(pairs[:, 1])
    return rows[0]


class PairwiseSum:
    """The same for lists of tensors one after the other. Of n lists at most log2(n) + 1 are held at a time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Tensor]]] = []  # how many lists it is the sum of: 4, 2, 1

    def forget(self) -> None:
        """Begin anew."""
        self._waiting = []

    def add(self, tensors: list[Tensor]) -> None:
        """The next list, which may be overwritten from now on."""
        count = 1
        while self._waiting and self._waiting[-1][0] == count:
            _, earlier = self._waiting.pop()
            torch._foreach_add_(earlier, tensors)
            tensors, count = earlier, 2 * count
        self._waiting.append((count, tensors))

    def waiting(self) -> list[list[Tensor]]:
        """What is to be added to the last list of all, in this order."""
        return [tensors for _, tensors in reversed(self._waiting)]
