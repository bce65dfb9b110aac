"""Expand sweep values of a command line into one configuration per trial, as Hydra's own multirun would.

One composition takes 0.2 s, too long for a thousand trials. So each combination of group options is composed once, and
plain values are set in the result. A trial with anything else (an added key, a mapping) is composed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf

from pipeline.cluster.launchers.settings import MISSING
from pipeline.config import compose
from pipeline.config.errors.explain import explain
from pipeline.config.overrides.search_space import refuse_impossible
from pipeline.config.overrides.words import NAME_A_SCRIPT, for_hydra
from pipeline.config.values import texts
from pipeline.core.errors import UsageError

Overrides = tuple[str, ...]
Resolved = dict[str, Any]

_ABSENT = object()


def jobs(words: Sequence[str]) -> list[Overrides]:
    """List every combination of the sweep values in Hydra's order: the last word varies fastest. Keep duplicates.

    The sweep values of a named grid, ``sweep=NAME`` (hydra.sweeper.params in conf/sweep/NAME.yaml), come first.
    A word of the command line replaces the grid's value of the same key.

    Raises UsageError: a word that is no override or has no value, an interval without a search, or too many trials.
    """
    with compose.hydra_ready():
        overrides = parsed_words(words)
        interval = next((one for one in overrides if one.value_type is ValueType.INTERVAL_SWEEP), None)
        if interval is not None:
            if any(word.startswith("search=") for word in words):
                raise UsageError(
                    f"{interval.input_line}: what a search will choose can't be listed beforehand",
                    hint="doit sweep with the same words and --dry-run, which shows its space and trials so far",
                )
            key = interval.get_key_element()
            raise UsageError(
                f"{interval.input_line}: an interval has no end of values, so only a search can draw from it; "
                f"add search=tpe, or write {key}=0.01,0.1 or {key}='range(1,5)' for a grid"
            )
        refuse_impossible(overrides)
        # Hydra escapes every colon and bracket of a value; a value that doesn't vary stays as it was typed
        typed = {
            f"{override.get_key_element()}={override.get_value_element_as_str()}": str(override.input_line)
            for override in overrides
            if not override.is_delete() and not override.is_sweep_override()
        }
        split = BasicSweeper.split_arguments(overrides, None)[0]
        return [tuple(typed.get(word, word) for word in job) for job in split]


def parsed_words(words: Sequence[str]) -> list[Override]:
    """Parse the words, a named grid's first. Needs ``compose.hydra_ready()``. Raises UsageError."""
    return _parsed([*_grid(words), *words])


def _parsed(words: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        return parser.parse_overrides(list(words))
    except Exception as error:  # Hydra's and the lexer's
        raise explain(error, list(words), lambda _: None) from error


def _grid(words: Sequence[str]) -> list[str]:
    """Return the sweep values of a named grid as overrides."""
    named = [word for word in words if word.startswith("sweep=")]
    if not named:
        return []
    params = compose.compose_now(named, with_hydra=True).hydra.sweeper.params
    return [f"{key}={value}" for key, value in (params or {}).items()]


class TrialComposer:
    """``compose.resolve`` for the many trials of one sweep. Use it within ``compose.hydra_ready()``."""

    def __init__(self) -> None:
        self._override = functools.cache(lambda word: _parsed(for_hydra([word]))[-1])
        # trials with the same words to compose and the same fields to set share a result, and set all these fields anew
        self._composition = functools.cache(lambda words, fields: compose.compose_now(words))

    def resolve(self, words: Overrides) -> Resolved:
        """Return what composing alone gives, and raise what it raises."""
        plain = self._plain(words)
        composed_words = tuple(word for word in words if word not in plain)
        config = self._composition(composed_words, tuple(override.key_or_group for override in plain.values()))
        if all(_try_to_set(config, override) for override in plain.values()):
            return compose.resolve(config)
        return compose.resolve(compose.compose_now(words))

    def _plain(self, words: Overrides) -> dict[str, Override]:
        """Return the words whose value can be set: plain ones that share no key with another word."""
        overrides = {word: self._override(word) for word in words}
        # options aside: Hydra chooses them before it sets fields, whatever the order of the words
        fields = {word: override for word, override in overrides.items() if not _chooses_an_option(override)}
        keys = [override.key_or_group for override in fields.values()]
        return {
            word: override
            for word, override in fields.items()
            if _is_plain(override) and sum(_related(override.key_or_group, key) for key in keys) == 1
        }


def _chooses_an_option(override: Override) -> bool:
    """True if the override chooses an option of a group. A word that names a script implies program=script."""
    group = override.key_or_group
    if group in NAME_A_SCRIPT:
        return True
    chooses = override.type is OverrideType.CHANGE and override.package is None and isinstance(override.value(), str)
    return chooses and any((folder / group).is_dir() for folder in compose.CONF_DIRS)


def _is_plain(override: Override) -> bool:
    value = override.value()
    simple = value is None or (isinstance(value, str | int | float | bool | list) and value != MISSING)
    interpolates = any("${" in text for text in texts(value))
    return override.type is OverrideType.CHANGE and override.package is None and simple and not interpolates


def _try_to_set(config: DictConfig, override: Override) -> bool:
    """Set the field to the value in its type; return False if it can't be set, so that the trial must be composed."""
    key, value = override.key_or_group, override.value()
    try:
        before = OmegaConf.select(config, key, default=_ABSENT)
        if before is _ABSENT or OmegaConf.is_dict(before) or OmegaConf.is_list(before) != isinstance(value, list):
            return False
        OmegaConf.update(config, key, value, merge=True)
    except Exception:  # composing reports what is wrong with it
        return False
    return True


def _related(one: str, other: str) -> bool:
    """True if the keys are equal or one contains the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
