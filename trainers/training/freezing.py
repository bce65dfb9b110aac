"""Freeze parameters by patterns of their names (trainer.freeze)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainers.core.config import ConfigError

_SHOWN = 6


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters that match a pattern from training: no gradient, no optimizer state and no update.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing would be left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    # refuse a pattern without a match: a typo would silently train the parameters that should stay frozen
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"trainer.freeze: {pattern!r} matches no parameter of the network; {_near(pattern, names)}"
            )
    for name, parameter in model.named_parameters():
        if _matches(name, patterns):
            parameter.requires_grad_(False)
    if patterns and not any(item.requires_grad for item in model.parameters()):
        raise ConfigError(
            f"trainer.freeze=[{', '.join(patterns)}] leaves nothing to train; take a pattern away that matches the "
            f"last layer ({names[-1]})"
        )


def training_mode(model: nn.Module, patterns: Sequence[str]) -> None:
    """Call ``model.train()``, but leave frozen batch normalisations in evaluation mode: their statistics stay fixed."""
    model.train()
    for layer in _frozen_norms(model, patterns):
        layer.eval()


def moving_buffers(model: nn.Module, patterns: Sequence[str]) -> list[Tensor]:
    """Return the model's buffers, except for the statistics of frozen batch normalisations.

    Those must stay bit-identical, and the mean over the ranks could change them by rounding.
    """
    kept = {id(item) for layer in _frozen_norms(model, patterns) for item in layer.buffers()}
    return [item for item in model.buffers() if id(item) not in kept]


def _frozen_norms(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Return the batch normalisations whose running mean matches a pattern."""
    layers = model.named_modules() if patterns else ()
    return [item for name, item in layers if isinstance(item, _NormBase) and _matches(f"{name}.running_mean", patterns)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _near(pattern: str, names: Sequence[str]) -> str:
    """Suggest names that the user may have meant: parameters, and their parent modules followed by ``.*``."""
    above = {".".join(parts[:depth]) for name in names for parts in [name.split(".")] for depth in range(1, len(parts))}
    known = [*names, *(f"{name}.*" for name in sorted(above))]
    if f"{pattern}.*" in known:
        return f"did you mean {pattern}.*?"
    close = difflib.get_close_matches(pattern, known, n=1)
    start = f"did you mean {close[0]}? " if close else ""
    first = list(dict.fromkeys(name.partition(".")[0] for name in names))
    more = f", … ({len(first)} in all)" if len(first) > _SHOWN else ""
    return f"{start}its names begin with: {', '.join(first[:_SHOWN])}{more}"
