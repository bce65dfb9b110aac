"""The loss of a training step: torch's cross-entropy, with weights of the classes where the configuration has some."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trainers.core.config import TrainerConfig
from trainers.core.errors import TrainerError
from trainers.data.pack import MappedPack

Loss = Callable[[Tensor, Tensor], Tensor]
"""float32 logits [n, classes] and labels [n] → the mean over the n images, a scalar."""


def build(config: TrainerConfig, pack: MappedPack, device: torch.device) -> Loss:
    """The loss that the configuration names. Raises TrainerError: it doesn't fit the data."""
    if config.class_weights is None:
        return functools.partial(functional.cross_entropy, label_smoothing=config.label_smoothing)
    weights = class_weights(config.class_weights, pack).to(device)
    return functools.partial(_weighted, weights=weights, label_smoothing=config.label_smoothing)


def class_weights(wanted: str | list[float], pack: MappedPack) -> Tensor:
    """Weights [classes] whose mean over the images of the train split is 1.

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
    """Divided by the number of images and not by the sum of their weights: then ranks and micro-batches add up."""
    total = functional.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=label_smoothing)
    return total / len(labels)
