"""Runs that differ in nothing but the seed, taken together. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.comparing.reading import ComparedRun
from pipeline.comparing.spread import Figure, figure
from pipeline.core.printable import printable
from pipeline.core.tables import counted
from pipeline.keys.canonical import ORDER
from pipeline.keys.diff import flat
from pipeline.runs.index import ALTERED
from pipeline.runs.naming import short_value
from pipeline.sweep.report import SEEDS


@dataclass(frozen=True, kw_only=True)
class Group:
    """``label`` is a letter (A, B, …, Z, AA), ``words`` what sets the group apart, as ``name=value``."""

    label: str
    words: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    figures: Mapping[str, Figure]

    @property
    def first(self) -> ComparedRun:
        """The run that stands for the group: its first finished one, where there is one."""
        return next((run for run in self.runs if run.counts), self.runs[0])

    @property
    def n(self) -> int:
        """How many of its runs have figures."""
        return sum(run.counts for run in self.runs)

    @property
    def title(self) -> str:
        """What sets it apart, with long numbers rounded; ``words`` has them as they are."""
        pairs = (word.partition("=") for word in self.words)
        return " ".join(f"{name}={short_value(value)}" for name, _, value in pairs) or self.first.what

    @property
    def reservation(self) -> str:
        """Why nothing may be claimed of its figures, or ''."""
        if self.n == 0:
            altered = sum(run.state == ALTERED for run in self.runs)
            return "none of its runs is finished" + (f", {altered} {ALTERED}" if altered else "")
        doubted = [run for run in self.runs if run.counts and run.reservation]
        if not doubted:
            return ""
        said = ", ".join(dict.fromkeys(run.reservation.partition(":")[0].partition(" (")[0] for run in doubted))
        return f"{len(doubted)} of {counted(self.n, 'run')} {said}"


def grouped(runs: Sequence[ComparedRun]) -> list[Group]:
    """In the order of their first runs, those with a finished run first, as the rest is compared with the first; a run
    that is named twice counts once."""
    found: dict[str, list[ComparedRun]] = {}
    for run in {run.key: run for run in runs}.values():
        found.setdefault(_without_seed(run), []).append(run)
    members = sorted(found.values(), key=lambda group: not any(run.counts for run in group))
    differing = differing_fields([group[0] for group in members])
    return [
        Group(
            label=letters(number),
            words=_words(group[0], differing),
            runs=tuple(group),
            figures=_figures(group),
        )
        for number, group in enumerate(members)
    ]


def flat_config(run: ComparedRun) -> dict[str, Any]:
    """Field → value of the configuration that decides the run."""
    return dict(flat(run.config)) if run.config else {}


def differing_fields(runs: Sequence[ComparedRun]) -> list[str]:
    """Fields of the configuration that aren't the same in all of which it is known, without the seed."""
    known = [flat_config(run) for run in runs if run.config]
    names = sorted({name for fields in known for name in fields} - set(SEEDS))
    differing = [name for name in names if len({_text(fields.get(name)) for fields in known}) > 1]
    return [name for name in differing if not name.startswith(f"{ORDER}.") or _is_reordered(name, known)]


def _is_reordered(name: str, known: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some have the same words in another order (None: sorted); of other words the fields themselves tell."""
    inside = f"{name.removeprefix(f'{ORDER}.')}."
    orders = {(_text(fields.get(name)), _text([one for one in sorted(fields) if one.startswith(inside)]))
              for fields in known}  # fmt: skip
    return len({words for _, words in orders}) < len(orders)


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """All metrics that any of them has: validation and test figures first."""
    names = {name for group in groups for name in group.figures}
    return sorted(names, key=lambda name: (_order(name), name))


def _order(name: str) -> int:
    prefixes = ("val/", "test/", "train/")
    return next((at for at, prefix in enumerate(prefixes) if name.startswith(prefix)), len(prefixes))


def _without_seed(run: ComparedRun) -> str:
    """All that decides a run but its seed."""
    fields = {name: value for name, value in flat_config(run).items() if name not in SEEDS}
    others = {name: value for name, value in run.parts.items() if name != "config"}
    return _text({"config": fields, **others})


def _words(run: ComparedRun, differing: Sequence[str]) -> tuple[str, ...]:
    fields = flat_config(run)
    return tuple(f"{name}={shown(fields[name])}" for name in differing if fields.get(name) is not None)


def shown(value: Any) -> str:
    """A value of a configuration in a table."""
    return "-" if value is None else printable(value if isinstance(value, str) else _text(value))


def _figures(runs: Sequence[ComparedRun]) -> dict[str, Figure]:
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.figures.items() if run.counts else ():
            values.setdefault(name, []).append(value)
    return {name: figure(found) for name, found in values.items()}


def letters(number: int) -> str:
    """0 → A, 25 → Z, 26 → AA."""
    above, at = divmod(number, 26)
    return (letters(above - 1) if above else "") + chr(ord("A") + at)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
