"""Runs that differ in nothing but the seed, taken together, and what may be said of the difference of two means. Pure.

A difference is called larger than the spread over seeds where Welch's interval of it at 95 % excludes zero: B. L.
Welch, The generalization of "Student's" problem when several different population variances are involved, Biometrika 34
(1947), 28-35, with the degrees of freedom that it shares with F. E. Satterthwaite, Biometrics Bulletin 2 (1946),
110-114. It assumes that runs with other seeds are independent and about normally distributed, and takes each difference
by itself: of twenty such intervals about one excludes zero by chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.comparing.reading import ComparedRun
from pipeline.core.printable import printable
from pipeline.core.tables import counted
from pipeline.keys.canonical import ORDER
from pipeline.keys.content_key import flat
from pipeline.runs.contents import short_value
from pipeline.runs.index import ALTERED
from pipeline.sweep.report import SEEDS, Statistic, statistic

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric over the runs of a group.

    ``over`` is mean and sample standard deviation of its finite values (None: there is none), ``nan`` and ``infinite``
    count the values that are neither, and that no mean takes in.
    """

    over: Statistic | None
    nan: int = 0
    infinite: int = 0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two means, the second less the first.

    ``low`` and ``high`` bound Welch's interval; None with ``unknown``, which says why there is none. ``is_larger``:
    the interval leaves out zero.
    """

    metric: str
    difference: float
    low: float | None = None
    high: float | None = None
    unknown: str = ""

    @property
    def is_larger(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


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
    by_configuration: dict[str, list[ComparedRun]] = {}
    for run in {run.key: run for run in runs}.values():
        by_configuration.setdefault(_without_seed(run), []).append(run)
    members = sorted(by_configuration.values(), key=lambda group: not any(run.counts for run in group))
    differing = differing_fields([group[0] for group in members])
    return [
        Group(label=letters(number), words=_words(group[0], differing), runs=tuple(group), figures=_figures(group))
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
    return {name: figure(of_runs) for name, of_runs in values.items()}


def letters(number: int) -> str:
    """0 → A, 25 → Z, 26 → AA."""
    above, at = divmod(number, 26)
    return (letters(above - 1) if above else "") + chr(ord("A") + at)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ----------------------------------------------------------------------------------- mean and spread
def figure(values: Sequence[float]) -> Figure:
    """Of one metric's values, one a run. At least one."""
    finite = [value for value in values if math.isfinite(value)]
    nan = sum(math.isnan(value) for value in values)
    over = statistic(finite) if finite else None
    return Figure(over=over, nan=nan, infinite=len(values) - len(finite) - nan)


def difference(metric: str, first: Statistic, second: Statistic) -> Difference:
    """Of two groups' means, with Welch's interval where both have a spread."""
    apart = second.mean - first.mean
    if first.std is None or second.std is None:
        return Difference(metric=metric, difference=apart, unknown="no spread known (n = 1)")
    shares = first.std * first.std / first.n, second.std * second.std / second.n
    variance = sum(shares)
    if variance == 0:
        return Difference(metric=metric, difference=apart, unknown="no spread: all seeds came out the same")
    if not math.isfinite(variance):
        return Difference(metric=metric, difference=apart, unknown="a spread too large to be counted with")
    part = shares[0] / variance
    freedom = 1 / (part * part / (first.n - 1) + (1 - part) * (1 - part) / (second.n - 1))
    reach = _quantile(freedom) * math.sqrt(variance)
    return Difference(metric=metric, difference=apart, low=apart - reach, high=apart + reach)


def _quantile(freedom: float) -> float:
    """Of Student's t, two-sided at CONFIDENCE."""
    from scipy.special import stdtrit  # not before: scipy, for an interval alone

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
