"""Mean, spread and what may be said of the difference of two means. Pure.

A difference is called larger than the spread over seeds where Welch's interval of it at 95 % leaves out zero: B. L.
Welch, The generalization of "Student's" problem when several different population variances are involved, Biometrika 34
(1947), 28-35, with the degrees of freedom that it shares with F. E. Satterthwaite, Biometrics Bulletin 2 (1946),
110-114. It takes runs with other seeds for independent and about normally distributed, and each difference by itself:
of twenty such intervals about one leaves out zero by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.sweep.report import Statistic, statistic

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
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
