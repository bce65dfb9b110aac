"""Axes of a chart: where a value lies, and which values are written beside it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scale:
    """``low`` and ``high`` are the ends in values; with ``is_log`` both are above 0."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; beyond the ends it is cut."""
        if self.is_log:
            value, low, high = (math.log10(max(item, 1e-300)) for item in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values between the ends."""
        if not self.is_log:
            return _round(self.low, self.high, most)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        powers = [10.0**power for power in range(first, last + 1, max(1, (last - first) // most + 1))]
        return powers if len(powers) > 1 else _round(self.low, self.high, most)


def around(values: Iterable[float], *, log: bool = False) -> Scale | None:
    """A scale that shows all of them (on a log axis: all above 0). None: there is nothing to show.

    A value beyond 1e300 is left out, one nearer to 0 than its inverse is 0: no step between ticks would be a number.
    """
    known = [value if abs(value) > 1e-300 else 0.0 for value in values if math.isfinite(value) and abs(value) < 1e300]
    kept = [value for value in known if value > 0 or not log]
    if not kept:
        return None
    low, high = min(kept), max(kept)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)
    return Scale(low=low, high=high, is_log=log)


def text(value: float) -> str:
    """A tick's: ``0.25``, ``1,500``, ``1.5e-05``. All its digits, as ticks may differ in the last one alone."""
    size = abs(value)
    plain = f"{value:,.10g}"
    if not (0 < size < 1e-3 or size >= 1e6):
        return plain
    digits, _, power = f"{value:.9e}".partition("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{power}"
    return plain if size >= 1 and len(plain) < len(short) else short


def end(value: float) -> str:
    """What an axis begins or ends with, which is no round value: a whole number as it is, else three digits."""
    return text(value if float(value).is_integer() else float(f"{value:.3g}"))


def _round(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * power for unit in (1, 2, 5, 10) if unit * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    found = [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, first + most + 2)]
    return [value for value in found if low - 1e-9 * step <= value <= high + 1e-9 * step]


def positions(names: Sequence[str]) -> dict[str, float]:
    """Shares of an axis that has names instead of numbers, evenly spaced."""
    known = list(dict.fromkeys(names))
    return {name: 0.5 if len(known) == 1 else at / (len(known) - 1) for at, name in enumerate(known)}
