"""A network that is not the one of its name, small and with batch normalisation."""

import sys
from dataclasses import dataclass

from torch import nn

from trainers.core.config import ModelConfig
from trainers.models import ImageShape


@dataclass(kw_only=True)
class OtherConfig(ModelConfig):
    """What small_cnn is told in these tests, for nothing."""

    width: int = 0
    hidden: int = 0
    dropout: float = 0.25


def stand_in(name: str) -> None:
    """From now on this module is the model ``name`` in this process."""
    sys.modules[f"trainers.models.{name}"] = sys.modules[__name__]


def build(config: OtherConfig, image: ImageShape) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(image.channels, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4, image.num_classes),
    )
