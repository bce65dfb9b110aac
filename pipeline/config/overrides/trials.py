"""Expand sweep values of a command line into one configuration per trial, as Hydra's own multirun would.

One composition takes 0.2 s, too long for a thousand trials. So each combination of group options is composed once, and
a plain value is inserted into the resolved result after OmegaConf has converted it to the field's type. Anything else
(an added key, a mapping, a value that an interpolation may read) is composed.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
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

_PLAIN_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
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


@dataclass(frozen=True, kw_only=True)
class _Composition:
    """One composition. ``config`` is its own copy, in which values are tried.

    ``referenced`` are the keys that its interpolations read, None if they can't be determined.
    """

    config: DictConfig
    resolved: Resolved
    referenced: frozenset[str] | None


class TrialComposer:
    """``compose.resolve`` for the many trials of one sweep. Use it within ``compose.hydra_ready()``."""

    def __init__(self) -> None:
        self._override = functools.cache(lambda word: _parsed(for_hydra([word]))[-1])
        self._composition = functools.cache(_compose)
        self._value = functools.cache(
            lambda composed_words, word: _typed(self._composition(composed_words).config, self._override(word))
        )
        self._composed: set[str] = set()  # keys whose values must be composed

    def resolve(self, words: Overrides) -> Resolved:
        """Return what composing alone gives, and raise what it raises. Read only: trials share parts of it."""
        plain = self._plain(words)
        composed_words = tuple(word for word in words if word not in plain)
        composition = self._composition(composed_words)
        keys = [plain[word].key_or_group for word in plain]
        read = composition.referenced
        if read is None or any(_related(key, other) for key in keys for other in read):
            return compose.resolve(compose.compose_now(words))
        result = dict(composition.resolved)
        for word, override in plain.items():
            value = self._value(composed_words, word)
            if value is _ABSENT:
                self._composed.add(override.key_or_group)
                return self.resolve(words)
            _put(result, override.key_or_group, value)
        return result

    def _plain(self, words: Overrides) -> dict[str, Override]:
        """Return the words whose value can be inserted: plain ones that share no key with another word."""
        overrides = {word: self._override(word) for word in words}
        # options aside: Hydra chooses them before it sets fields, whatever the order of the words
        fields = {word: override for word, override in overrides.items() if not _chooses_an_option(override)}
        keys = [override.key_or_group for override in fields.values()]
        return {
            word: override
            for word, override in fields.items()
            if _is_plain(override)
            and override.key_or_group not in self._composed
            and sum(_related(override.key_or_group, key) for key in keys) == 1
        }


def _compose(words: Overrides) -> _Composition:
    config = compose.compose_now(words)
    return _Composition(config=copy.deepcopy(config), resolved=compose.resolve(config), referenced=_referenced(config))


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


def _typed(config: DictConfig, override: Override) -> Any:
    """Return the value in the field's type, or _ABSENT if the trial must be composed."""
    key = override.key_or_group
    before = OmegaConf.select(config, key, default=_ABSENT)
    if (
        before is _ABSENT
        or OmegaConf.is_list(before) != isinstance(override.value(), list)
        or OmegaConf.is_dict(before)
    ):
        return _ABSENT
    try:
        OmegaConf.update(config, key, override.value(), merge=True)
        value = OmegaConf.select(config, key)
        return OmegaConf.to_container(value, throw_on_missing=True) if OmegaConf.is_list(value) else value
    except Exception:  # composing reports what is wrong with it
        return _ABSENT


def _put(resolved: Resolved, key: str, value: Any) -> None:
    """Set a field in ``resolved``. Copy each section above it: sections are shared with other trials."""
    *parents, last = key.split(".")
    section = resolved
    for name in parents:
        section[name] = dict(section[name])
        section = section[name]
    section[last] = value


def _related(one: str, other: str) -> bool:
    """True if the keys are equal or one contains the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _referenced(config: DictConfig) -> frozenset[str] | None:
    """Return the keys that interpolations read, or None if one is relative, nested or a resolver's."""
    keys: set[str] = set()
    for text in texts(OmegaConf.to_container(config, resolve=False)):
        if "${" not in text:
            continue
        references = _PLAIN_REFERENCE.findall(text)
        if len(references) != text.count("${"):
            return None
        keys.update(references)
    return frozenset(keys)
