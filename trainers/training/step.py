"""One optimizer step: batch, forward pass, backward pass, average of the gradients, update. Nothing here waits for the
device. ``GradScaler``, ``clip`` and ``WeightAverage`` are its optional pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainers import optimizers, schedules, strategies
from trainers.checkpoint import Checkpoint
from trainers.contract.beats import Phase
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.data.augment import EpochPlan, Normaliser, own_augmentation, training_batch
from trainers.data.pack import MappedPack
from trainers.data.randomness import Stream, key
from trainers.data.step_plan import Steps
from trainers.distributed import rank_state
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.process_group import RankContext
from trainers.distributed.rank_state import PartBuffers
from trainers.strategies import Layout
from trainers.training import loss
from trainers.training.digests import GRADIENTS, INPUTS, TensorRecorder, gradients_of
from trainers.training.model_setup import autocast, moving_buffers, seed_generators, training_mode

_WARM_UP_STEPS = 3  # a CUDA graph needs three: run, record, replay
_FEW_IMAGES = 2  # the smallest batch that batch normalisation accepts


class Stepper:
    """Runs the steps of one rank, and holds the state that checkpoints store."""

    def __init__(
        self,
        config: TrainConfig,
        pack: MappedPack,
        context: RankContext,
        model: nn.Module,
        *,
        steps: Steps,
        normalise: Normaliser,
        precision: str,
    ) -> None:
        """``precision``: fp32, bf16 or fp16. Every rank must call it."""
        self.config, self.pack, self.context, self.model = config, pack, context, model
        self.steps, self.normalise, self.precision = steps, normalise, precision
        self.strategy = strategies.build(config, model, context, precision)
        self.network, self.gradient_sync = self.strategy.network, self.strategy.gradient_sync
        self.optimizer = optimizers.build(config.optimizer, self.strategy.layout.parameters)
        self.buffers = PartBuffers(model, steps.parts_per_rank)
        scales = precision == "fp16"
        guarded = scales or config.trainer.skip_nonfinite
        self.grad_scaler = GradScaler(self.buffers.statistics(), context.device, scales=scales) if guarded else None
        self.norm: Tensor | None = None  # of the last step's gradient before clipping, if it is clipped
        decay = config.trainer.ema
        self.average = WeightAverage(self.strategy.layout.parameters, decay) if decay else None
        self.loss = loss.build(config.trainer, pack, context.device)
        self.augmentation = own_augmentation(config.dataset, pack.manifest, context.device)
        self.tensor_recorder: TensorRecorder | None = None  # records the tensors of the next step
        self._prepares_kernels = config.trainer.compile or context.device.type == "cuda"
        self._divisor = steps.accumulate * max(1, config.trainer.shards)  # without shards the strategy averages
        self._peak_lr = optimizers.peak_lr(config.optimizer, context.ranks.world_size)

    def __call__(self, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Run a step, at ``position`` of its epoch; return the mean loss of each part here. Raises TrainerError."""
        if self.grad_scaler is not None:
            self.grad_scaler.begin()
        try:
            losses = self._gradients(plan, step, position)
            self._update(self.lr(step))
            if self.average is not None:
                self.average.update(step)
        except torch.OutOfMemoryError as error:
            raise TrainerError(out_of_memory(self.steps, self.context.ranks.rank)) from error
        return losses

    @property
    def warm_up_passes(self) -> int:
        """Number of passes before the first step, for compilation, GPU kernels and the strategy."""
        return max(self.gradient_sync.warm_up_passes, _WARM_UP_STEPS if self._prepares_kernels else 0)

    def warm_up(self, plan: EpochPlan) -> None:
        """Run passes that compile and prepare, with updates skipped and statistics restored. Raises TrainerError."""
        before = [(item, item.clone()) for item in self.model.buffers()]
        size = self.steps.micro_batch_size
        part = plan.batch(0, size if self._prepares_kernels else min(size, _FEW_IMAGES))
        try:
            for _ in range(self.warm_up_passes):
                self._begin()
                with self.gradient_sync.micro_batch(last=True):
                    self._backward(part)
                self.gradient_sync.finish()
                if self._prepares_kernels:  # found_inf = 1 makes the optimizer skip the update
                    self.optimizer.step(self.lr(0), torch.ones((), device=self.context.device))
        except torch.OutOfMemoryError as error:
            raise TrainerError(out_of_memory(self.steps, self.context.ranks.rank)) from error
        except Exception as error:
            if not self.config.trainer.compile or isinstance(error, TrainerError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise TrainerError(
                f"the network could not be compiled ({reason}); on a CPU this needs a C++ compiler; "
                "trainer.compile=false trains without"
            ) from error
        for buffer, value in before:
            buffer.copy_(value)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step (from 0)."""
        return schedules.lr_at(
            self.config.schedule,
            self._peak_lr,
            step,
            total_steps=self.steps.total,
            steps_per_epoch=self.steps.per_epoch,
        )

    def state(self) -> dict[str, list[Tensor]]:
        """Return the training state besides the model, as named lists; a checkpoint is loaded by copying into them."""
        scaler = {} if self.grad_scaler is None else self.grad_scaler.state()
        average = {} if self.average is None else {"average": self.average.values}
        return {**self.optimizer.state(), **scaler, **average}

    def own_row(self) -> Tensor:
        """Return the state that only this rank holds, the batch statistics of its parts, as a row [n] on its device."""
        return rank_state.row(self.buffers.statistics(), self.context.device)

    def scatter_rows(self, table: Tensor | None, row: Tensor) -> None:
        """Scatter the rows of rank 0's table to the ranks, and reset the state of each part to the replicated one."""
        self.buffers.reset()
        rank_state.fill(self.buffers.statistics(), self.context.scatter(table, row))

    def replicated_tensors(self) -> list[Tensor]:
        """Return the tensors that are the same on all ranks."""
        model, optimizer = self._replicated()
        return [*model.values(), *(item for tensors in optimizer.values() for item in tensors)]

    def load(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Copy a checkpoint's replicated state into the model and optimizer. Raises TrainerError: it does not fit."""
        # with fsdp, only the buffers are replicated here; ``distribute`` loads the slices of the weights
        (model, optimizer), is_whole = self._replicated(), self.strategy.layout.name == "ddp"
        weights = {name: value for name, value in checkpoint.model.items() if is_whole or name in model}
        try:
            self.model.load_state_dict(weights, strict=is_whole)
        except RuntimeError as error:
            raise TrainerError(
                f"the checkpoint of step {checkpoint.step} does not fit model={self.config.model.name} "
                f"({' '.join(str(error).split())[:200]}); delete {folder} to start afresh"
            ) from error
        for name, tensors in optimizer.items():
            for target, source in zip(tensors, checkpoint.optimizer[name], strict=True):
                target.copy_(source)

    def copies(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return the whole state of model and optimizer for a checkpoint, on rank 0. Every rank must call it."""
        return self.strategy.layout.copies(self.state())

    def distribute(self, checkpoint: Checkpoint | None) -> None:
        """Load this rank's slices from rank 0's checkpoint (None elsewhere). Every rank must call it."""
        self.strategy.layout.distribute(checkpoint, self.state())

    def _replicated(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        return self.strategy.layout.replicated(self.state())

    def begin_training(self) -> None:
        """Put the model into training mode, except for frozen layers."""
        training_mode(self.model, self.config.trainer.freeze)

    def average_statistics(self) -> None:
        """Replace the batch statistics by their mean over all parts of the global batch, on every rank."""
        if self.config.trainer.shards:
            self.buffers.average(self.context)
        else:
            self.context.average(moving_buffers(self.model, self.config.trainer.freeze))

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights (trainer.ema), if there are any."""
        return nullcontext() if self.average is None else self.average.in_place()

    def keep_averaged_weights(self) -> None:
        """Put the averaged weights into the model for good, after the last training step."""
        if self.average is not None:
            self.average.swap()
            self.average = None

    def _gradients(self, plan: EpochPlan, step: int, position: int) -> Tensor:
        """Average the gradients of the global batch, part by part; return this rank's losses, a scalar or [parts]."""
        losses, parts = [], self.steps.parts_of(self.context.ranks.rank)
        first = self.steps.first_sample(position, self.context.ranks.rank)
        self._begin()
        for number, part in enumerate(parts):
            if number:
                self.gradient_sync.next_part()
            # a part draws the same numbers on whatever rank it is computed
            seed_generators(self.context.device, key(self.config.seed, Stream.DROPOUT, step, part))
            with self.buffers.of(number):
                losses.append(self._part(plan, first + number * self.steps.part_size, last=part == parts[-1]))
        self.gradient_sync.finish()
        if self.tensor_recorder is not None:
            self.tensor_recorder.record(GRADIENTS, gradients_of(self.model))
        HEARTBEAT.enter(Phase.UPDATING)
        return losses[0] if len(losses) == 1 else torch.stack(losses)

    def _part(self, plan: EpochPlan, first: int, *, last: bool) -> Tensor:
        """Add the gradients of one part, which begins at sample ``first`` of the epoch. Returns its mean loss."""
        losses, size = [], self.steps.micro_batch_size
        for number in range(self.steps.accumulate):
            # only the last micro-batch of the last part communicates
            with self.gradient_sync.micro_batch(last=last and number == self.steps.accumulate - 1):
                losses.append(self._backward(plan.batch(first + number * size, size)))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _begin(self) -> None:
        """Clear the gradients of the previous step, and allow CUDA graphs to overwrite its outputs."""
        self.gradient_sync.start()
        if self.config.trainer.compile:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

    def _update(self, lr: float) -> None:
        found_inf: Tensor | None = None
        if self.grad_scaler is not None:
            found_inf = self.strategy.layout.agree(self.grad_scaler.inspect(self.optimizer.gradients()))
        if max_norm := self.config.trainer.clip_norm:  # after inspect(), which divides by the scale of fp16
            self.norm = clip(self.strategy.layout, max_norm, self.optimizer.gradients())
        self.optimizer.step(lr, found_inf)
        if self.grad_scaler is not None:
            self.grad_scaler.end()

    def _backward(self, part: EpochPlan) -> Tensor:
        """Add the gradients of one micro-batch; return its mean loss."""
        config = self.config
        HEARTBEAT.enter(Phase.LOADING)
        images, labels = training_batch(self.pack, part, config.dataset, self.normalise, self.augmentation)
        if self.tensor_recorder is not None:
            self.tensor_recorder.record(INPUTS, {"images": images, "labels": labels})
        HEARTBEAT.enter(Phase.COMPUTING)
        with autocast(self.context.device, self.precision):
            logits = self.network(images)
        value = self.loss(logits.float(), labels)
        scale = 1.0 if self.grad_scaler is None else self.grad_scaler.scale
        (value * (scale / self._divisor)).backward()  # type: ignore[no-untyped-call]
        return value.detach()


def out_of_memory(steps: Steps, rank: int) -> str:
    """Return the message for a full GPU, which advises the next smaller micro-batch that divides a part, if any."""
    size = steps.micro_batch_size
    seen = f"GPU memory is full on rank {rank} with {size} images at once ({steps.rank_batch_size} a rank and step)"
    smaller = max((part for part in range(1, size) if steps.part_size % part == 0), default=None)
    if smaller is None:
        return f"{seen}; take a smaller model"
    accumulate = steps.part_size // smaller
    return f"{seen}; trainer.accumulate_steps={accumulate} takes {smaller} at once in the same global batch"


_FIRST_SCALE = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0, 0.5, 2000  # torch.amp.GradScaler's defaults


class GradScaler:
    """Skips an update whose gradients are not finite, and scales the loss for fp16, by the rule of
    torch.amp.GradScaler (Micikevicius et al. 2018) but without waiting for the device. Unlike torch's, it also restores
    the batch statistics of a skipped step. Call ``begin()`` before the forward pass, ``inspect()`` after the gradients
    are averaged, and ``end()`` last.
    """

    def __init__(self, statistics: Sequence[Tensor], device: torch.device, *, scales: bool = False) -> None:
        self._scales = scales
        self.scale = torch.full((), _FIRST_SCALE if scales else 1.0, device=device)  # factor of the loss
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the last change of the scale
        self.found_inf = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)  # steps of the run so far
        self._buffers = [*statistics]
        self._before = [item.clone() for item in self._buffers]

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the batch statistics, for a step that is skipped."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    @torch.no_grad()
    def inspect(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scale in place. Returns ``found_inf``: 1.0 if one isn't finite, else 0.0."""
        self.found_inf.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self.found_inf, self.scale.reciprocal())
        return self.found_inf

    @torch.no_grad()
    def end(self) -> None:
        """Count a skipped update, restore its buffers, and choose the next scale."""
        self.skipped += self.found_inf.to(torch.int64)
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.found_inf > 0, before, buffer))
        if self._scales:
            torch._amp_update_scale_(self.scale, self._good_steps, self.found_inf, _GROWTH, _BACKOFF, _GROWTH_STEPS)

    def state(self) -> dict[str, list[Tensor]]:
        """Return the tensors that a checkpoint keeps."""
        return {"skipped": [self.skipped], "scale": [self.scale, self._good_steps]}


@torch.no_grad()
def clip(layout: Layout, max_norm: float, gradients: list[Tensor]) -> Tensor:
    """Scale the gradients down in place to ``max_norm`` (Pascanu et al. 2013); return their norm before that. Gradients
    and norm are those of the whole network, also where this rank has only slices.
    """
    norm = layout.whole_norm(get_total_norm(gradients))
    clip_grads_with_norm_(layout.parameters, max_norm, norm)
    return norm


class WeightAverage:
    """Exponential running average of the weights, by torch.optim.swa_utils (Polyak, Juditsky 1992); with fsdp, of this
    rank's slices. It starts with the weights after the first step. Buffers (batch statistics) are not averaged.
    """

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._parameters = list(parameters)
        self.values = [item.detach().clone() for item in self._parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step ``step`` of the run (from 0) to the average."""
        if step:
            self._update(self.values, self._parameters, step)
        else:
            torch._foreach_copy_(self.values, self._parameters)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Return a context in which the network has the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the network's weights and the averaged weights in ``values``, bit for bit."""
        for weights, average in zip(self._parameters, self.values, strict=True):
            before = weights.detach().clone()
            weights.copy_(average)
            average.copy_(before)
