"""ResNet-50 for small images: 23,520,842 parameters for 3×32×32 and 10 classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trainers.core.config import ModelConfig
from trainers.models import ImageShape
from trainers.models.resnet18 import Bottleneck, residual_network


@dataclass(kw_only=True)
class ResNet50Config(ModelConfig):
    """Nothing to set."""

    name: str = "resnet50"


def build(config: ResNet50Config, image: ImageShape) -> nn.Module:
    return residual_network(Bottleneck, (3, 4, 6, 3), image)
