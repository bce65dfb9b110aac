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
from trainers.network import autocast, seed_device
from trainers.randomness import Stream, key


class Stepper:
    """What a step needs, put together once. The whole state beside the model is ``state()``."""

    def __init__(
        self, config: TrainConfig, pack: Pack, node: Node, model: nn.Module, steps: Steps, normalise: Normaliser
    ) -> None:
        self.config, self.pack, self.node, self.model = config, pack, node, model
        self.steps, self.normalise = steps, normalise
        self.parameters = list(model.parameters())
        self.optimizer = optim.build(config.optimizer, self.parameters)
        self.averager = GradientAverager(self.parameters, node.ranks.world_size)
        self._peak_lr = optim.peak_lr(config.optimizer, node.ranks.world_size)

    def __call__(self, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Step ``step`` of the run, ``position`` of its epoch. Returns the mean loss (scalar) of this rank's part.

        Raises:
            TrainerError: the memory of the GPU is full.
        """
        rank = self.node.ranks.rank
        seed_device(self.node.device, key(self.config.seed, Stream.DROPOUT, step, rank))
        first, losses = self.steps.first_sample(position, rank), []
        self.averager.start()
        for number in range(self.steps.accumulate):
            if number == self.steps.accumulate - 1:
                self.averager.send_next()
            part = plan.batch(first + number * self.steps.micro_batch_size, self.steps.micro_batch_size)
            losses.append(self._backward(part))
        self.averager.finish()
        self.optimizer.step(self.lr(step))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

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
        return dict(self.optimizer.state())

    def _backward(self, part: EpochPlan) -> Tensor:
        """Add the gradients of one micro-batch; returns its mean loss."""
        config = self.config
        images, labels = training_batch(self.pack, part, config.dataset.crop_padding, self.normalise)
        try:
            with autocast(self.node.device, config.trainer.precision):
                logits = self.model(images)
            loss = functional.cross_entropy(logits.float(), labels, label_smoothing=config.trainer.label_smoothing)
            (loss / self.steps.parts).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError as error:
            raise TrainerError(self._out_of_memory()) from error
        return loss.detach()

    def _out_of_memory(self) -> str:
        size, world_size = self.steps.rank_batch_size, self.node.ranks.world_size
        smaller = f"try trainer.global_batch_size={size // 2 * world_size}" if size > 1 else "take a smaller model"
        return f"GPU memory is full on rank {self.node.ranks.rank} with {size} images a rank; {smaller}"
