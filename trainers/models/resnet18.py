"""ResNet-18 for small images: 11,173,962 parameters for 3×32×32 and 10 classes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trainers.core.config import ModelConfig
from trainers.models import ImageShape

_WIDTHS = (64, 128, 256, 512)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        inner = self.relu(self.bn1(self.conv1(images)))
        output: Tensor = self.relu(self.bn2(self.conv2(inner)).add_(shortcut))
        return output


class Bottleneck(nn.Module):
    """1×1 reduction, 3×3 convolution (with the stride), 1×1 expansion to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        inner = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images))))))
        output: Tensor = self.relu(self.bn3(self.conv3(inner)).add_(shortcut))
        return output


class ResNet(nn.Module):
    """Maps float images [n, C, H, W] to logits [n, classes]; any H and W from 1."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], image: ImageShape) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(image.channels, _WIDTHS[0], 3), nn.BatchNorm2d(_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        inputs = _WIDTHS[0]
        for number, (width, depth) in enumerate(zip(_WIDTHS, depths, strict=True), start=1):
            strides = [1 if number == 1 else 2] + [1] * (depth - 1)
            blocks: list[nn.Module] = []
            for stride in strides:
                blocks.append(block(inputs, width, stride))
                inputs = width * block.expansion
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, image.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.relu(self.bn1(self.conv1(images)))
        for number in range(1, len(_WIDTHS) + 1):
            maps = self.get_submodule(f"layer{number}")(maps)
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


def residual_network(
    block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, int, int, int], image: ImageShape
) -> nn.Module:
    """Build a ResNet with He initialisation of the convolutions. ``depths``: blocks of each of the four stages."""
    network = ResNet(block, depths, image)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


@dataclass(kw_only=True)
class ResNet18Config(ModelConfig):
    """Nothing to set."""

    name: str = "resnet18"


def build(config: ResNet18Config, image: ImageShape) -> nn.Module:
    return residual_network(BasicBlock, (2, 2, 2, 2), image)
