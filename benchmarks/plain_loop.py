"""The yardsticks of benchmarks/training.py: loops in plain PyTorch, with its own DistributedDataParallel.

``tuned`` is what somebody who knows torch well would write for data in memory: channels last, float images made
once, SGD with foreach, no reading of losses. ``guide`` is what the usual guides show: a DataLoader over single
images with torchvision's transforms, Adam, ``.item()`` in each step. Both take Paceline's network with torch's own
dropout, and its data pack. ``tick`` is called after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from trainers import models
from trainers.config import ModelConfig, SmallCNNConfig
from trainers.data import Pack
from trainers.models.dropout import Dropout

PADDING = 4  # pixels of the random crop


def network(name: str, pack: Pack) -> nn.Module:
    """Paceline's network with torch's own dropout."""
    sizes = pack.manifest
    image = models.ImageShape(
        channels=sizes.channels, height=sizes.height, width=sizes.width, num_classes=sizes.num_classes
    )
    torch.manual_seed(0)
    model = models.build(SmallCNNConfig() if name == "small_cnn" else ModelConfig(name=name), image)
    for parent in model.modules():
        for child_name, child in list(parent.named_children()):
            if isinstance(child, Dropout):
                setattr(parent, child_name, nn.Dropout(child.p))
    return model


def tuned(name: str, pack: Pack, batch: int, steps: int, tick: Callable[[], None]) -> None:
    """fp32, channels last, tensors in memory, flips and crops of a whole batch at once."""
    model = DistributedDataParallel(
        network(name, pack).to(memory_format=torch.channels_last), gradient_as_bucket_view=True, static_graph=True
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)
    images = (pack.images.float() / 255 - 0.5) / 0.25
    images = functional.pad(images, (PADDING,) * 4).contiguous(memory_format=torch.channels_last)
    rank, world_size, (height, width) = dist.get_rank(), dist.get_world_size(), pack.images.shape[2:]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).repeat(steps)
    for step in range(steps):
        index = order[(step * world_size + rank) * batch :][:batch]
        top, left = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()  # one for the batch: the quickest way
        window = images[index][:, :, top : top + height, left : left + width]
        inputs = (window.flip(3) if step % 2 else window).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), pack.labels[index]).backward()
        optimizer.step()
        tick()


class SingleImages(Dataset[tuple[Tensor, int]]):
    """As torchvision's CIFAR10: an image at a time, as a PIL image through the transforms."""

    def __init__(self, pack: Pack, transform: Callable[[Any], Tensor]) -> None:
        self.images = pack.images.permute(0, 2, 3, 1).numpy()
        self.labels: list[int] = pack.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def guide(name: str, pack: Pack, batch: int, steps: int, tick: Callable[[], None]) -> None:
    """fp32 in torch's default layout; its validation, which every rank would repeat, is not even counted."""
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomCrop(pack.manifest.height, padding=PADDING),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        ]
    )
    data = SingleImages(pack, transform)
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data), drop_last=True)
    model = DistributedDataParallel(network(name, pack)).train()
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    done, running_loss = 0, 0.0
    while done < steps:
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            tick()
            done += 1
            if done == steps:
                break
