"""The networks: a registry from name to module, imported on use.

A model module has one function, ``build(config, image)``, that returns a ``torch.nn.Module`` from
float images [n, C, H, W] to logits [n, classes]. docs/models.md shows how to add one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainers.config import ConfigError, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

MODELS = {
    "small_cnn": "trainers.models.small_cnn",
    "whitened_cnn": "trainers.models.whitened_cnn",
    "resnet18": "trainers.models.resnet",
    "resnet50": "trainers.models.resnet",
}


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What a network must fit: sizes in pixels, and how many classes to tell apart."""

    channels: int
    height: int
    width: int
    num_classes: int


@runtime_checkable
class Calibrated(Protocol):
    """A network that sets some of its weights from the data before it is trained."""

    def calibrate(self, images: Tensor) -> None:
        """``images``: normalised float images [n, C, H, W] of the train split, the same on every rank."""


def build(config: ModelConfig, image: ImageShape) -> nn.Module:
    """Make the named network with fresh weights from torch's global CPU generator.

    Raises:
        ConfigError: no such model, or one that does not fit the image size.
    """
    if config.name not in MODELS:
        raise ConfigError(f"model.name={config.name!r} is not an option; choose one of: {', '.join(MODELS)}")
    network: nn.Module = importlib.import_module(MODELS[config.name]).build(config, image)
    return network
