"""Low-rank gradients with error feedback and warm start (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019).

A matrix M [rows, columns] travels as P [rows, rank] and Q [columns, rank]: P = M Q is summed over the ranks and its
columns made orthonormal, then Q = Mᵀ P is summed, and P Qᵀ stands for the sum of all M. What that leaves out of
a rank's own M is added to its next one; Q is where the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_SAVES = 2  # a matrix is sent as two thin ones where that is less than one part in so many
_SEED = 20190531


class LowRank:
    """The gradients of one bucket, to be summed over the ranks in two all-reduces.

    ``begin()`` when the gradients are in place, ``turn()`` and ``end()`` once no more are to come; then they hold
    the sum. ``error`` (flat, this rank's own) and ``start`` (flat, the same on all ranks) are its state.
    """

    def __init__(self, gradients: Sequence[Tensor], rows: Sequence[int], *, rank: int, world_size: int) -> None:
        """``gradients``: flat views of one buffer, ``rows``: how many rows each has as a matrix."""
        self._world_size = world_size
        pairs = list(zip(gradients, rows, strict=True))
        self._matrices = [item.view(count, -1) for item, count in pairs if thin(item.numel(), count, rank)]
        self._rest = [item for item, count in pairs if not thin(item.numel(), count, rank)]
        like = gradients[0]
        self.error = like.new_zeros(sum(item.numel() for item in self._matrices))
        self._errors = split(self.error, [item.shape for item in self._matrices])
        left = [torch.Size((item.shape[0], min(rank, *item.shape))) for item in self._matrices]
        right = [torch.Size((item.shape[1], min(rank, *item.shape))) for item in self._matrices]
        count_left = sum(shape.numel() for shape in left)
        self._sent = like.new_zeros(count_left + sum(item.numel() for item in self._rest))
        self._left = split(self._sent[:count_left], left)
        self._sent_rest = split(self._sent[count_left:], [item.shape for item in self._rest])
        generator = torch.Generator().manual_seed(_SEED)
        first = torch.randn(sum(shape.numel() for shape in right), generator=generator)
        self.start = first.to(device=like.device, dtype=like.dtype)
        self._starts = split(self.start, right)
        self._right_flat = torch.zeros_like(self.start)
        self._right = split(self._right_flat, right)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Send P, and what is too small for two matrices."""
        for matrix, error, start, left in zip(self._matrices, self._errors, self._starts, self._left, strict=True):
            matrix.add_(error)
            orthonormalise(start)
            torch.mm(matrix, start, out=left)
        if self._rest:
            torch._foreach_copy_(self._sent_rest, self._rest)
        self._work = dist.all_reduce(self._sent, async_op=True)

    def turn(self) -> None:
        """Wait for P and send Q."""
        self._wait()
        if self._rest:
            torch._foreach_copy_(self._rest, self._sent_rest)
        for matrix, left, right in zip(self._matrices, self._left, self._right, strict=True):
            orthonormalise(left)
            torch.mm(matrix.t(), left, out=right)
        if self._matrices:
            self._work = dist.all_reduce(self._right_flat, async_op=True)

    def end(self) -> None:
        """Wait for Q; the gradients become P Qᵀ, and what that lacks of this rank's own is kept."""
        self._wait()
        parts = zip(self._matrices, self._errors, self._left, self._right, self._starts, strict=True)
        for matrix, error, left, right, start in parts:
            error.copy_(matrix)
            torch.mm(left, right.t(), out=matrix)
            error.sub_(matrix, alpha=1 / self._world_size)
            start.copy_(torch.where(right.norm(dim=0) > 0, right, start))  # from nothing but zeros none comes back

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def thin(count: int, rows: int, rank: int) -> bool:
    """Whether ``count`` elements in ``rows`` rows are worth sending as two matrices."""
    return count > _SAVES * rank * (rows + count // rows)


def orthonormalise(matrix: Tensor) -> None:
    """Gram–Schmidt on the columns of [n, rank], in place; a column of zeros stays one."""
    smallest = torch.finfo(matrix.dtype).tiny
    for index in range(matrix.shape[1]):
        column = matrix[:, index]
        column.div_(column.norm().clamp_min(smallest))
        if index + 1 < matrix.shape[1]:
            later = matrix[:, index + 1 :]
            later.sub_(torch.outer(column, column @ later))


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts, offset = [], 0
    for shape in shapes:
        parts.append(flat[offset : offset + shape.numel()].view(shape))
        offset += shape.numel()
    return parts
