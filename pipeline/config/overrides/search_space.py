"""Overrides with several values: the size of the grid that they describe, and the space that a search draws from.

In a grid (``lr=0.1,0.01``) all combinations are trained; a search (``lr=interval(0.01,0.1)``) chooses values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep, Sweep, Transformer

from pipeline.core.errors import UsageError

_MAX_TRIALS = 100_000  # of a grid: all are composed and get their keys before the first starts, about 1 ms each


def refuse_grid_size(overrides: Sequence[Override]) -> None:
    """Raise UsageError for a grid without trials, or with too many; of words with equal keys the last one counts."""
    # key → (number of values, word)
    counts = {override.get_key_element(): (_value_count(override), str(override.input_line)) for override in overrides}
    trials = math.prod(count for count, _ in counts.values())
    if trials > _MAX_TRIALS:
        count, word = max(counts.values())
        others = "" if count == trials else f" and the other words together (it alone has {count:,} values)"
        raise UsageError(f"{word}{others}: that would be {trials:,} trials; a sweep takes at most {_MAX_TRIALS:,}")


def _value_count(override: Override) -> int:
    """Return the number of values of one word. Raises UsageError: it has none, infinitely many, or too many."""
    word, value = str(override.input_line), override.value()
    if isinstance(value, RangeSweep):
        return _range_length(word, value)
    if not override.is_sweep_override():
        return 1
    _refuse_nested(override)
    count = len(value.list) if isinstance(value, ChoiceSweep) else sum(1 for _ in override.sweep_iterator())
    if count == 0:
        why = "" if isinstance(value, ChoiceSweep) else f": no option of {override.get_key_element()} has such a name"
        raise UsageError(f"{word} has no value in it{why}")
    return count


def _refuse_nested(override: Override) -> None:
    """Raise UsageError for ``key=a,range(3)``."""
    value = override.value()
    if isinstance(value, ChoiceSweep) and any(isinstance(item, Sweep) for item in value.list):
        raise UsageError(
            f"{override.input_line}: choice(…) and range(…) stand alone, not in a list with other values",
            hint=f"one list with all of them: {override.get_key_element()}=a,b,0,1,2",
        )


def _range_length(word: str, value: RangeSweep) -> int:
    """Return the number of values of ``range(start, stop, step)``. Raises UsageError: it has none, or too many."""
    start, stop, step = value.start, value.stop, value.step
    if start is None or stop is None or not all(math.isfinite(number) for number in (start, stop, step)):
        raise UsageError(f"{word}: range(start, stop, step) needs three finite numbers")
    if step == 0:
        raise UsageError(f"{word}: range(start, stop, step) needs a step that isn't 0")
    count = math.ceil((Fraction(stop) - Fraction(start)) / Fraction(step))
    if count <= 0:
        raise UsageError(f"{word} has no value in it: range(start, stop, step) ends before stop")
    if count > _MAX_TRIALS:
        raise UsageError(
            f"{word}: that would be {count:,} trials; a sweep takes at most {_MAX_TRIALS:,}",
            hint=f"search=tpe and {word.partition('=')[0]}='interval({min(start, stop)},{max(start, stop)})': a search "
            "draws from any number of values",
        )
    return count


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A dimension of unordered values, each as it is written after ``key=``."""

    values: tuple[str, ...]

    def text(self, value: Any) -> str:
        """Return the value as it is written after ``key=``."""
        return str(value)

    def __str__(self) -> str:
        return ",".join(self.values)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A dimension of numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    step: float | None  # None: any number between them
    log: bool  # drawn on a logarithmic scale
    whole: bool  # integers only

    @property
    def values(self) -> tuple[float, ...] | None:
        """All numbers in order; None if there are infinitely many."""
        if self.step is None:
            return None
        count = round((self.high - self.low) / self.step) + 1
        return tuple(self._at(index) for index in range(count))

    def text(self, value: float) -> str:
        """Return the number as it is written after ``key=``: 0.3, even if steps add up to 0.30000000000000004."""
        if self.step is not None:
            value = self._at(round((value - self.low) / self.step))
        return repr(int(value) if self.whole else float(value))

    def __str__(self) -> str:
        kind = f"{'log ' if self.log else ''}{'whole numbers ' if self.whole else ''}"
        step = "" if self.step is None or (self.whole and self.step == 1) else f" in steps of {self.step!r}"
        return f"{kind}{self.low!r} to {self.high!r}{step}"

    def _at(self, index: int) -> float:
        """Return ``low + index * step`` as decimal arithmetic gives it, without binary rounding."""
        value = Decimal(repr(self.low)) + index * Decimal(repr(self.step))
        return int(value) if self.whole else float(value)


Dimension = Choice | Number


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The space of a search: override key → dimension. ``fixed`` are the words with one value."""

    dimensions: Mapping[str, Dimension]
    fixed: tuple[str, ...]

    @property
    def infinite(self) -> list[str]:
        """The keys with infinitely many values."""
        return [name for name, item in self.dimensions.items() if item.values is None]

    @property
    def numbers(self) -> list[str]:
        """The keys of numbers that can have more than one value."""
        return [name for name, item in self.dimensions.items() if isinstance(item, Number) and item.low < item.high]

    def described(self) -> dict[str, str]:
        """Return key → line about its dimension, sorted, because the order of the words must not matter."""
        return {name: str(dimension) for name, dimension in sorted(self.dimensions.items())}


def space(overrides: Sequence[Override]) -> SearchSpace:
    """Build the search space from parsed overrides; of words with equal keys the last one counts.

    Raises UsageError: a word without values, an impossible scale, or an unknown tag.
    """
    last = {override.get_key_element(): override for override in overrides}
    dimensions = {key: _dimension(key, item) for key, item in last.items() if item.is_sweep_override()}
    fixed = tuple(str(item.input_line) for item in last.values() if not item.is_sweep_override())
    return SearchSpace(dimensions=dimensions, fixed=fixed)


def _dimension(key: str, override: Override) -> Dimension:
    """Return the dimension that a word with several values describes. Raises UsageError: as ``space``."""
    word = str(override.input_line)
    value = override.value()
    tags: set[str] = getattr(value, "tags", set())
    if tags - {"log"}:
        raise UsageError(f"{word}: the tag {sorted(tags - {'log'})[0]!r} means nothing here; the one there is: log")
    if isinstance(value, IntervalSweep):
        return _interval(word, value)
    if isinstance(value, RangeSweep):
        return _range(word, value)
    if tags:
        raise UsageError(f"{word}: a log scale needs numbers in between: tag(log, interval(a,b))")
    _refuse_nested(override)
    items = value.list if isinstance(value, ChoiceSweep) else override.sweep_iterator()  # the list is as typed
    options = tuple(dict.fromkeys(str(Transformer.str(item)) for item in items))
    if not options:
        raise UsageError(f"{word} has no value in it")
    return Choice(values=options)


def _interval(word: str, value: IntervalSweep) -> Number:
    low, high = value.start, value.end
    if low is None or high is None or not low < high:
        raise UsageError(f"{word}: interval(a,b) needs a < b")
    whole = isinstance(low, int) and isinstance(high, int)
    _check_log(word, low, value.tags)
    return Number(low=low, high=high, step=1 if whole else None, log="log" in value.tags, whole=whole)


def _range(word: str, value: RangeSweep) -> Number:
    _range_length(word, value)  # for its checks
    numbers = sorted(value.range())
    whole = all(isinstance(number, int) for number in numbers)
    log, step = "log" in value.tags, abs(value.step)
    _check_log(word, numbers[0], value.tags)
    if log and not (whole and step == 1):
        raise UsageError(f"{word}: a log scale has no steps; write tag(log, interval(a,b))")
    high = numbers[0] + (len(numbers) - 1) * step
    return Number(low=numbers[0], high=high, step=step, log=log, whole=whole)


def _check_log(word: str, low: float, tags: set[str]) -> None:
    if "log" in tags and not low > 0:
        raise UsageError(f"{word}: a log scale begins above 0, not at {low:g}")
