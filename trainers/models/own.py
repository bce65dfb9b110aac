"""A user-defined network: ``model=own model.target=my_package.nets:MyNet model.args.width=64``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainers.core import options
from trainers.core.config import ConfigError, ModelConfig, check_target
from trainers.models import ImageShape

_IMAGES = 2


@dataclass(kw_only=True)
class OwnModelConfig(ModelConfig):
    """A class or function that returns a torch.nn.Module from float images [n, C, H, W] to logits [n, classes].

    It gets ``num_classes``, ``channels`` and ``image_size`` (pixels of a side; height and width where they differ) if
    its signature has these names.

    Attributes:
        target: the class or function, as package.module:Name.
        args: its other arguments, by name.
        inputs: globs of files of the project that its code reads: their bytes count in the key, and they are sent to
            the hosts with the code.
    """

    name: str = "own"
    target: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_target("model.target", self.target)


def build(config: OwnModelConfig, image: ImageShape) -> nn.Module:
    """Build the network and check it. Raises ConfigError."""
    size = image.height if image.height == image.width else (image.height, image.width)
    offered = {"num_classes": image.num_classes, "channels": image.channels, "image_size": size}
    make = options.load_target(config.target)
    network = make(**options.accepted(make, config.args, offered))
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"{options.where(config.target)} returned {type(network).__name__}, and model.target must make a "
            "torch.nn.Module"
        )
    _refuse_other_logits(network, image, config.target)
    if not any(item.requires_grad for item in network.parameters()):
        raise ConfigError(f"{options.where(config.target)} made a network without a parameter that is trained")
    return network


@torch.no_grad()
def _refuse_other_logits(network: nn.Module, image: ImageShape, target: str) -> None:
    """Check the logits in one pass over black images, which also initialises lazy layers."""
    network.eval()
    logits = network(torch.zeros(_IMAGES, image.channels, image.height, image.width))
    network.train()
    wanted = (_IMAGES, image.num_classes)
    if isinstance(logits, Tensor) and logits.shape == wanted and logits.is_floating_point():
        return
    seen = f"{logits.dtype} {[*logits.shape]}" if isinstance(logits, Tensor) else type(logits).__name__
    images = f"{_IMAGES} images of {image.channels}×{image.height}×{image.width}"
    raise ConfigError(
        f"{options.where(target)} returned {seen} for {images}; forward must return float logits {[*wanted]}: one for "
        f"each of the {image.num_classes} classes"
    )
