"""ResNet-18 for small images: 11,173,962 parameters for 3×32×32 and 10 classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trainers.core.config import ModelConfig
from trainers.models import ImageShape
from trainers.models.resnet import BasicBlock, residual_network


@dataclass(kw_only=True)
class ResNet18Config(ModelConfig):
    """Nothing to set."""

    name: str = "resnet18"


def build(config: ResNet18Config, image: ImageShape) -> nn.Module:
    """See trainers.models."""
    return residual_network(BasicBlock, (2, 2, 2, 2), image)
