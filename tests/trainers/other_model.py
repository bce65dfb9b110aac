"""A network that is not the one of its name, small and with batch normalisation."""

from torch import nn

from trainers.config import ModelConfig
from trainers.models import ImageShape


def build(config: ModelConfig, image: ImageShape) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(image.channels, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4, image.num_classes),
    )
