"""The trials that overrides with several values describe (``jobs``), and their fast composition (``TrialComposer``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from omegaconf import DictConfig, OmegaConf

from pipeline.cluster.launchers.settings import MISSING
from pipeline.config.compose import CONF_DIRS, compose_now, hydra_ready, resolve
from pipeline.config.composition_errors import explain
from pipeline.config.overrides.search_space import refuse_grid_size
from pipeline.config.overrides.words import SCRIPT_FIELDS, for_hydra
from pipeline.config.schema import texts
from pipeline.core.errors import UsageError

Overrides = tuple[str, ...]  # the overrides of one trial, each with one value

_ABSENT = object()


def jobs(words: Sequence[str]) -> list[Overrides]:
    """List every combination of the values in Hydra's order: the last word varies fastest. Keep duplicates.

    The values of a named grid, ``sweep=NAME`` (hydra.sweeper.params in conf/sweep/NAME.yaml), come first. A word of the
    command line replaces the grid's value of the same key.

    Raises UsageError: a word that is no override or has no value, an interval without a search, or too many trials.
    """
    with hydra_ready():
        overrides = parsed_words(words)
        interval = next((item for item in overrides if item.value_type is ValueType.INTERVAL_SWEEP), None)
        if interval is not None:
            raise _interval_in_grid(interval, has_search=any(word.startswith("search=") for word in words))
        refuse_grid_size(overrides)
        # Hydra escapes every colon and bracket of a value; a value that doesn't vary stays as it was typed
        word_by_escaped = {
            f"{override.get_key_element()}={override.get_value_element_as_str()}": str(override.input_line)
            for override in overrides
            if not override.is_delete() and not override.is_sweep_override()
        }
        combinations = BasicSweeper.split_arguments(overrides, None)[0]
        return [tuple(word_by_escaped.get(word, word) for word in combination) for combination in combinations]


def _interval_in_grid(interval: Override, *, has_search: bool) -> UsageError:
    """Return the error about an interval, whose values can't be listed."""
    if has_search:
        return UsageError(
            f"{interval.input_line}: what a search will choose can't be listed beforehand",
            hint="doit sweep with the same words and --dry-run, which shows its space and trials so far",
        )
    key = interval.get_key_element()
    return UsageError(
        f"{interval.input_line}: an interval has no end of values, so only a search can draw from it; "
        f"add search=tpe, or write {key}=0.01,0.1 or {key}='range(1,5)' for a grid"
    )


def parsed_words(words: Sequence[str]) -> list[Override]:
    """Parse the words of a named grid, then these words. Call it inside of ``hydra_ready()``. Raises UsageError."""
    grid = [word for word in words if word.startswith("sweep=")]
    params = compose_now(grid, with_hydra=True).hydra.sweeper.params if grid else None
    return _parsed([*(f"{key}={value}" for key, value in (params or {}).items()), *words])


def _parsed(words: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    try:
        return parser.parse_overrides(list(words))
    except Exception as error:  # Hydra's own errors, and those of its generated lexer
        raise explain(error, list(words), lambda _: None) from error


class TrialComposer:
    """Composes the many trials of one sweep fast: trials with the same options share one composition by Hydra.

    In it the plain values of each trial are replaced. Use it inside of ``hydra_ready()``.
    """

    def __init__(self) -> None:
        self._overrides: dict[str, Override] = {}  # word → parsed
        self._compositions: dict[tuple[Overrides, tuple[str, ...]], DictConfig] = {}

    def resolve(self, words: Overrides) -> dict[str, Any]:
        """Return the resolved configuration of one trial, or raise the error that composing its words would raise."""
        plain = self._plain_overrides(words)
        config = self._composition(
            words=tuple(word for word in words if word not in plain),
            fields=tuple(override.key_or_group for override in plain.values()),
        )
        if all(_try_to_set(config, override) for override in plain.values()):
            return resolve(config)
        return resolve(compose_now(words))

    def _composition(self, words: Overrides, fields: tuple[str, ...]) -> DictConfig:
        """Compose ``words`` once for all trials that set the same ``fields`` in it: each overwrites all of them."""
        if (words, fields) not in self._compositions:
            self._compositions[words, fields] = compose_now(words)
        return self._compositions[words, fields]

    def _plain_overrides(self, words: Overrides) -> dict[str, Override]:
        """Return word → override for words whose value can be set after composing: plain, and alone with their key."""
        for word in words:
            if word not in self._overrides:
                self._overrides[word] = _parsed(for_hydra([word]))[-1]
        # without choices of options: Hydra makes these before it sets fields, whatever the order of the words
        fields = {word: self._overrides[word] for word in words if not _chooses_an_option(self._overrides[word])}
        keys = [override.key_or_group for override in fields.values()]
        return {
            word: override
            for word, override in fields.items()
            if _is_plain(override) and sum(_contains(override.key_or_group, key) for key in keys) == 1
        }


def _chooses_an_option(override: Override) -> bool:
    """Whether the override chooses an option of a group. A word that names a script does: it implies program=script."""
    group = override.key_or_group
    if group in SCRIPT_FIELDS:
        return True
    chooses = override.type is OverrideType.CHANGE and override.package is None and isinstance(override.value(), str)
    return chooses and any((folder / group).is_dir() for folder in CONF_DIRS)


def _is_plain(override: Override) -> bool:
    """Whether the override is ``key=value`` with a simple value or a list, and without an interpolation."""
    if override.type is not OverrideType.CHANGE or override.package is not None:
        return False
    value = override.value()
    is_simple = value is None or (isinstance(value, str | int | float | bool | list) and value != MISSING)
    return is_simple and not any("${" in text for text in texts(value))


def _try_to_set(config: DictConfig, override: Override) -> bool:
    """Set the field to the value in its type; return False if that isn't possible, so that Hydra must compose."""
    key, value = override.key_or_group, override.value()
    try:
        before = OmegaConf.select(config, key, default=_ABSENT)
        if before is _ABSENT or OmegaConf.is_dict(before) or OmegaConf.is_list(before) != isinstance(value, list):
            return False
        OmegaConf.update(config, key, value, merge=True)
    except Exception:  # the composition that follows reports what is wrong
        return False
    return True


def _contains(key: str, other: str) -> bool:
    """Whether two keys are equal, or one is a section that has the other: ``optimizer`` and ``optimizer.lr``."""
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
