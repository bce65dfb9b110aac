"""One optimizer step: batch, forward, backward, average, update. Nothing in here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers import optim
from trainers.augment import EpochPlan, Normaliser, training_batch
from trainers.batches import Steps
from trainers.config import TrainConfig
from trainers.data import Pack
from trainers.distributed import Node
from trainers.errors import TrainerError
from trainers.gradients import GradientAverager
from trainers.guard import UpdateGuard
from trainers.network import autocast, seed_device
from trainers.randomness import Stream, key
from trainers.shared_memory import share_memory


class Stepper:
    """What a step needs, put together once. The whole state beside the model is ``state()``."""

    def __init__(
        self,
        config: TrainConfig,
        pack: Pack,
        node: Node,
        model: nn.Module,
        *,
        steps: Steps,
        normalise: Normaliser,
        precision: str,
    ) -> None:
        """``precision``: fp32, bf16 or fp16."""
        self.config, self.pack, self.node, self.model = config, pack, node, model
        self.steps, self.normalise, self.precision = steps, normalise, precision
        self.parameters = list(model.parameters())
        self.optimizer = optim.build(config.optimizer, self.parameters)
        self.averager = self._averager()
        scales = precision == "fp16"
        guarded = scales or config.trainer.skip_nonfinite
        self.guard = UpdateGuard(model, node.device, scales=scales) if guarded else None
        self._peak_lr = optim.peak_lr(config.optimizer, node.ranks.world_size)

    def __call__(self, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Step ``step`` of the run, ``position`` of its epoch. Returns the mean loss (scalar) of this rank's part.

        Raises:
            TrainerError: the memory of the GPU is full.
        """
        rank = self.node.ranks.rank
        seed_device(self.node.device, key(self.config.seed, Stream.DROPOUT, step, rank))
        if self.guard is not None:
            self.guard.begin()
        try:
            loss = self._gradients(plan, self.steps.first_sample(position, rank))
            self._update(self.lr(step))
        except torch.OutOfMemoryError as error:
            raise TrainerError(out_of_memory(self.steps, rank)) from error
        return loss

    def _averager(self) -> GradientAverager:
        compression, memory = self.config.strategy.compression, None
        if compression == "none" and all(item.dtype == torch.float32 for item in self.parameters):
            memory = share_memory(sum(item.numel() for item in self.parameters), self.node)
        return GradientAverager(self.parameters, self.node.ranks.world_size, compression, memory)

    def lr(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        return optim.lr_at(
            self.config.schedule,
            self._peak_lr,
            step,
            total_steps=self.steps.total,
            steps_per_epoch=self.steps.per_epoch,
        )

    def state(self) -> dict[str, list[Tensor]]:
        """Named lists of tensors; load a checkpoint by copying into them."""
        guard = {} if self.guard is None else self.guard.state()
        return {**self.optimizer.state(), **guard}

    def _gradients(self, plan: EpochPlan, first: int) -> Tensor:
        """Average the gradients of the global batch; this rank's part begins at sample ``first`` of the epoch."""
        losses, size = [], self.steps.micro_batch_size
        self.averager.start()
        for number in range(self.steps.accumulate):
            if number == self.steps.accumulate - 1:
                self.averager.send_next()
            losses.append(self._backward(plan.batch(first + number * size, size)))
        self.averager.finish()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _update(self, lr: float) -> None:
        if self.guard is None:
            self.optimizer.step(lr)
        else:
            self.optimizer.step(lr, self.guard.inspect(self.optimizer.gradients()))
            self.guard.end()

    def _backward(self, part: EpochPlan) -> Tensor:
        """Add the gradients of one micro-batch; returns its mean loss."""
        config = self.config
        images, labels = training_batch(self.pack, part, config.dataset.crop_padding, self.normalise)
        with autocast(self.node.device, self.precision):
            logits = self.model(images)
        loss = functional.cross_entropy(logits.float(), labels, label_smoothing=config.trainer.label_smoothing)
        factor = 1 / self.steps.parts if self.guard is None else self.guard.scale / self.steps.parts
        (loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def out_of_memory(steps: Steps, rank: int) -> str:
    """What to do when a micro-batch doesn't fit: the next smaller one that divides a rank's part."""
    size = steps.micro_batch_size
    seen = f"GPU memory is full on rank {rank} with {size} images at once ({steps.rank_batch_size} a rank and step)"
    smaller = max((part for part in range(1, size) if steps.rank_batch_size % part == 0), default=None)
    if smaller is None:
        return f"{seen}; take a smaller model"
    accumulate = steps.rank_batch_size // smaller
    return f"{seen}; trainer.accumulate_steps={accumulate} takes {smaller} at once in the same global batch"
