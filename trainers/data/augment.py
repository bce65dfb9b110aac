"""The augmentation of training images. ``plan_epoch`` draws the order of an epoch and the crop, flip and cutout of each
image; ``training_batch`` applies a part of that plan on the device, and normalises the images."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainers.contract.data_pack import Manifest
from trainers.core import options
from trainers.core.config import ConfigError, DatasetConfig
from trainers.core.errors import TrainerError
from trainers.data.pack import MappedPack, RowRequest
from trainers.data.randomness import Stream, below, epoch_order, key, libraries_restored, random_bits, seed_libraries

_TRIED = 2  # black images with which a user's augmentation is tried

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""uint8 [n, C, H, W] and the random bits of each sample, int64 [n] → uint8 of the same shape."""


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """Converts uint8 images to floats: ``image × scale + shift``; both have shape [1, C, 1, 1]."""

    scale: Tensor
    shift: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] → float32 of the same shape, channels last in memory."""
        floats = images.to(torch.float32, memory_format=torch.channels_last)
        return floats.mul_(self.scale).add_(self.shift)


def normaliser(manifest: Manifest, *, normalise: bool, device: torch.device) -> Normaliser:
    """Normalise by mean and std of the train split, or to 0..1 if ``normalise`` is off."""
    shape = (1, manifest.channels, 1, 1)
    mean = torch.tensor(manifest.mean if normalise else [0.0] * manifest.channels, dtype=torch.float64)
    std = torch.tensor(manifest.std if normalise else [1.0] * manifest.channels, dtype=torch.float64)
    std = torch.where(std > 1e-6, std, torch.ones_like(std))  # a constant channel isn't scaled
    scale, shift = (1 / (255 * std)).float(), (-mean / std).float()
    return Normaliser(scale=scale.view(shape).to(device), shift=shift.view(shape).to(device))


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The samples of one epoch in visiting order, and the augmentation of each: int64 [samples]; None: it is off."""

    index: Tensor  # in the pack
    top: Tensor | None = None  # corner of the crop in the padded image
    left: Tensor | None = None
    mirrored: Tensor | None = None  # bool [samples]
    # [samples, 4]: random numbers below 2**24 for a random-resized crop's area, proportions, place across and down
    crops: Tensor | None = None
    hole_y: Tensor | None = None  # centre of the cutout
    hole_x: Tensor | None = None
    seeds: Tensor | None = None  # random bits for a user-defined augmentation

    def batch(self, start: int, count: int) -> EpochPlan:
        """Return the plan of ``count`` samples from position ``start``."""
        return self._each(lambda item: item[start : start + count])

    def to(self, device: torch.device) -> EpochPlan:
        """Move the plan to a device, except ``index`` and ``crops``, which are used where the data lie."""
        return replace(self._each(lambda item: item.to(device)), index=self.index, crops=self.crops)

    @property
    def row_request(self) -> RowRequest:
        """The samples and crops of this plan, as a reader of rows needs them."""
        return RowRequest(self.index, self.crops)

    def _each(self, change: Callable[[Tensor], Tensor]) -> EpochPlan:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def plan_epoch(config: DatasetConfig, pack: MappedPack, *, seed: int, epoch: int) -> EpochPlan:
    """Plan an epoch: a pure function of (seed, epoch) and the pack, on all ranks alike. Raises TrainerError."""
    start, stop = pack.manifest.splits["train"]
    if config.crop_border == "reflect" and config.crop_padding >= min(pack.manifest.height, pack.manifest.width):
        raise TrainerError(
            f"dataset.crop_padding={config.crop_padding} reflects more than the {pack.manifest.height}×"
            f"{pack.manifest.width} images have; use a smaller one, or dataset.crop_border=black"
        )
    order = epoch_order(seed, epoch, stop - start, pack.images.device)
    # the 64 bits of a sample serve for several numbers: bits 0 to 23, 24 to 47, and from 40 on one for the flip
    bits = random_bits(key(seed, Stream.AUGMENT, epoch), order)
    holes = random_bits(key(seed, Stream.CUTOUT, epoch), order) if config.cutout else None
    offsets = 2 * config.crop_padding + 1  # places of a crop along one side of the padded image
    return EpochPlan(
        index=order + start,
        top=below(bits, 0, offsets) if config.crop_padding else None,
        left=below(bits, 24, offsets) if config.crop_padding else None,
        mirrored=_mirrored(config, order, bits, seed=seed, epoch=epoch) if config.flip else None,
        hole_y=None if holes is None else below(holes, 0, pack.manifest.height),
        hole_x=None if holes is None else below(holes, 24, pack.manifest.width),
        seeds=random_bits(key(seed, Stream.OWN, epoch), order) if config.augmentation is not None else None,
        crops=_resized_crops(order, seed=seed, epoch=epoch) if config.random_resized_crop else None,
    )


def _resized_crops(order: Tensor, *, seed: int, epoch: int) -> Tensor:
    shape, place = (random_bits(key(seed, Stream.RESIZED_CROP, epoch, number), order) for number in range(2))
    return torch.stack([below(bits, shift, 1 << 24) for bits in (shape, place) for shift in (0, 24)], dim=1)


def _mirrored(config: DatasetConfig, order: Tensor, bits: Tensor, *, seed: int, epoch: int) -> Tensor:
    """Draw the flips (bool [samples]) in every epoch; or once and then alternate, to show each image both ways."""
    if not config.alternate_flip:
        return below(bits, 40, 2).bool()
    first = below(random_bits(key(seed, Stream.FLIP), order), 40, 2)
    return (first + epoch) % 2 == 1


def augmented(images: Tensor, plan: EpochPlan, config: DatasetConfig) -> Tensor:
    """Crop and flip uint8 [N, C, H, W] by the plan."""
    if plan.top is not None and plan.left is not None:
        count, _, height, width = images.shape
        padded = bordered(images, config.crop_padding, config.crop_border)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [N, C, 2p+1, 2p+1, H, W]
        images = windows[torch.arange(count, device=images.device), :, plan.top, plan.left]
    if plan.mirrored is not None:
        images = torch.where(plan.mirrored.view(-1, 1, 1, 1), images.flip(3), images)
    return images


def bordered(images: Tensor, pixels: int, border: str) -> Tensor:
    """Pad [N, C, H, W] by ``pixels`` on each side: black, or reflected at the edge (up to H−1 and W−1)."""
    if border == "black":
        return functional.pad(images, (pixels,) * 4)
    for dimension in (2, 3):  # by index, as torch reflects floats only
        size = images.shape[dimension]
        # −2 −1 0 … → 2 1 0 … at the lower edge, and the same at the upper one
        position = torch.arange(-pixels, size + pixels, device=images.device).abs()
        images = images.index_select(dimension, size - 1 - (size - 1 - position).abs())
    return images


def cut_out(images: Tensor, plan: EpochPlan, side: int) -> Tensor:
    """Set a square of ``side`` pixels to 0 (the mean of normalised images), in place; it may cross the edge.

    DeVries, Taylor: Improved regularization of convolutional neural networks with cutout, 2017.
    """
    if plan.hole_y is None or plan.hole_x is None:
        return images
    rows = _inside(plan.hole_y, images.shape[2], side).view(-1, 1, images.shape[2], 1)
    columns = _inside(plan.hole_x, images.shape[3], side).view(-1, 1, 1, images.shape[3])
    return images.masked_fill_(rows & columns, 0.0)


def _inside(middle: Tensor, size: int, side: int) -> Tensor:
    """Return bool [N, size]: True at the ``side`` positions around each middle."""
    distance = torch.arange(size, device=middle.device) - middle.view(-1, 1) + side // 2
    return (distance >= 0) & (distance < side)


def training_batch(
    pack: MappedPack, plan: EpochPlan, config: DatasetConfig, normalise: Normaliser, own: Augmentation | None = None
) -> tuple[Tensor, Tensor]:
    """Return augmented, normalised float32 images [n, C, H, W] and labels [n]; ``own``: a user's augmentation."""
    if pack.row_reader is not None:
        images, labels = pack.row_reader.take(plan.row_request)
    else:
        images, labels = pack.images.index_select(0, plan.index), pack.labels.index_select(0, plan.index)
    images = augmented(images, plan, config)
    if own is not None and plan.seeds is not None:
        images = own(images, plan.seeds)
    return cut_out(normalise(images), plan, config.cutout), labels


# ------------------------------------------------------------------------ an augmentation of one's own
def own_augmentation(config: DatasetConfig, manifest: Manifest, device: torch.device) -> Augmentation | None:
    """Load ``dataset.augmentation`` and try it on black images; None if it isn't set. Raises ConfigError. A function
    with a parameter ``seeds`` gets a batch. Any other gets one image at a time, with torch's, Python's and numpy's
    generators seeded, so that any rank changes the image in the same way.
    """
    if config.augmentation is None:
        return None
    target = options.load_target(config.augmentation)
    function: Any = target(**config.augmentation_args) if inspect.isclass(target) else target
    # nn.Module.__call__ has no parameters of its own
    called = function.forward if isinstance(function, nn.Module) else function
    if not inspect.isclass(target):
        function = functools.partial(target, **config.augmentation_args)
    whole_batches = "seeds" in inspect.signature(called).parameters
    augmentation = functools.partial(_with_seeds if whole_batches else _one_by_one, function, config.augmentation)
    images = torch.zeros(_TRIED, manifest.channels, manifest.height, manifest.width, dtype=torch.uint8, device=device)
    augmentation(images, torch.arange(_TRIED, device=device))
    return augmentation


def _with_seeds(function: Callable[..., Any], target: str, images: Tensor, seeds: Tensor) -> Tensor:
    return _checked(function(images, seeds=seeds), images, target)


def _one_by_one(function: Callable[..., Any], target: str, images: Tensor, seeds: Tensor) -> Tensor:
    devices = [images.device] if images.is_cuda else []
    with torch.random.fork_rng(devices, device_type=images.device.type), libraries_restored():
        changed = []
        for image, seed in zip(images, seeds.tolist(), strict=True):
            torch.manual_seed(seed)
            seed_libraries(seed)
            changed.append(_checked(function(image), image, target))
    return torch.stack(changed)


def _checked(changed: Any, images: Tensor, target: str) -> Tensor:
    if isinstance(changed, Tensor) and changed.dtype == torch.uint8 and changed.shape == images.shape:
        return changed
    seen = f"{changed.dtype} {[*changed.shape]}" if isinstance(changed, Tensor) else type(changed).__name__
    raise ConfigError(
        f"{options.where(target)} returned {seen} for torch.uint8 {[*images.shape]}; an augmentation must return "
        "images of the same shape and type (they are normalised after it)"
    )
