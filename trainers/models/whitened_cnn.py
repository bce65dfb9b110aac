"""Six 3×3 convolutions after a fixed whitening layer, for the shortest training on small images.

The layout follows Jordan: 94% on CIFAR-10 in 3.29 seconds on a single GPU, 2024 (arXiv 2404.00498), and Page: How to
train your ResNet, 2018: the first layer has 2×2 filters that whiten the patches of the training images and stays fixed,
convolutions begin as identity filters, batch normalisation learns only its shift, and the head is small. For 3×32×32
and 10 classes at the default width: 1,971,352 trainable parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.core.config import ConfigError, ModelConfig, at_least
from trainers.models import ImageShape

_PATCH_PIXELS = 2  # side
_FLOOR = 5e-4  # added to the variances, so that directions without variance are not amplified to noise
_STATISTICS_SHARE = 0.4  # weight of the newest batch in the running statistics: weights change fast
_IMAGES_AT_ONCE = 250


@dataclass(kw_only=True)
class WhitenedCNNConfig(ModelConfig):
    """Six convolutions behind a fixed whitening layer, for short trainings on small images.

    Attributes:
        width: filters of the first block; the other two have four times as many.
    """

    name: str = "whitened_cnn"
    width: int = 64

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)


class Whitening(nn.Module):
    """Projects each patch on its principal components at unit variance, and on their negatives; the bias is learned."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        directions = channels * _PATCH_PIXELS**2
        self.convolution = nn.Conv2d(channels, 2 * directions, _PATCH_PIXELS)
        self.convolution.weight.requires_grad_(False)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]
        self.outputs = 2 * directions

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.convolution(images)
        return maps

    @torch.no_grad()
    def fit(self, images: Tensor) -> None:
        """Compute the filters from normalised images [n, C, H, W]."""
        weight = self.convolution.weight
        weight.copy_(whitening_filters(images).view(weight.shape))


def whitening_filters(images: Tensor) -> Tensor:
    """Return float32 filters [2d, d] for the d = 4·C values of a 2×2 patch, on the CPU, largest variance first.

    The sign of an eigenvector is arbitrary: here its largest component is positive.
    """
    size = images.shape[1] * _PATCH_PIXELS**2
    covariance, count = torch.zeros(size, size, dtype=torch.float64), 0
    for part in torch.split(images.cpu(), _IMAGES_AT_ONCE):
        patches = functional.unfold(part, _PATCH_PIXELS).transpose(1, 2).reshape(-1, size).double()
        covariance += patches.T @ patches
        count += len(patches)
    variances, vectors = torch.linalg.eigh(covariance / count)  # ascending; one eigenvector a column
    rows = vectors.T.flip(0)
    largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    filters = rows * largest.sign() / (variances.flip(0).clamp(min=0) + _FLOOR).sqrt().unsqueeze(1)
    return torch.cat([filters, -filters]).float()


class Block(nn.Module):
    """Convolution, 2×2 pooling, convolution; each followed by batch normalisation and GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inputs, outputs), _normalisation(outputs)
        self.conv2, self.norm2 = _convolution(outputs, outputs), _normalisation(outputs)

    def forward(self, maps: Tensor) -> Tensor:
        maps = self.conv1(maps)
        if min(maps.shape[2:]) > 1:
            maps = functional.max_pool2d(maps, 2)
        maps = functional.gelu(self.norm1(maps))
        return functional.gelu(self.norm2(self.conv2(maps)))


class WhitenedCNN(nn.Module):
    """Maps float images [n, C, H, W] to logits [n, classes]. H and W at least 2."""

    def __init__(self, config: WhitenedCNNConfig, image: ImageShape) -> None:
        super().__init__()
        narrow, wide = config.width, 4 * config.width
        self.whitening = Whitening(image.channels)
        self.blocks = nn.Sequential(Block(self.whitening.outputs, narrow), Block(narrow, wide), Block(wide, wide))
        self.head = nn.Linear(wide, image.num_classes, bias=False)
        nn.init.normal_(self.head.weight, std=1 / wide)

    def calibrate(self, images: Tensor) -> None:
        """Compute the whitening filters (see trainers.models.Calibrated)."""
        self.whitening.fit(images)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(functional.gelu(self.whitening(images)))
        logits: Tensor = self.head(maps.flatten(2).max(2).values)  # compiled for a GPU, the gradient of amax is NaN
        return logits


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    """Create a convolution whose first filters pass their input on; the others have torch's random weights."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:inputs])
    return convolution


def _normalisation(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, momentum=_STATISTICS_SHARE)
    layer.weight.requires_grad_(False)
    return layer


def build(config: WhitenedCNNConfig, image: ImageShape) -> nn.Module:
    """Build the network. Raises ConfigError if the images have a side of one pixel."""
    if min(image.height, image.width) < _PATCH_PIXELS:
        raise ConfigError(
            f"model=whitened_cnn needs images of at least {_PATCH_PIXELS}×{_PATCH_PIXELS} pixels, "
            f"the data has {image.height}×{image.width}; choose model=resnet18 or larger images"
        )
    return WhitenedCNN(config, image)
