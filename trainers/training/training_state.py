"""Collect and restore the tensors of a checkpoint: state of each rank, and state that all ranks hold alike."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainers.checkpoint.checkpoint import Checkpoint
from trainers.core.errors import TrainerError
from trainers.distributed import rank_state
from trainers.training.step import Stepper


class TrainingState:
    """Checkpoint state of one rank's ``stepper``. Each call reads the tensors from the stepper again."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def row(self) -> Tensor:
        """Return the state that only this rank holds (the batch statistics of its parts), as a row [n] on its device."""
        return rank_state.row(self._stepper.buffers.statistics(), self._stepper.context.device)

    def rows_of_ranks(self, own: Tensor) -> Tensor:
        """Convert a checkpoint's rows of parts (trainer.shards) to one row per current rank.

        Without shards, return the rows unchanged: one for each rank that wrote the checkpoint.
        """
        stepper = self._stepper
        sharded = stepper.config.trainer.shards
        return rank_state.rows_of_ranks(own, stepper.context.ranks.world_size) if sharded else own

    def share_out(self, table: Tensor | None, row: Tensor) -> None:
        """Scatter the rows of rank 0's table to the ranks, and reset the state of each part to the replicated one."""
        self._stepper.buffers.reset()
        rank_state.fill(self._stepper.buffers.statistics(), self._stepper.context.scatter(table, row))

    def alike(self) -> list[Tensor]:
        """Return the tensors that are the same on all ranks."""
        model, optimizer = self._replicated()
        return [*model.values(), *(item for tensors in optimizer.values() for item in tensors)]

    def load(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Copy a checkpoint's replicated state into the model and optimizer. Raises TrainerError: it does not fit."""
        stepper = self._stepper
        try:  # not strict with fsdp: the slices come from the files of each rank
            stepper.model.load_state_dict(checkpoint.model, strict=stepper.strategy.layout.name == "ddp")
        except RuntimeError as error:
            raise TrainerError(
                f"the checkpoint of step {checkpoint.step} does not fit model={stepper.config.model.name} "
                f"({' '.join(str(error).split())[:200]}); delete {folder} to start afresh"
            ) from error
        for name, tensors in self._replicated()[1].items():
            for target, source in zip(tensors, checkpoint.optimizer[name], strict=True):
                target.copy_(source)

    def copies(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return copies on the CPU of the replicated model and optimizer state, which the next step does not change."""
        model, optimizer = self._replicated()
        copied = {name: list(map(_copy, items)) for name, items in optimizer.items()}
        return {name: _copy(value) for name, value in model.items()}, copied

    def _replicated(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        return self._stepper.strategy.layout.replicated(self._stepper.state())


def _copy(value: Tensor) -> Tensor:
    # keep the memory layout: the checkpoint writer makes the tensor contiguous, outside of the training's time
    return value.detach().to("cpu", copy=True)
