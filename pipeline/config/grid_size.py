"""How many values each word of a sweep stands for, counted without making them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep

from pipeline.core.errors import UsageError

MOST = 100_000
"""Trials of a grid. Each is composed and has its key before the first starts: about a millisecond each."""


def refuse_impossible(overrides: Sequence[Override]) -> None:
    """Refuse a grid without a trial, and one with more trials than anybody waits for.

    Args:
        overrides: parsed words, the last of equal keys counts; no interval among them.

    Raises:
        UsageError: names the word and how many trials there would be.
    """
    counts = {override.get_key_element(): (count(override), str(override.input_line)) for override in overrides}
    total = math.prod(number for number, _ in counts.values())
    if total > MOST:
        number, word = max(counts.values())
        others = "" if number == total else f" and the other words together (it alone has {number:,} values)"
        raise UsageError(f"{word}{others}: that would be {total:,} trials; a sweep takes at most {MOST:,}")


def count(override: Override) -> int:
    """The number of values of one word, at least 1.

    Raises:
        UsageError: it has none, no end of them, or more than a sweep takes.
    """
    word, value = str(override.input_line), override.value()
    if isinstance(value, RangeSweep):
        return range_length(word, value)
    if not override.is_sweep_override():
        return 1
    number = len(value.list) if isinstance(value, ChoiceSweep) else sum(1 for _ in override.sweep_iterator())
    if number == 0:
        why = "" if isinstance(value, ChoiceSweep) else f": no option of {override.get_key_element()} has such a name"
        raise UsageError(f"{word} has no value in it{why}")
    return number


def range_length(word: str, value: RangeSweep) -> int:
    """``count`` of a range. Raises UsageError."""
    start, stop, step = value.start, value.stop, value.step
    if start is None or stop is None or not all(math.isfinite(number) for number in (start, stop, step)):
        raise UsageError(f"{word}: range(start, stop, step) needs three finite numbers")
    if step == 0:
        raise UsageError(f"{word}: range(start, stop, step) needs a step that isn't 0")
    number = math.ceil((Fraction(stop) - Fraction(start)) / Fraction(step))
    if number <= 0:
        raise UsageError(f"{word} has no value in it: range(start, stop, step) ends before stop")
    if number > MOST:
        raise UsageError(
            f"{word}: that would be {number:,} trials; a sweep takes at most {MOST:,}",
            hint=f"search=tpe and {word.partition('=')[0]}='interval({min(start, stop)},{max(start, stop)})': a search "
            "draws from any number of values",
        )
    return number
