"""The sizes of a run's batches and its number of steps, computed from the configuration, the data and the world size.
A global batch is divided into parts (one a rank, or trainer.shards), and a part into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainers.contract.data_pack import Manifest
from trainers.core.config import TrainerConfig
from trainers.core.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Sizes in images, lengths in optimizer steps. Images at the end of an epoch's order that do not fill a global
    batch are left out. A part of the global batch has its own dropout and batch statistics; each rank computes one
    part, or with trainer.shards several.
    """

    global_batch_size: int
    rank_batch_size: int
    accumulate: int  # micro-batches per part and step
    per_epoch: int
    total: int
    parts_per_rank: int = 1

    @property
    def micro_batch_size(self) -> int:
        """Images of one forward and backward pass on one rank."""
        return self.part_size // self.accumulate

    @property
    def part_size(self) -> int:
        """Images of one part."""
        return self.rank_batch_size // self.parts_per_rank

    @property
    def parts(self) -> int:
        """Parts of a global batch, over all ranks."""
        return self.global_batch_size // self.part_size

    def parts_of(self, rank: int) -> range:
        """Return the numbers of a rank's parts."""
        return range(rank * self.parts_per_rank, (rank + 1) * self.parts_per_rank)

    def place(self, step: int) -> tuple[int, int]:
        """Return (epoch, number of the step in that epoch) of a step of the run; all counted from 0."""
        return divmod(step, self.per_epoch)

    def micro_batches(self, position: int, rank: int) -> Iterator[int]:
        """Yield the start of each of a rank's micro-batches in the epoch's order, from the step at ``position`` on."""
        for step in range(position, self.per_epoch):
            first = self.first_sample(step, rank)
            yield from range(first, first + self.rank_batch_size, self.micro_batch_size)

    def first_sample(self, position: int, rank: int) -> int:
        """Return the start of a rank's share of a global batch in the epoch's order."""
        return position * self.global_batch_size + rank * self.rank_batch_size


def plan_steps(config: TrainerConfig, manifest: Manifest, world_size: int) -> Steps:
    """Plan the steps of a run. Raises TrainerError, ConfigError."""
    config.check_ranks(world_size)
    size, available = config.global_batch_size, manifest.size("train")
    parts = (config.shards or world_size) * config.accumulate_steps
    if world_size > available:
        raise TrainerError(
            f"{world_size} ranks are more than the {available} images of the train split of {manifest.name}; "
            f"use at most {available} ranks"
        )
    if size % parts:
        below = size // parts * parts  # 0 if there are more parts than images
        good = [value for value in (below, below + parts) if value]
        raise TrainerError(
            f"trainer.global_batch_size={size} does not divide among {_among(world_size, config)}; "
            f"nearest good values: {', '.join(map(str, good))}"
        )
    if size > available:
        largest = available // parts * parts  # 0: even one image a part and micro-batch is too many
        lower = "lower trainer.accumulate_steps"
        advice = f"set trainer.global_batch_size to at most {largest}" if largest else lower
        raise TrainerError(
            f"the train split of {manifest.name} has {available} images, fewer than one global batch "
            f"of {size}; {advice}"
        )
    per_epoch = available // size
    total = per_epoch * config.epochs
    return Steps(
        global_batch_size=size,
        rank_batch_size=size // world_size,
        accumulate=config.accumulate_steps,
        per_epoch=per_epoch,
        total=total if config.max_steps is None else min(total, config.max_steps),
        parts_per_rank=max(1, config.shards // world_size),
    )


def _among(world_size: int, config: TrainerConfig) -> str:
    """Say among what a global batch is divided, such as ``4 ranks × 2 micro-batches (trainer.accumulate_steps)``."""
    whose = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if config.shards:
        whose = f"{config.shards} parts (trainer.shards)"
    accumulate = config.accumulate_steps
    return whose if accumulate == 1 else f"{whose} × {accumulate} micro-batches (trainer.accumulate_steps)"
