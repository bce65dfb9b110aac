"""The tensors that go from step to step, which a checkpoint holds: each rank's own, and what all ranks have alike."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from trainers.checkpoint.checkpoint import Checkpoint
from trainers.core.errors import TrainerError
from trainers.distributed import rank_state
from trainers.training.step import Stepper


class TrainingState:
    """Those of one rank's ``stepper``, looked up anew in each call."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def row(self) -> Tensor:
        """What is this rank's own, as a row [n] on its device."""
        return rank_state.row(self._own(), self._stepper.node.device)

    def rows_of_ranks(self, own: Tensor) -> Tensor:
        """A checkpoint's rows for the ranks of now; without shards they are rows of the ranks that wrote it."""
        stepper = self._stepper
        sharded = stepper.config.trainer.shards
        return rank_state.rows_of_ranks(own, stepper.node.ranks.world_size) if sharded else own

    def share_out(self, table: Tensor | None, row: Tensor) -> None:
        """Each rank gets its row of rank 0's table, and what all have alike for each of its parts."""
        self._stepper.buffers.reset()
        rank_state.fill(self._own(), self._stepper.node.scatter(table, row))

    def alike(self) -> list[Tensor]:
        """What all ranks have alike."""
        model, optimizer = self._replicated()
        return [*model.values(), *(item for tensors in optimizer.values() for item in tensors)]

    def load(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Overwrite what all have alike with a checkpoint of this ``folder``. Raises TrainerError: it doesn't fit."""
        stepper = self._stepper
        try:  # slices come from their own files
            stepper.model.load_state_dict(checkpoint.model, strict=stepper.strategy.layout.name == "ddp")
        except RuntimeError as error:
            raise TrainerError(
                f"the checkpoint of step {checkpoint.step} does not fit model={stepper.config.model.name} "
                f"({' '.join(str(error).split())[:200]}); delete {folder} to start afresh"
            ) from error
        for name, tensors in self._replicated()[1].items():
            if name == "powersgd" and name not in checkpoint.optimizer:
                continue  # written by one rank, which has nobody to send to
            for target, source in zip(tensors, checkpoint.optimizer[name], strict=True):
                target.copy_(source)

    def copies(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """What all have alike, of the model and of the optimizer, on the CPU and safe from the next step."""
        model, optimizer = self._replicated()
        copied = {name: list(map(_copy, items)) for name, items in optimizer.items()}
        return {name: _copy(value) for name, value in model.items()}, copied

    def _replicated(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        return self._stepper.strategy.layout.replicated(self._stepper.state())

    def _own(self) -> list[Tensor]:
        """Batch statistics of this rank's parts, and gradients that it hasn't sent."""
        return [*self._stepper.buffers.statistics(), *self._stepper.gradient_sync.own()]


def _copy(value: Tensor) -> Tensor:
    """On the CPU, safe from the next step. As it lies in memory: the writer has more time to put it in order."""
    return value.detach().to("cpu", copy=True)
