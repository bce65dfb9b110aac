"""The classifiers of torchvision.models, unchanged: ``model=torchvision model.arch=efficientnet_b0``."""

from __future__ import annotations

import difflib
import importlib.util
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainers.core.config import ConfigError, ModelConfig
from trainers.core.errors import install
from trainers.models import ImageShape

_BUILDER = r"^@register_model\((?:name=)?[\"']?(\w*)[\"']?\)\n(?:@.*\n)*def (\w+)"
_NOT_FOR_USERS = ("weights", "progress", "num_classes", "aux_logits")  # set by other fields or by the training
_AUXILIARY = ("googlenet", "inception_v3")  # networks with auxiliary outputs
_COLOURS = 3


@dataclass(kw_only=True)
class TorchvisionConfig(ModelConfig):
    """Any classifier of torchvision.models, with its own first layers; its weights are fresh unless init.weights is
    set.

    Attributes:
        arch: its name in torchvision, such as resnet18 or efficientnet_b0.
        args: further arguments of its builder, by name: {dropout: 0.2}.
    """

    name: str = "torchvision"
    arch: str = "resnet18"
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self._names()
        if names and self.arch not in names:
            close = difflib.get_close_matches(self.arch, names, n=3)
            near = f"did you mean {' or '.join(close)}?" if close else f"it has: {', '.join(names)}"
            raise ConfigError(f"model.arch={self.arch!r} is no classifier of torchvision.models; {near}")
        for name in self.args:
            if name in _NOT_FOR_USERS:
                instead = "take init.weights" if name == "weights" else "the training sets it"
                raise ConfigError(f"model.args.{name} is not for you to set; {instead}")

    def _names(self) -> list[str]:
        """Return all names, from torchvision's sources as the controller doesn't import it; [] without torchvision."""
        spec = importlib.util.find_spec("torchvision")
        folder = Path(spec.origin).parent / "models" if spec is not None and spec.origin else None
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")] if folder is not None else []
        return sorted(
            registered or name for text in texts for registered, name in re.findall(_BUILDER, text, re.MULTILINE)
        )


def build(config: TorchvisionConfig, image: ImageShape) -> nn.Module:
    """Build the network (see trainers.models). Images of one channel are repeated to three. Raises ConfigError."""
    make = _builder(config.arch)
    try:
        network = make(weights=None, num_classes=image.num_classes, **_sized(config.arch, image), **config.args)
    except (TypeError, ValueError) as error:
        reason, size = " ".join(str(error).split()), f"{image.height}×{image.width}"
        raise ConfigError(
            f"model.arch={config.arch} refuses model.args={config.args} for images of {size}: {reason}"
        ) from error
    if image.channels == 1:
        network.register_forward_pre_hook(_in_colours)
    elif image.channels != _COLOURS:
        raise ConfigError(
            f"model=torchvision takes images of 3 channels, or of 1 as three equal ones; the data has {image.channels}"
        )
    _refuse_unfit(network, config.arch, image)
    return network


def _builder(arch: str) -> Callable[..., nn.Module]:
    try:
        from torchvision.models import get_model_builder  # a host may lack it
    except ImportError as error:
        raise ConfigError(
            f"model=torchvision needs torchvision on host {socket.gethostname()} ({error}); install it there: "
            f"{install('torchvision')}"
        ) from error
    try:
        builder: Callable[..., nn.Module] = get_model_builder(arch)
    except ValueError as error:
        raise ConfigError(f"model.arch={arch} is not in the torchvision of host {socket.gethostname()}") from error
    return builder


def _sized(arch: str, image: ImageShape) -> dict[str, Any]:
    """Return further arguments that some builders need: no auxiliary outputs, or the image size for position tables."""
    if arch in _AUXILIARY:
        return {"aux_logits": False, "init_weights": True}
    if arch.startswith("vit_"):
        return {"image_size": image.height}
    return {"input_size": (image.height, image.width)} if arch == "maxvit_t" else {}


def _in_colours(network: nn.Module, images: tuple[Tensor]) -> Tensor:
    return images[0].expand(-1, _COLOURS, -1, -1)


def _refuse_unfit(network: nn.Module, arch: str, image: ImageShape) -> None:
    """Raise ConfigError if the network can't take images of this size, by a pass over shapes alone (device meta)."""
    state = {name: value.to("meta") for name, value in network.state_dict().items()}
    shape = (1, image.channels, image.height, image.width)
    network.eval()
    try:
        torch.func.functional_call(network, state, torch.empty(shape, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"model.arch={arch} can't take images of {image.height}×{image.width} pixels (torchvision says: {why}); "
            "take larger images, or another one: model.arch=resnet18 takes any size"
        ) from error
    finally:
        network.train()
