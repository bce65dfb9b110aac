"""The loss function of a training and its further metrics (torch's cross-entropy, or user-defined functions), and
``Losses``, which collects the values of all steps and ranks until they are logged."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.core import options
from trainers.core.config import ConfigError, TrainerConfig
from trainers.core.errors import TrainerError
from trainers.data.pack import MappedPack
from trainers.distributed.process_group import RankContext

_IMAGES = 2  # batch size of the trial call of a user-defined function

Loss = Callable[[Tensor, Tensor], Tensor]
"""float32 logits [n, classes] and labels [n] → the mean over the n images, a scalar."""


def build(config: TrainerConfig, pack: MappedPack, device: torch.device) -> Loss:
    """Return the loss that the configuration names. Raises TrainerError: it doesn't fit the data."""
    if config.loss is not None:
        return _own_loss(config.loss, config.loss_args, pack.manifest.num_classes, device)
    if config.class_weights is None:
        return functools.partial(functional.cross_entropy, label_smoothing=config.label_smoothing)
    weights = class_weights(config.class_weights, pack).to(device)
    return functools.partial(_weighted, weights=weights, label_smoothing=config.label_smoothing)


def _own_loss(target: str, args: Mapping[str, Any], classes: int, device: torch.device) -> Loss:
    """Load and try a user-defined loss: a class whose objects are called, or a function. Raises ConfigError."""
    loaded = options.load_target(target)
    arguments = options.accepted(loaded, args, {"num_classes": classes})
    function: Any = loaded(**arguments) if inspect.isclass(loaded) else functools.partial(loaded, **arguments)
    if isinstance(function, nn.Module):
        function.to(device)
        if any(item.requires_grad for item in function.parameters()):
            raise ConfigError(f"{options.where(target)} has parameters, which no optimizer would train")
    # try it before the training: it must return a scalar that has a gradient
    logits = torch.zeros(_IMAGES, classes, device=device, requires_grad=True)
    value = function(logits, torch.zeros(_IMAGES, dtype=torch.int64, device=device))
    if not (isinstance(value, Tensor) and value.shape == () and value.requires_grad):
        raise ConfigError(
            f"{options.where(target)} returned {_kind(value)} for logits [{_IMAGES}, {classes}]; a loss must be a "
            "scalar that follows from the logits: their mean over the images"
        )
    loss: Loss = function
    return loss


def metrics(config: TrainerConfig, classes: int, device: torch.device) -> dict[str, Loss]:
    """Load and try user-defined metrics: logits [n, classes] and labels [n] to values [n]. Raises ConfigError."""
    functions = {name: options.load_target(target) for name, target in config.metrics.items()}
    logits, labels = (
        torch.zeros(_IMAGES, classes, device=device),
        torch.zeros(_IMAGES, dtype=torch.int64, device=device),
    )
    for name, function in functions.items():
        value = function(logits, labels)
        if not isinstance(value, Tensor) or value.shape != (_IMAGES,):
            raise ConfigError(
                f"{options.where(config.metrics[name])} returned {_kind(value)} for logits [{_IMAGES}, {classes}]; a "
                f"metric must be a value for each image, [{_IMAGES}], whose mean is recorded"
            )
    return functions


def _kind(value: object) -> str:
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


def class_weights(wanted: str | list[float], pack: MappedPack) -> Tensor:
    """Return weights [classes] whose mean over the images of the train split is 1. Raises TrainerError."""
    classes = pack.manifest.num_classes
    start, stop = pack.manifest.splits["train"]
    counts = torch.bincount(pack.labels[start:stop].cpu(), minlength=classes).to(torch.float64)
    if isinstance(wanted, str):
        if not bool(counts.all()):
            missing = int((counts == 0).nonzero()[0])
            raise TrainerError(
                f"trainer.class_weights=balanced: the train split has no image of class {missing} (from 0); give a "
                f"list of {classes} weights"
            )
        weights = 1 / counts
    else:
        weights = torch.tensor(wanted, dtype=torch.float64)
    if len(weights) != classes:
        raise TrainerError(
            f"trainer.class_weights has {len(weights)} weights, and {pack.manifest.name} has {classes} classes"
        )
    mean = float((weights * counts).sum() / counts.sum())
    if not mean > 0:
        raise TrainerError("trainer.class_weights are 0 for every image of the train split")
    return (weights / mean).float()


def _weighted(logits: Tensor, labels: Tensor, *, weights: Tensor, label_smoothing: float) -> Tensor:
    """Return the weighted cross-entropy, divided by the number of images.

    torch divides by the sum of the weights, which differs between micro-batches, so their means would not add up.
    """
    total = functional.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=label_smoothing)
    return total / len(labels)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The losses of one interval, and rank 0's request (``Losses.request``)."""

    loss: float  # mean over the steps and all ranks; NaN: none was finite
    steps: int
    checkpoint_requested: bool
    stop_requested: bool


class Losses:
    """The training losses since the last read, on the device, a row per part of the global batch (without
    trainer.shards, per rank). Only ``read`` and ``unread`` wait for the device. A request of rank 0 travels with them.
    """

    def __init__(self, context: RankContext, capacity: int, parts_per_rank: int = 1) -> None:
        """``capacity``: the most steps between two reads."""
        self._context = context
        first, self._source = context.ranks.rank * parts_per_rank, "on rank" if parts_per_rank == 1 else "in part"
        self._own = slice(first, first + parts_per_rank)
        rows = context.ranks.world_size * parts_per_rank
        self._values = torch.zeros(rows, capacity + 1, device=context.device)  # last column: rank 0's request
        self._count = 0  # columns in use
        self._restored = 0  # how many of them an earlier attempt has computed

    def add(self, loss: Tensor) -> None:
        """Keep the mean losses of this rank's parts of the batch: a scalar, or [parts]."""
        self._values[self._own, self._count].copy_(loss.detach())
        self._count += 1

    def unread(self, last_step: int, *, saved_step: int, skip_nonfinite: bool) -> list[list[float]]:
        """Take out the losses that were not read yet, a row for each part, for ``restore``. Raises as ``read`` does."""
        rows, _ = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        return rows

    def restore(self, count: int, rows: Sequence[Sequence[float]] = ()) -> None:
        """Put back ``unread`` losses. Every rank passes ``count``, the length of a row; one rank passes the rows."""
        self._count = self._restored = count
        for part, row in enumerate(rows):
            self._values[part, :count] = torch.tensor(row, device=self._values.device)

    def request(self, *, stop: bool = False) -> None:
        """Let rank 0 request a checkpoint (with ``stop``, the end of the run) at the next read."""
        self._values[0, -1].clamp_(min=2.0 if stop else 1.0)

    def read(self, last_step: int, *, saved_step: int = 0, skip_nonfinite: bool = False) -> Reading:
        """Return the mean loss since the last read, over all ranks; every rank must call it. ``last_step``: of these
        losses; ``saved_step``: of the newest checkpoint, for the message. Raises TrainerError: a loss is not finite.
        """
        steps = self._count - self._restored
        rows, request = self._rows()
        if not skip_nonfinite:
            self._refuse_nonfinite(rows, last_step, saved_step)
        finite = [loss for row in rows for loss in row if math.isfinite(loss)]
        mean = sum(finite) / len(finite) if finite else math.nan
        return Reading(loss=mean, steps=steps, checkpoint_requested=request > 0, stop_requested=request > 1)

    def _rows(self) -> tuple[list[list[float]], float]:
        """Take out the losses of all ranks, [parts][steps], and rank 0's request."""
        count, self._count, self._restored = self._count, 0, 0
        # each rank has filled its own rows, so the sum puts all rows together
        table: list[list[float]] = self._context.read(self._context.sum(self._values))
        self._values.zero_()
        return [row[:count] for row in table], table[0][-1]

    def _refuse_nonfinite(self, rows: Sequence[Sequence[float]], last_step: int, saved_step: int) -> None:
        count = len(rows[0])
        for column in range(count):
            bad = [number for number, row in enumerate(rows) if not math.isfinite(row[column])]
            if bad:
                where = f"at step {last_step - count + 1 + column} {self._source} {', '.join(map(str, bad))}"
                last_good = f"the last good checkpoint is that of step {saved_step}"
                last_good = last_good if saved_step else "there is no checkpoint yet"
                raise TrainerError(
                    f"the training loss is {rows[bad[0]][column]} {where}; {last_good}; a lower optimizer.lr or "
                    "trainer.precision=fp32 usually helps, trainer.skip_nonfinite=true leaves such steps out"
                )
