"""Batches: which samples, cropped and flipped how, normalised. All of it on the device, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trainers.config import DatasetConfig
from trainers.data import Manifest, Pack, take
from trainers.randomness import Stream, below, epoch_order, key, random_bits


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """``image × scale + shift`` turns uint8 into floats; both have shape [1, C, 1, 1]."""

    scale: Tensor
    shift: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] → float32 of the same shape, channels last in memory."""
        floats = images.to(torch.float32, memory_format=torch.channels_last)
        return floats.mul_(self.scale).add_(self.shift)


def normaliser(manifest: Manifest, *, normalise: bool, device: torch.device) -> Normaliser:
    """By mean and std of the train split, or to 0..1 when ``normalise`` is off."""
    shape = (1, manifest.channels, 1, 1)
    mean = torch.tensor(manifest.mean if normalise else [0.0] * manifest.channels, dtype=torch.float64)
    std = torch.tensor(manifest.std if normalise else [1.0] * manifest.channels, dtype=torch.float64)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))  # a constant channel has nothing to scale
    scale, shift = (1 / (255 * std)).float(), (-mean / std).float()
    return Normaliser(scale=scale.view(shape).to(device), shift=shift.view(shape).to(device))


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """What one epoch does to the train split, in visiting order. All tensors have shape [samples].

    ``index`` counts from the start of the pack (int64); ``top`` and ``left`` are the crop's corner in
    the padded image in pixels (int64); ``mirrored`` is bool. None: that augmentation is off.
    """

    index: Tensor
    top: Tensor | None
    left: Tensor | None
    mirrored: Tensor | None

    def batch(self, start: int, count: int) -> EpochPlan:
        """The plan of ``count`` samples from position ``start``."""
        part = slice(start, start + count)
        pick = [None if item is None else item[part] for item in (self.top, self.left, self.mirrored)]
        return EpochPlan(index=self.index[part], top=pick[0], left=pick[1], mirrored=pick[2])


def plan_epoch(config: DatasetConfig, pack: Pack, *, seed: int, epoch: int) -> EpochPlan:
    """A pure function of (seed, epoch) and the pack; every rank computes the same and takes its slices."""
    start, stop = pack.manifest.splits["train"]
    order = epoch_order(seed, epoch, stop - start, pack.images.device)
    bits = random_bits(key(seed, Stream.AUGMENT, epoch), order)
    reach = 2 * config.crop_padding + 1
    return EpochPlan(
        index=order + start,
        top=below(bits, 0, reach) if config.crop_padding else None,
        left=below(bits, 24, reach) if config.crop_padding else None,
        mirrored=below(bits, 40, 2).bool() if config.flip else None,
    )


def augmented(images: Tensor, plan: EpochPlan, padding: int) -> Tensor:
    """Crop (black border of ``padding`` pixels) and mirror uint8 [N, C, H, W] as ``plan`` says."""
    count, _, height, width = images.shape
    if plan.top is not None and plan.left is not None:
        padded = functional.pad(images, (padding, padding, padding, padding))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [N, C, 2p+1, 2p+1, H, W]
        images = windows[torch.arange(count, device=images.device), :, plan.top, plan.left]
    if plan.mirrored is not None:
        images = torch.where(plan.mirrored.view(-1, 1, 1, 1), images.flip(3), images)
    return images


def training_batch(pack: Pack, plan: EpochPlan, padding: int, normalise: Normaliser) -> tuple[Tensor, Tensor]:
    """Normalised float32 images [n, C, H, W] and int64 labels [n] of a slice of an epoch's plan."""
    device = normalise.scale.device
    images, labels = take(pack.images, plan.index, device), take(pack.labels, plan.index, device)
    moved = [None if item is None else item.to(device) for item in (plan.top, plan.left, plan.mirrored)]
    plan = EpochPlan(index=plan.index, top=moved[0], left=moved[1], mirrored=moved[2])
    return normalise(augmented(images, plan, padding)), labels
