"""Group runs that differ only in the seed, and test the difference of two groups' means. Pure.

A difference counts as larger than the spread over seeds if Welch's 95 % interval excludes zero: B. L. Welch, The
generalization of "Student's" problem when several different population variances are involved, Biometrika 34 (1947),
28-35, with the degrees of freedom that it shares with F. E. Satterthwaite, Biometrics Bulletin 2 (1946), 110-114. The
test assumes that runs with other seeds are independent and about normally distributed, and treats each difference by
itself: of twenty such intervals about one excludes zero by chance.
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
from pipeline.keys.content_key import ORDER, flat, is_reordered
from pipeline.runs.contents import short_field_names, short_value
from pipeline.runs.index import ALTERED
from pipeline.sweep.results import SEEDS, Statistic, statistic

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric over the runs of a group.

    ``over`` is mean and sample standard deviation of its finite values (None: there are none); ``nan`` and ``infinite``
    count the values excluded from the mean.
    """

    over: Statistic | None
    nan: int = 0
    infinite: int = 0


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """The difference of two means, second minus first.

    ``low`` and ``high`` bound Welch's interval; they are None if ``unknown`` gives a reason. ``is_larger``: the
    interval excludes zero.
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
    """Runs that differ in their seed alone.

    ``label`` is a letter (A, B, …, Z, AA); ``words`` are the settings that distinguish the group, as ``name=value``.
    """

    label: str
    words: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    figures: Mapping[str, Figure]

    @property
    def first(self) -> ComparedRun:
        """The representative run: the first finished one, if there is one."""
        return next((run for run in self.runs if run.counts), self.runs[0])

    @property
    def n(self) -> int:
        """The number of runs with figures."""
        return sum(run.counts for run in self.runs)

    @property
    def title(self) -> str:
        """The distinguishing settings with long numbers rounded; ``words`` has the exact values."""
        pairs = (word.partition("=") for word in self.words)
        return " ".join(f"{name}={short_value(value)}" for name, _, value in pairs) or self.first.what

    @property
    def brief(self) -> str:
        """The distinguishing settings in few words: ``lr 0.1, global_batch_size 32``."""
        pairs = dict(word.partition("=")[::2] for word in self.words)
        names = short_field_names([*pairs])
        return ", ".join(f"{names[name]} {short_value(value)}" for name, value in pairs.items()) or self.first.what

    @property
    def reservation(self) -> str:
        """The reason why nothing may be claimed about its figures, or ''."""
        if self.n == 0:
            altered = sum(run.state == ALTERED for run in self.runs)
            return "none of its runs is finished" + (f", {altered} {ALTERED}" if altered else "")
        doubted = [run for run in self.runs if run.counts and run.reservation]
        if not doubted:
            return ""
        said = ", ".join(dict.fromkeys(run.reservation.partition(":")[0].partition(" (")[0] for run in doubted))
        return f"{len(doubted)} of {counted(self.n, 'run')} {said}"


def grouped(runs: Sequence[ComparedRun]) -> list[Group]:
    """Return the groups in the order of their first runs, groups with a finished run first. Duplicate runs count once.

    The first group is the one that all others are compared with.
    """
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
    """Return field → value of the configuration that decides the run."""
    return dict(flat(run.config)) if run.config else {}


def differing_fields(runs: Sequence[ComparedRun]) -> list[str]:
    """Return configuration fields that differ between runs with a known configuration, except the seed."""
    known = [flat_config(run) for run in runs if run.config]
    names = sorted({name for fields in known for name in fields} - set(SEEDS))
    differing = [name for name in names if len({_text(fields.get(name)) for fields in known}) > 1]
    return [name for name in differing if not name.startswith(f"{ORDER}.") or is_reordered(name, known)]


def field_value(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of ``flat_config``; of ``order.X``, which tells the order of names in X, as text.

    Sorted names have no such field, so they are listed from the fields of X.
    """
    if not name.startswith(f"{ORDER}."):
        return fields.get(name)
    inside = f"{name.removeprefix(f'{ORDER}.')}."
    usual = sorted({field.removeprefix(inside).partition(".")[0] for field in fields if field.startswith(inside)})
    return ", ".join(map(str, fields.get(name) or usual))


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """Return all metrics of the groups, validation and test figures first."""
    names = {name for group in groups for name in group.figures}
    return sorted(
        names, key=lambda name: (*(not name.startswith(prefix) for prefix in ("val/", "test/", "train/")), name)
    )


def _without_seed(run: ComparedRun) -> str:
    """Return everything that decides a run except its seed, as text."""
    fields = {name: value for name, value in flat_config(run).items() if name not in SEEDS}
    others = {name: value for name, value in run.parts.items() if name != "config"}
    return _text({"config": fields, **others})


def _words(run: ComparedRun, differing: Sequence[str]) -> tuple[str, ...]:
    fields = flat_config(run)
    values = {name: field_value(fields, name) for name in differing}
    return tuple(f"{name}={shown(value)}" for name, value in values.items() if value is not None)


def shown(value: Any) -> str:
    """Format a configuration value for a table."""
    return "-" if value is None else printable(value if isinstance(value, str) else _text(value))


def _figures(runs: Sequence[ComparedRun]) -> dict[str, Figure]:
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.figures.items() if run.counts else ():
            values.setdefault(name, []).append(value)
    return {name: figure(of_runs) for name, of_runs in values.items()}


def figure(values: Sequence[float]) -> Figure:
    """Summarize one metric's values, one per run, at least one."""
    finite = [value for value in values if math.isfinite(value)]
    nan = sum(math.isnan(value) for value in values)
    over = statistic(finite) if finite else None
    return Figure(over=over, nan=nan, infinite=len(values) - len(finite) - nan)


def letters(number: int) -> str:
    """Return 0 → A, 25 → Z, 26 → AA."""
    above, at = divmod(number, 26)
    return (letters(above - 1) if above else "") + chr(ord("A") + at)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def difference(metric: str, first: Statistic, second: Statistic) -> MeanDifference:
    """Return the difference of two groups' means, with Welch's interval if both have a spread."""
    apart, unknown = second.mean - first.mean, ""
    if first.std is None or second.std is None:
        return MeanDifference(metric=metric, difference=apart, unknown="no spread known (n = 1)")
    shares = first.std * first.std / first.n, second.std * second.std / second.n
    variance = sum(shares)
    if variance == 0:
        unknown = "no spread: all seeds came out the same"
    elif not math.isfinite(variance):
        unknown = "a spread too large to be counted with"
    if unknown:
        return MeanDifference(metric=metric, difference=apart, unknown=unknown)
    from scipy.special import stdtrit  # late import: only intervals need scipy

    part = shares[0] / variance
    freedom = 1 / (part * part / (first.n - 1) + (1 - part) * (1 - part) / (second.n - 1))
    reach = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)  # of Student's t, on both sides
    return MeanDifference(metric=metric, difference=apart, low=apart - reach, high=apart + reach)
