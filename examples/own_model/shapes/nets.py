"""A network: conf/model/blocks.yaml names it."""

from torch import Tensor, nn


class Blocks(nn.Module):
    """Convolutions, each at half the size; the data say how many channels and classes there are."""

    def __init__(self, num_classes: int, channels: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for at in range(depth):
            before, behind = (channels if at == 0 else width << (at - 1)), width << at
            layers += [nn.Conv2d(before, behind, 3, stride=2, padding=1), nn.BatchNorm2d(behind), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(width << (depth - 1), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, channels, height, width]."""
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits
