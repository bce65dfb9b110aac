"""Rows of data that have to be fetched first: copied, or decoded, by threads while the device computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

_PREFETCHED = 2  # batches: one travels to the device while the next is gathered

Rows = tuple[Tensor, Tensor]


class Wanted(NamedTuple):
    """The samples' places in the pack, int64 [n] on the CPU; and for images that are cropped while they are decoded
    what was drawn for them, int64 [n, 4] (see trainers.data.augment.EpochPlan)."""

    places: Tensor
    crops: Tensor | None = None

    def equals(self, other: Wanted) -> bool:
        """Whether the same rows are wanted."""
        if self.crops is None or other.crops is None:
            return self.crops is other.crops and torch.equal(self.places, other.places)
        return torch.equal(self.places, other.places) and torch.equal(self.crops, other.crops)


class RowReader(ABC):
    """Images uint8 [n, C, H, W] and labels int64 [n] of given places, on ``device``, a bounded number of batches ahead.

    Threads make the rows in pinned buffers, from which a copy to the device runs beside its computation. torch gives a
    buffer out again once the copies from it are done.
    """

    def __init__(self, device: torch.device, workers: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rows")
        self._upcoming: Iterator[Wanted] = iter(())
        self._begun: deque[tuple[Wanted, Callable[[], Rows]]] = deque()

    def expect(self, batches: Iterable[Wanted]) -> None:
        """The batches that will be taken from now on."""
        self._upcoming = iter(batches)
        self._begun.clear()
        self._prefetch()

    def take(self, wanted: Wanted) -> Rows:
        """The rows; read here and now where another batch was expected. Raises TrainerError."""
        if self._begun and self._begun[0][0].equals(wanted):
            rows = self._begun.popleft()[1]()
            self._prefetch()
        else:
            rows = self._begin(wanted)()
        images, labels = (item.to(self._device, non_blocking=True) for item in rows)
        return images, labels

    def close(self) -> None:
        """Nothing that hasn't begun is begun."""
        self._upcoming = iter(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prefetch(self) -> None:
        while len(self._begun) < _PREFETCHED and (wanted := next(self._upcoming, None)) is not None:
            self._begun.append((wanted, self._begin(wanted)))

    @abstractmethod
    def _begin(self, wanted: Wanted) -> Callable[[], Rows]:
        """Have the threads make the rows; the function waits for them."""

    def _empty(self, count: int, like: Tensor) -> Tensor:
        """Room for ``count`` rows of a tensor's shape and type."""
        return torch.empty(count, *like.shape[1:], dtype=like.dtype, pin_memory=self._device.type == "cuda")


class Gatherer(RowReader):
    """Copies rows of ``images`` and ``labels`` that don't fit into a GPU's memory."""

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        super().__init__(device, workers=1)
        self._sources = images, labels

    def _begin(self, wanted: Wanted) -> Callable[[], Rows]:
        return self._pool.submit(self._gather, wanted.places).result

    def _gather(self, index: Tensor) -> Rows:
        images, labels = (
            torch.index_select(source, 0, index, out=self._empty(len(index), source)) for source in self._sources
        )
        return images, labels
