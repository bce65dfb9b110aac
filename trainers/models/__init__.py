"""The networks, one module each (docs/models.md). A module has the network's settings and ``build(config, image)``,
which returns a ``torch.nn.Module`` from float images [n, C, H, W] to logits [n, classes]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainers.core import options
from trainers.core.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """The images and classes that a network must fit; sizes in pixels."""

    channels: int
    height: int
    width: int
    num_classes: int


@runtime_checkable
class Calibrated(Protocol):
    """A network that computes some of its weights from the data before the training."""

    def calibrate(self, images: Tensor) -> None:
        """``images``: normalised float images [n, C, H, W] of the train split, the same on every rank."""


def build(config: ModelConfig, image: ImageShape) -> nn.Module:
    """Build the named network with fresh weights from torch's global CPU generator. Raises ConfigError."""
    network: nn.Module = options.module("model", config.name).build(config, image)
    return network
