"""Two convolutions and two dense layers: the network of the PyTorch MNIST example, for any image size.

Source: https://github.com/pytorch/examples/tree/main/mnist (1,199,882 parameters for 1×28×28 and 10 classes at the
default widths).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trainers.core.config import ConfigError, ModelConfig, at_least
from trainers.models import ImageShape
from trainers.models.layers import Dropout, Flatten, Linear

_LOST_PIXELS = 4  # two 3×3 convolutions without padding
_SMALLEST_PIXELS = _LOST_PIXELS + 2  # one 2×2 pooling window must be left


@dataclass(kw_only=True)
class SmallCNNConfig(ModelConfig):
    """Two convolutions and two dense layers, after the PyTorch MNIST example.

    Attributes:
        width: filters of the first convolution; the second has twice as many.
        hidden: outputs of the first dense layer.
        dropout: share of values dropped after the convolutions; twice this before the last layer.
    """

    name: str = "small_cnn"
    width: int = 32
    hidden: int = 128
    dropout: float = 0.25

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)
        at_least("model.hidden", self.hidden, 1)
        if not 0 <= self.dropout < 0.5:
            raise ConfigError(f"model.dropout={self.dropout} must lie in [0, 0.5)")


class SmallCNN(nn.Module):
    """Maps float images [n, C, H, W] to logits [n, classes]. H and W at least 6."""

    def __init__(self, config: SmallCNNConfig, image: ImageShape) -> None:
        super().__init__()
        pooled = ((image.height - _LOST_PIXELS) // 2) * ((image.width - _LOST_PIXELS) // 2)
        self.features = nn.Sequential(
            nn.Conv2d(image.channels, config.width, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(config.width, 2 * config.width, 3),
            nn.MaxPool2d(2),  # pool before the ReLU: the same values for a quarter of the ReLU's work
            nn.ReLU(inplace=True),
            Dropout(config.dropout),
        )
        self.classifier = nn.Sequential(
            Flatten(),
            Linear(2 * config.width * pooled, config.hidden),
            nn.ReLU(inplace=True),
            Dropout(2 * config.dropout),
            Linear(config.hidden, image.num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def build(config: SmallCNNConfig, image: ImageShape) -> nn.Module:
    """Raises ConfigError when the images are smaller than 6×6."""
    if min(image.height, image.width) < _SMALLEST_PIXELS:
        raise ConfigError(
            f"model=small_cnn needs images of at least {_SMALLEST_PIXELS}×{_SMALLEST_PIXELS} pixels, "
            f"the data has {image.height}×{image.width}; choose model=resnet18 or larger images"
        )
    return SmallCNN(config, image)
