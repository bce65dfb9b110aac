"""The training loss and further metrics: torch's cross-entropy, or user-defined functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.core import options
from trainers.core.config import ConfigError, TrainerConfig
from trainers.core.errors import TrainerError
from trainers.data.pack import MappedPack

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
    """Build a user-defined loss, an instance or a function with ``args`` bound, and try it. Raises ConfigError."""
    own = options.load_target(target)
    kept = options.accepted(own, args, {"num_classes": classes})
    made: Any = own(**kept) if inspect.isclass(own) else functools.partial(own, **kept)
    if isinstance(made, nn.Module):
        made.to(device)
        if any(item.requires_grad for item in made.parameters()):
            raise ConfigError(f"{options.where(target)} has parameters, which no optimizer would train")
    # try it before the training: it must return a scalar that has a gradient
    logits = torch.zeros(_IMAGES, classes, device=device, requires_grad=True)
    value = made(logits, torch.zeros(_IMAGES, dtype=torch.int64, device=device))
    if not (isinstance(value, Tensor) and value.shape == () and value.requires_grad):
        raise ConfigError(
            f"{options.where(target)} returned {_seen(value)} for logits [{_IMAGES}, {classes}]; a loss must be a "
            "scalar that follows from the logits: their mean over the images"
        )
    loss: Loss = made
    return loss


def metrics(config: TrainerConfig, classes: int, device: torch.device) -> dict[str, Loss]:
    """Load user-defined metrics by name: functions of logits [n, classes] and labels [n] to a value per image, [n].

    Raises:
        ConfigError: a metric returns something else.
    """
    functions = {name: options.load_target(target) for name, target in config.metrics.items()}
    logits, labels = (
        torch.zeros(_IMAGES, classes, device=device),
        torch.zeros(_IMAGES, dtype=torch.int64, device=device),
    )
    for name, function in functions.items():
        value = function(logits, labels)
        if not isinstance(value, Tensor) or value.shape != (_IMAGES,):
            raise ConfigError(
                f"{options.where(config.metrics[name])} returned {_seen(value)} for logits [{_IMAGES}, {classes}]; a "
                f"metric must be a value for each image, [{_IMAGES}], whose mean is recorded"
            )
    return functions


def _seen(value: object) -> str:
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


def class_weights(wanted: str | list[float], pack: MappedPack) -> Tensor:
    """Return weights [classes] whose mean over the images of the train split is 1.

    Raises:
        TrainerError: another number of weights than of classes, or a class without training images.
    """
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
