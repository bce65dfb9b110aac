"""The results of a sweep: statistics over seeds, the best configuration, and a report of both as text and as data.

Trials that differ only in their seed are one configuration. All functions are pure.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from pipeline.core.errors import without_host_and_rank
from pipeline.core.printable import printable, shell_line
from pipeline.core.tables import ENDLESS, aligned, counted, folded, in_width, unit_of, wrapped
from pipeline.runs.contents import short_value
from pipeline.runs.result import by_split

SEEDS = ("seed", "program.args.seed")
"""The fields that hold a seed; the second is how scripts receive theirs."""
DEFAULT_METRIC = "val/accuracy"
"""The configuration with the best mean of this metric is the best. A choice by test figures would bias them."""
_QUALITY = ("val/accuracy", "test/accuracy", "val/loss")
SHOWN = (*_QUALITY, "images_per_s", "train_s")
_MOST_REMARKS = 5  # trials with a remark (non-finite values) that get a line each
_MOST_ALIKE = 8  # of the trials that failed for one reason, so many get a line each
_MOST_OWN_METRICS = 4  # columns for a script's own metrics
MAXIMIZE, MINIMIZE = "maximize", "minimize"
_LARGER_IS_BETTER = re.compile(
    r"accuracy|precision|recall|auc|score|reward|bleu|rouge|_per_s$|(?<![a-z])(acc|f1|iou|miou|map|r2|psnr|ssim)(?![a-z])"
)
_SMALLER_IS_BETTER = re.compile(
    r"loss|error|latency|duration|perplexity|time(?![a-z])|(?<!_per)_m?s$"
    r"|(?<![a-z])(mae|mse|rmse|nll|ppl|wer|cer|fid|bpb|bpc)(?![a-z])"
)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of one trial. ``values`` are the figures of result.json by name, empty unless FINISHED."""

    number: int
    key: str
    state: str
    chosen: tuple[str, ...]  # the overrides that distinguish this trial from the others
    overrides: tuple[str, ...]  # all overrides, with which `doit train` repeats the trial
    values: Mapping[str, float]
    # FINISHED: that the result was accepted ("accepted, …"), or a remark (a metric is NaN); else why the trial ended
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A figure over the seeds of one configuration."""

    mean: float
    std: float | None  # of the sample (divisor n - 1); None if n is 1
    n: int


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Trials that differ only in their seed. ``chosen`` are the overrides that distinguish the configuration."""

    chosen: tuple[str, ...]
    trials: tuple[TrialResult, ...]
    statistics: Mapping[str, Statistic]

    @property
    def title(self) -> str:
        """``chosen`` with long numbers rounded; '' if the configuration is the only one."""
        pairs = (word.partition("=") for word in self.chosen)
        return " ".join(f"{name}={short_value(value)}" for name, _, value in pairs)

    @property
    def n(self) -> int:
        """The number of finished trials."""
        return sum(trial.state == "FINISHED" for trial in self.trials)


def groups(trials: Iterable[TrialResult]) -> list[Configuration]:
    """Group trials by configuration, in the order of their first trials."""
    by_configuration: dict[tuple[str, ...], list[TrialResult]] = {}
    seen: set[str] = set()
    for trial in trials:  # a run that a search chose again counts once
        if trial.key not in seen:
            by_configuration.setdefault(_without_seed(trial.chosen), []).append(trial)
        seen.add(trial.key)
    return [
        Configuration(chosen=chosen, trials=tuple(members), statistics=_statistics(members))
        for chosen, members in by_configuration.items()
    ]


def _without_seed(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word.lstrip("+").partition("=")[0] not in SEEDS)


def _statistics(members: Sequence[TrialResult]) -> dict[str, Statistic]:
    columns: dict[str, list[float]] = {}
    for trial in members:
        for name, value in trial.values.items():
            columns.setdefault(name, []).append(value)
    return {name: statistic(values) for name, values in columns.items()}


def statistic(values: Sequence[float]) -> Statistic:
    """Return mean, standard deviation (n - 1) and n of at least one value."""
    n = len(values)
    try:
        return Statistic(mean=statistics.fmean(values), std=statistics.stdev(values) if n > 1 else None, n=n)
    except OverflowError:  # figures near the largest float
        return Statistic(mean=math.fsum(value / n for value in values), std=math.inf, n=n)


def best(
    configurations: Sequence[Configuration], by: str = DEFAULT_METRIC, goals: Mapping[str, str] = MappingProxyType({})
) -> tuple[Configuration, TrialResult] | None:
    """Return the configuration with the best mean of the figure ``by``, and its best trial; None: it can't be told."""
    candidates = [group for group in configurations if by in group.statistics]
    direction = direction_of(by, goals)
    if not candidates or direction is None:
        return None
    sign = -1.0 if direction == MINIMIZE else 1.0
    group = max(candidates, key=lambda item: sign * item.statistics[by].mean)
    return group, max((trial for trial in group.trials if by in trial.values), key=lambda item: sign * item.values[by])


def direction_of(name: str, goals: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Return ``maximize`` or ``minimize`` for a figure, by the search's goals or by its name; None: it isn't clear."""
    if name in goals:
        return goals[name]
    larger, smaller = (bool(words.search(name.lower())) for words in (_LARGER_IS_BETTER, _SMALLER_IS_BETTER))
    if larger == smaller:
        return None
    return MAXIMIZE if larger else MINIMIZE


def command(overrides: Sequence[str]) -> str:
    """Return the command line that repeats a trial."""
    return shell_line(["doit", "train", *overrides])


def table(configurations: Sequence[Configuration], goals: Mapping[str, str], width: int) -> list[str]:
    """Return one line per configuration: mean ± standard deviation of each figure, and n. ``*`` marks the best mean.

    The columns are the metrics that a search aims at, the usual ones, or the first few of a script's own.
    """
    names = dict.fromkeys([*goals, *_columns(configurations)])
    shown = [name for name in names if any(name in group.statistics for group in configurations)]
    best_by_name = {name: _best_if_different(configurations, name, goals) for name in shown}
    rows = [("configuration", "n", *shown)]
    for group in configurations:
        cells = [_cell(name, group.statistics.get(name), best_by_name[name] is group) for name in shown]
        rows.append((group.title or "(one configuration)", f"{group.n}/{len(group.trials)}", *cells))
    return in_width(rows, width)


def _best_if_different(
    configurations: Sequence[Configuration], name: str, goals: Mapping[str, str]
) -> Configuration | None:
    """Return the configuration with the best mean of a figure; None if all means are equal."""
    top = best(configurations, name, goals)
    means = {group.statistics[name].mean for group in configurations if name in group.statistics}
    return top[0] if top is not None and len(means) > 1 else None


def _columns(configurations: Sequence[Configuration]) -> list[str]:
    names = dict.fromkeys(name for group in configurations for name in group.statistics)
    if any(name in names for name in _QUALITY):
        return [*SHOWN]
    others = sorted((name for name in names if name not in SHOWN), key=lambda name: by_split(name)[0])
    return [*others[:_MOST_OWN_METRICS], *SHOWN]


def _cell(name: str, figure: Statistic | None, is_best: bool) -> str:
    return "-" if figure is None else f"{with_spread(figure.mean, figure.std, name)}{' *' if is_best else ''}"


def number(value: float) -> str:
    """Format with four decimals for shares and losses, none from 100 on; scientific notation for tiny values."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.3g}"
    decimals = 4 if size < 10 else 2 if size < 100 else 0
    return f"{value:,.{decimals}f}"


def with_spread(mean: float, std: float | None, name: str = "") -> str:
    """Return ``0.9883 ± 0.0042``: the deviation with two significant digits, the mean with as many decimals.

    If ``name`` is that of a size or a duration, a unit follows: ``8.13 ± 0.12 MB``.
    """
    factor, unit = unit_of(name, mean)
    if unit:
        return f"{with_spread(mean / factor, None if std is None else std / factor)} {unit}"
    if std is None:
        return number(mean)
    # the power of ten after rounding, so that 0.00999… counts as 0.010
    power = int(f"{std:.1e}".partition("e")[2]) if std and math.isfinite(std) else 0
    if std == 0 or not math.isfinite(std) or max(abs(mean), std) >= 1e9 or 0 < abs(mean) < 1e-3 or power < -5:
        return f"{number(mean)} ± {number(std) if std else '0'}"
    digits = max(0, 1 - power)
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"


def text(
    trials: Sequence[TrialResult],
    total: int,
    by: str | None = DEFAULT_METRIC,
    goals: Mapping[str, str] = MappingProxyType({}),
    *,
    width: int = ENDLESS,
) -> str:
    """Return the whole report, wrapped to ``width`` columns, but not the command in it, so that it can be copied.

    ``by``: decides which trial is best (None: none is shown). ``goals``: objective of a search → maximize or minimize.
    """
    configurations = groups(trials)
    done = sum(trial.state == "FINISHED" for trial in trials)
    lines = [
        f"{done} of {total} trials finished, {counted(len(configurations), 'configuration')}",
        "",
        *table(configurations, goals, width),
    ]
    if by is not None and (top := best(configurations, by, goals)) is not None:
        group, trial = top
        name = group.title or "the one configuration"
        lines += ["", *wrapped(f"best by {by}: {name}; trial {trial.number} ({trial.key})", width)]
        lines += [f"  {command(trial.overrides)}"]
    for item in filter(_is_accepted, trials):
        lines += wrapped(f"trial {item.number} ({item.key}) is {item.detail}", width)
    remarked = [trial for trial in trials if trial.state == "FINISHED" and trial.detail and not _is_accepted(trial)]
    for item in remarked[:_MOST_REMARKS]:
        lines += wrapped(f"trial {item.number} ({item.key}): {item.detail}", width)
    if len(remarked) > _MOST_REMARKS:
        lines.append(f"{counted(len(remarked) - _MOST_REMARKS, 'more trial')} like these")
    failed = [trial for trial in trials if trial.state not in ("FINISHED", "PRUNED")]
    return "\n".join([*lines, *_failures(failed, width)])


def _failures(trials: Sequence[TrialResult], width: int) -> Iterator[str]:
    """Yield lines about trials that didn't finish. Trials that ended for one reason stand together below it."""
    alike: dict[tuple[str, str], list[TrialResult]] = {}
    for trial in trials:
        alike.setdefault((trial.state, without_host_and_rank(trial.detail)), []).append(trial)
    for (state, _), members in alike.items():
        detail = members[0].detail
        count = f"{len(members)} trials " if len(members) > 1 else ""
        yield ""
        yield from wrapped(printable(f"{count}{state}: {detail}" if detail else f"{count}{state}"), width)
        rows = [
            (f"  trial {item.number}", item.key, printable(" ".join(item.chosen))) for item in members[:_MOST_ALIKE]
        ]
        yield from folded(aligned(rows), width).splitlines()
        if len(members) > _MOST_ALIKE:
            yield f"  and {len(members) - _MOST_ALIKE} more"


def _is_accepted(trial: TrialResult) -> bool:
    return trial.state == "FINISHED" and trial.detail.startswith("accepted")


def as_json(
    trials: Sequence[TrialResult], total: int, by: str = DEFAULT_METRIC, goals: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the report as data."""
    configurations = groups(trials)
    top = best(configurations, by, goals)
    return {
        "total": total,
        "trials": [asdict(trial) for trial in trials],
        "configurations": [
            {
                "chosen": list(group.chosen),
                "n": group.n,
                "of": len(group.trials),
                "statistics": {name: asdict(value) for name, value in group.statistics.items()},
            }
            for group in configurations
        ],
        "best": top
        and {
            "by": by,
            "direction": direction_of(by, goals),
            "chosen": list(top[0].chosen),
            "trial": top[1].number,
            "key": top[1].key,
            "command": command(top[1].overrides),
        },
    }
