"""The yardsticks of benchmarks/training.py: the same network and data pack, trained by other loops.

``tuned`` is what somebody who knows torch well would write for data in memory: autocast, channels last, float images
made once, SGD with foreach, no reading of losses. ``guide`` is what the usual guides show: fp32, a DataLoader over
single images with torchvision's transforms, Adam, ``.item()`` in each step. ``lightning`` and ``accelerate`` are those
libraries as their own introductions show them, with autocast and a DataLoader over float tensors in memory, without
augmentation: the work that Paceline's and the tuned loop do for crops and flips is not asked of them.
All have torch's own dropout and dense layers. ``tick`` is called after each step; ``bf16`` switches autocast on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from trainers import models
from trainers.core import options
from trainers.data.pack import MappedPack
from trainers.models.small_cnn import Dropout, Linear

PADDING = 4  # pixels of the random crop


def network(name: str, pack: MappedPack) -> nn.Module:
    """Paceline's network with torch's own dropout and dense layers."""
    sizes = pack.manifest
    image = models.ImageShape(
        channels=sizes.channels, height=sizes.height, width=sizes.width, num_classes=sizes.num_classes
    )
    torch.manual_seed(0)
    model = models.build(options.settings("model", name)(), image)
    for parent in model.modules():
        for child_name, child in list(parent.named_children()):
            if isinstance(child, Dropout):
                setattr(parent, child_name, nn.Dropout(child.p))
            elif isinstance(child, Linear):
                setattr(parent, child_name, nn.Linear(child.in_features, child.out_features))
    return model


def tuned(name: str, pack: MappedPack, batch: int, steps: int, tick: Callable[[], None], bf16: bool) -> None:
    """Channels last, tensors in memory, flips and crops of a whole batch at once."""
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
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            outputs = model(inputs)
        functional.cross_entropy(outputs.float(), pack.labels[index]).backward()
        optimizer.step()
        tick()


class SingleImages(Dataset[tuple[Tensor, int]]):
    """As torchvision's CIFAR10: an image at a time, as a PIL image through the transforms."""

    def __init__(self, pack: MappedPack, transform: Callable[[Any], Tensor]) -> None:
        self.images = pack.images.permute(0, 2, 3, 1).numpy()
        self.labels: list[int] = pack.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = self.images[index]
        return self.transform(Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)), self.labels[index]


def guide(name: str, pack: MappedPack, batch: int, steps: int, tick: Callable[[], None], bf16: bool) -> None:
    """fp32 in torch's default layout whatever ``bf16`` says. The validation that every rank repeats isn't counted."""
    del bf16
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomCrop(pack.manifest.height, padding=PADDING),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * pack.manifest.channels, (0.25,) * pack.manifest.channels),
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


def in_memory(pack: MappedPack, batch: int, sampler: DistributedSampler[Any] | None) -> DataLoader[Any]:
    """Normalised float images and labels, batch by batch."""
    data = TensorDataset((pack.images.float() / 255 - 0.5) / 0.25, pack.labels)
    return DataLoader(data, batch_size=batch, sampler=sampler, shuffle=sampler is None, drop_last=True)


def lightning(name: str, pack: MappedPack, batch: int, steps: int, tick: Callable[[], None], bf16: bool) -> None:
    """A LightningModule under its Trainer with strategy ddp; logger, checkpoints, progress bar off."""
    from lightning.pytorch import LightningModule, Trainer

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name, pack)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            images, labels = batch
            return functional.cross_entropy(self.network(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=True)

        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_steps=steps, max_epochs=-1,
        precision="bf16-mixed" if bf16 else "32-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), in_memory(pack, batch, None))


def accelerate(name: str, pack: MappedPack, batch: int, steps: int, tick: Callable[[], None], bf16: bool) -> None:
    """Its five lines around a plain loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    model = network(name, pack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, in_memory(pack, batch, None))
    done = 0
    while done < steps:
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
            tick()
            done += 1
            if done == steps:
                break


LOOPS = {"tuned": tuned, "guide": guide, "lightning": lightning, "accelerate": accelerate}
