"""Readers that fetch the rows of a pack in threads, for a few batches ahead of the step that needs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

_PREFETCHED = 2  # batches: one is copied to the device while the next is gathered

Rows = tuple[Tensor, Tensor]


class Wanted(NamedTuple):
    """A request for rows: the numbers of the samples in the pack, int64 [n] on the CPU.

    ``crops`` are the random numbers of crops that are made while decoding, int64 [n, 4] (see
    trainers.data.augment.EpochPlan).
    """

    samples: Tensor
    crops: Tensor | None = None

    def equals(self, other: Wanted) -> bool:
        """Return True if both request the same rows."""
        if self.crops is None or other.crops is None:
            return self.crops is other.crops and torch.equal(self.samples, other.samples)
        return torch.equal(self.samples, other.samples) and torch.equal(self.crops, other.crops)


class RowReader(ABC):
    """Provides images uint8 [n, C, H, W] and labels int64 [n] on ``device``, with a few batches prefetched.

    Threads fill pinned buffers, from which a copy to the device runs in parallel with its computation. torch reuses a
    buffer once the copies from it are done.
    """

    def __init__(self, device: torch.device, workers: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rows")
        self._upcoming: Iterator[Wanted] = iter(())
        self._begun: deque[tuple[Wanted, Callable[[], Rows]]] = deque()

    def expect(self, batches: Iterable[Wanted]) -> None:
        """Prefetch these batches, which will be taken in this order."""
        self._upcoming = iter(batches)
        self._begun.clear()
        self._prefetch()

    def take(self, wanted: Wanted) -> Rows:
        """Return the rows; if another batch was expected, read them now. Raises TrainerError."""
        if self._begun and self._begun[0][0].equals(wanted):
            rows = self._begun.popleft()[1]()
            self._prefetch()
        else:
            rows = self._begin(wanted)()
        images, labels = (item.to(self._device, non_blocking=True) for item in rows)
        return images, labels

    def close(self) -> None:
        """Cancel reads that have not begun."""
        self._upcoming = iter(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prefetch(self) -> None:
        while len(self._begun) < _PREFETCHED and (wanted := next(self._upcoming, None)) is not None:
            self._begun.append((wanted, self._begin(wanted)))

    @abstractmethod
    def _begin(self, wanted: Wanted) -> Callable[[], Rows]:
        """Start to read the rows in threads. Returns a function that waits for them."""

    def _empty(self, count: int, like: Tensor) -> Tensor:
        """Allocate ``count`` rows of a tensor's shape and type, pinned for a GPU."""
        return torch.empty(count, *like.shape[1:], dtype=like.dtype, pin_memory=self._device.type == "cuda")


class Gatherer(RowReader):
    """Copies rows of ``images`` and ``labels`` that don't fit into a GPU's memory."""

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        super().__init__(device, workers=1)
        self._sources = images, labels

    def _begin(self, wanted: Wanted) -> Callable[[], Rows]:
        return self._pool.submit(self._gather, wanted.samples).result

    def _gather(self, index: Tensor) -> Rows:
        images, labels = (
            torch.index_select(source, 0, index, out=self._empty(len(index), source)) for source in self._sources
        )
        return images, labels
