"""Apply a user-defined augmentation, with random numbers that depend on the sample and not on the rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainers.core import options
from trainers.core.config import ConfigError, DatasetConfig
from trainers.data.pack import Manifest
from trainers.data.randomness import libraries_restored, seed_libraries

_TRIED = 2  # black images of the trial call

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""uint8 [n, C, H, W] and the random bits of each sample, int64 [n] → uint8 of the same shape."""


def build(config: DatasetConfig, manifest: Manifest, device: torch.device) -> Augmentation | None:
    """Load ``dataset.augmentation`` and try it on black images; None if it is not set.

    A function with a parameter ``seeds`` gets a batch and its samples' random bits. Any other function is called per
    image, with torch's, Python's and numpy's generators seeded with the sample's bits, as torchvision's transforms use
    them. So an image is changed alike on any number of ranks.

    Raises:
        ConfigError: it returns something else than uint8 images of the same shape.
    """
    if config.augmentation is None:
        return None
    target = options.load_target(config.augmentation)
    made: Any = target(**config.augmentation_args) if inspect.isclass(target) else target
    called = made.forward if isinstance(made, nn.Module) else made
    if not inspect.isclass(target):
        made = functools.partial(target, **config.augmentation_args)
    whole_batches = "seeds" in inspect.signature(called).parameters
    augmentation = functools.partial(_with_seeds if whole_batches else _one_by_one, made, config.augmentation)
    images = torch.zeros(_TRIED, manifest.channels, manifest.height, manifest.width, dtype=torch.uint8, device=device)
    augmentation(images, torch.arange(_TRIED, device=device))
    return augmentation


def _with_seeds(made: Callable[..., Any], target: str, images: Tensor, seeds: Tensor) -> Tensor:
    return _checked(made(images, seeds=seeds), images, target)


def _one_by_one(made: Callable[..., Any], target: str, images: Tensor, seeds: Tensor) -> Tensor:
    devices = [images.device] if images.is_cuda else []
    with torch.random.fork_rng(devices, device_type=images.device.type), libraries_restored():
        changed = []
        for image, seed in zip(images, seeds.tolist(), strict=True):
            torch.manual_seed(seed)
            seed_libraries(seed)
            changed.append(_checked(made(image), image, target))
    return torch.stack(changed)


def _checked(changed: Any, images: Tensor, target: str) -> Tensor:
    if isinstance(changed, Tensor) and changed.dtype == torch.uint8 and changed.shape == images.shape:
        return changed
    seen = f"{changed.dtype} {[*changed.shape]}" if isinstance(changed, Tensor) else type(changed).__name__
    raise ConfigError(
        f"{options.where(target)} returned {seen} for torch.uint8 {[*images.shape]}; an augmentation must return "
        "images of the same shape and type (they are normalised after it)"
    )
