"""How the steps of a run follow from the configuration, the data and the world size."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config import TrainerConfig
from trainers.data import Manifest
from trainers.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Sizes in images, lengths in steps. The images of an epoch that fill no global batch are left out;
    the order is new in every epoch, so they are others each time."""

    global_batch_size: int
    rank_batch_size: int
    per_epoch: int
    total: int

    def place(self, step: int) -> tuple[int, int]:
        """Epoch (from 0) and position in it (in steps) at which the given step (from 0) happens."""
        return divmod(step, self.per_epoch)

    def first_sample(self, position: int, rank: int) -> int:
        """Where in the epoch's order a rank's part of a global batch begins."""
        return position * self.global_batch_size + rank * self.rank_batch_size


def plan_steps(config: TrainerConfig, manifest: Manifest, world_size: int) -> Steps:
    """Raises TrainerError when the global batch cannot be divided, or is larger than the train split."""
    size, available = config.global_batch_size, manifest.size("train")
    if size % world_size:
        below = size // world_size * world_size
        good = [value for value in (below, below + world_size) if value]
        raise TrainerError(
            f"trainer.global_batch_size={size} does not divide among {world_size} ranks; "
            f"nearest good values: {', '.join(map(str, good))}"
        )
    if size > available:
        largest = available // world_size * world_size
        advice = f"set trainer.global_batch_size to at most {largest}" if largest else "use fewer ranks"
        raise TrainerError(
            f"the train split of {manifest.name} has {available} images, fewer than one global batch "
            f"of {size}; {advice}"
        )
    per_epoch = available // size
    total = per_epoch * config.epochs
    return Steps(
        global_batch_size=size,
        rank_batch_size=size // world_size,
        per_epoch=per_epoch,
        total=total if config.max_steps is None else min(total, config.max_steps),
    )
