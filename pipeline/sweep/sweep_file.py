"""What sweep.json holds: what a sweep was asked for, and its trials in their order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.documents import DamagedError
from pipeline.sweep.report import BY

_FIELDS: Mapping[str, type] = {"key": str, "configurations": str, "words": list, "total": int, "trials": list}
_LATER: Mapping[str, type] = {"at_once": int, "by": str, "goals": dict}
"""What a file of an older version, or of a grid, lacks."""
_OF_TRIAL: Mapping[str, type] = {"number": int, "key": str, "configuration": str, "chosen": list, "overrides": list}


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """``configuration`` is a digest; ``chosen`` are the words that set the trial apart, ``overrides`` all of them."""

    number: int
    key: str
    configuration: str
    chosen: tuple[str, ...]
    overrides: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """``total`` trials of the search space ``configurations`` (a digest), ``at_once`` at a time.

    ``words`` are those of the command. ``by`` is the metric that says which trial is best, and ``goals`` says of each
    that a search aims at whether it is to ``maximize`` or ``minimize``.
    """

    key: str
    configurations: str
    words: tuple[str, ...]
    total: int
    trials: tuple[TrialRecord, ...] = ()
    at_once: int = 1
    by: str = BY
    goals: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        return self.key != ""


NOT_BEGUN = SweepRecord(key="", configurations="", words=(), total=0)


def parse(raw: Mapping[str, Any]) -> SweepRecord:
    """Raises DamagedError: a field is missing or of another type."""
    later = {name: kind for name, kind in _LATER.items() if name in raw}
    _check(raw, {**_FIELDS, **later})
    for item in raw["trials"]:
        _check(item, _OF_TRIAL)
    trials = tuple(TrialRecord(**{name: _frozen(item[name]) for name in _OF_TRIAL}) for item in raw["trials"])
    told = {name: _frozen(raw[name]) for name in (*_FIELDS, *later) if name != "trials"}
    return SweepRecord(**told, trials=trials)


def _check(raw: Any, fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        if type(value) is not kind:
            raise DamagedError(f"holds {str(value)[:40]} where {name} should be ({kind.__name__})")


def _frozen(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else value
