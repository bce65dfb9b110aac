"""Rows of data that don't fit into a GPU's memory: gathered by a thread while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

_AHEAD = 2  # batches: one travels to the device while the next is gathered

Rows = tuple[Tensor, Tensor]


class Gatherer:
    """Copies of ``images`` and ``labels`` at given places, on ``device``.

    The thread gathers into pinned buffers, from which a copy to the device runs beside its computation. torch gives a
    buffer out again once the copies from it are done.
    """

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        self._sources, self._device = (images, labels), device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gather")
        self._upcoming: Iterator[Tensor] = iter(())
        self._gathered: deque[tuple[Tensor, Future[Rows]]] = deque()

    def expect(self, batches: Iterable[Tensor]) -> None:
        """The batches that will be taken from now on: for each the places of its samples, int64 [n] on the CPU."""
        self._upcoming = iter(batches)
        self._gathered.clear()
        self._go_ahead()

    def take(self, index: Tensor) -> Rows:
        """Images and labels at ``index``; gathered here and now where another batch was expected."""
        if self._gathered and torch.equal(self._gathered[0][0], index):
            rows = self._gathered.popleft()[1].result()
            self._go_ahead()
        else:
            rows = self._gather(index)
        images, labels = (item.to(self._device, non_blocking=True) for item in rows)
        return images, labels

    def _go_ahead(self) -> None:
        while len(self._gathered) < _AHEAD and (index := next(self._upcoming, None)) is not None:
            self._gathered.append((index, self._thread.submit(self._gather, index)))

    def _gather(self, index: Tensor) -> Rows:
        pin = self._device.type == "cuda"
        images, labels = (
            torch.index_select(
                source, 0, index, out=torch.empty(len(index), *source.shape[1:], dtype=source.dtype, pin_memory=pin)
            )
            for source in self._sources
        )
        return images, labels
