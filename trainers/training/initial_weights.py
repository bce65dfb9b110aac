"""The loader of the weights that a run starts from (init.weights, init.run). The controller has put their file into the
run folder; rank 0 reads it, without running any code that it may hold, and broadcasts the weights."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainers.contract import run_folder
from trainers.core.config import TrainConfig
from trainers.core.errors import TrainerError
from trainers.core.files import sha256_file
from trainers.distributed.process_group import RankContext

_INSIDE = ("state_dict", "model_state_dict", "model")  # keys under which published files hold the state dict
_PREFIXES = ("module.", "_orig_mod.")  # added to names by DistributedDataParallel and torch.compile
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # auxiliary classifiers of torchvision's networks
_SHOWN = 4
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # terminal colours in torch's messages


@dataclass(frozen=True, kw_only=True)
class Initial:
    """How a file of weights was applied to the network."""

    setting: str  # as the user wrote it: init.weights=…
    sha256: str
    loaded: int  # number of tensors
    fresh: tuple[str, ...]  # tensors of the network that stayed as drawn, because the file has other classes
    left_out: tuple[str, ...]  # tensors of the file
    notes: tuple[str, ...]  # on how the state dict was found in the file

    def line(self) -> str:
        """Return a line for the user."""
        parts = [f"{self.loaded} tensors of {self.setting}", *self.notes]
        if self.fresh:
            parts.append(f"{_listed(self.fresh)} fresh, as the file has other classes")
        if self.left_out:
            parts.append(f"without its {_listed(self.left_out)}")
        return f"initial weights: {'; '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        return {"said": self.setting, "sha256": self.sha256, "fresh": [*self.fresh], "left_out": [*self.left_out]}


def load(
    config: TrainConfig, network: nn.Module, context: RankContext, run_dir: Path, num_classes: int
) -> Initial | None:
    """Load the weights of ``config.init``, if any, on every rank; rank 0 returns how. Raises TrainerError."""
    setting = config.init.setting
    if not setting:
        return None
    initial = None
    if context.is_rank_zero:
        path = run_dir / run_folder.INITIAL_WEIGHTS
        initial = fit(network, *read(path, setting, config.init.sha256), num_classes=num_classes, setting=setting)
    context.broadcast(network.state_dict().values())
    return initial


def read(path: Path, setting: str, sha256: str | None) -> tuple[dict[str, Tensor], list[str], str]:
    """Return a file's tensors by name, notes on how they were found in it, and its sha256. Raises TrainerError."""
    try:
        actual_sha256 = sha256_file(path)
        if sha256 is not None and actual_sha256 != sha256:
            raise TrainerError(f"{path}, the weights of {setting}, was altered: sha256 {actual_sha256}, not {sha256}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TrainerError(f"{path}, the weights of {setting}, can't be read ({error.strerror})") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        why = " ".join(_COLOURS.sub("", str(error)).split())[:200]
        raise TrainerError(
            f"{setting} is no file of weights alone, and nothing else of a file is run here ({why}); write one where "
            "its network is: torch.save(network.state_dict(), 'weights.pt')"
        ) from error
    weights, notes = unwrapped(content, setting)
    return weights, notes, actual_sha256


def unwrapped(content: Any, setting: str) -> tuple[dict[str, Tensor], list[str]]:
    """Find the state dict in a file's content; return it with notes on how it was found. Raises TrainerError."""
    notes = []
    for name in _INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            notes.append(f"from its {name!r}")
            break
    weights = dict(content) if isinstance(content, Mapping) else {}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        contents = ", ".join(map(str, weights)) if weights else type(content).__name__
        raise TrainerError(f"{setting} holds no state dict (names with tensors) but {contents[:200]}")
    # wrappers nest: DistributedDataParallel around a compiled network gives module._orig_mod.
    while prefix := next((item for item in _PREFIXES if all(name.startswith(item) for name in weights)), None):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
        notes.append(f"without the prefix {prefix!r}")
    return weights, notes


@torch.no_grad()
def fit(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    notes: Sequence[str],
    sha256: str,
    *,
    num_classes: int,
    setting: str,
) -> Initial:
    """Copy ``weights`` into the network. The last layer may differ in its number of classes; then it stays fresh.
    Raises TrainerError, and copies nothing: a tensor is missing, unknown, of another shape or kind, or not finite.
    """
    state = network.state_dict()
    head = _head(state, weights, num_classes)
    left_out = [name for name in weights if name not in state and name.startswith(_AUXILIARY)]
    if misfits := _misfits(state, weights, {*head, *left_out}):
        raise TrainerError(
            f"{setting} doesn't fit the network; tensors {misfits}. The network has to be the one that they were "
            "trained in, but for the number of classes; torchvision's are model=torchvision model.arch=NAME"
        )
    loaded = [name for name in state if name in weights and name not in head]
    if broken := [name for name in loaded if not _is_finite(weights[name]) and _is_finite(state[name])]:
        raise TrainerError(
            f"{setting} holds NaN or infinite values in {_listed(broken)}: the training that wrote it had diverged; "
            "take one of its earlier checkpoints"
        )
    # copy only after all checks, so that a refused file leaves the network unchanged
    for name in loaded:
        state[name].copy_(weights[name])
    return Initial(
        setting=setting,
        sha256=sha256,
        loaded=len(loaded),
        fresh=tuple(head),
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def _head(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], num_classes: int) -> list[str]:
    """Return the names of the classifier layer's tensors, if it differs from the file's in its number of classes. It is
    recognised by that difference, so exactly one layer must have it; else return [].
    """
    names = []
    for name in state.keys() & weights.keys():
        here, there = state[name].shape, weights[name].shape
        if here != there and len(here) == len(there) > 0 and here[1:] == there[1:] and here[0] == num_classes:
            names.append(name)
    layers = {name.rpartition(".")[0] for name in names}
    return [name for name in state if name in names] if len(layers) == 1 else []


def _misfits(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], spared: Collection[str]) -> str:
    """Describe the tensors that the file lacks, has in excess, or has in another form; '' if there are none."""
    missing = [name for name in state if name not in weights and not name.endswith(".num_batches_tracked")]
    extra = [name for name in weights if name not in state and name not in spared]
    common = [name for name in state if name in weights and name not in spared]
    other = [name for name in common if state[name].shape != weights[name].shape]
    shapes = [f"{name}: {[*weights[name].shape]} there, {[*state[name].shape]} here" for name in other]
    kinds = [
        f"{name}: {_dtype(weights[name])} there, {_dtype(state[name])} here"
        for name in common
        if _kind(weights[name]) != _kind(state[name])
    ]
    wrong = {
        "missing there": missing,
        "without a place here": extra,
        "of another shape": shapes,
        "of another kind": kinds,
    }
    return "; ".join(f"{len(names)} {what} ({_listed(names)})" for what, names in wrong.items() if names)


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Return what tells real, complex and integer tensors apart; between dtypes of one kind, values may be rounded."""
    return tensor.is_floating_point(), tensor.is_complex()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
