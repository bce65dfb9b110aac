"""The networks: one module each, found by its name. docs/models.md shows how to add one.

A model's module has its settings and one function, ``build(config, image)``, that returns a ``torch.nn.Module`` from
float images [n, C, H, W] to logits [n, classes]. Modules without settings are what models share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainers.core import options
from trainers.core.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    network: nn.Module = options.module("model", config.name).build(config, image)
    return network
