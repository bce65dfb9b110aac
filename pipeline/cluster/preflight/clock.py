"""Compare each host's clock with this computer's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipeline.cluster.preflight.judgement import ALL, Check, judged
from pipeline.core.specs import NodeFacts

TOLERATED_S = 2.0
_HINT = "sudo chronyc makestep there, or sudo timedatectl set-ntp true"


class Offset(NamedTuple):
    """How far a clock is ahead of this computer's (negative: behind), and the possible error of that."""

    offset_s: float
    error_s: float

    @property
    def at_least_s(self) -> float:
        """The least difference that is certain."""
        return max(0.0, abs(self.offset_s) - self.error_s)


def offset(times: Mapping[str, float]) -> Offset:
    """Compute an offset like NTP (RFC 5905, section 8).

    Args:
        times: unix seconds by this computer's clock when it ``asked`` and was ``answered``, and by the host's clock
            when the host ``began`` and finished (``said``) its answer.
    """
    there, back = times["began"] - times["asked"], times["said"] - times["answered"]
    return Offset((there + back) / 2, abs(there - back) / 2)


def checks(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Check the clock of each host, or this computer's if all hosts differ from it by the same offset."""
    offsets = {}
    for fact in facts:
        times = {**fact.extra, "said": fact.unix_time}
        if {"asked", "answered", "began"} <= times.keys():  # not where a launcher didn't record them
            offsets[fact.host] = offset(times)
    ordered = sorted(measured.offset_s for measured in offsets.values())
    all_differ = len(ordered) > 1 and all(measured.at_least_s > TOLERATED_S for measured in offsets.values())
    if all_differ and ordered[-1] - ordered[0] <= TOLERATED_S:  # alike, so this computer's clock is wrong
        median_s = ordered[len(ordered) // 2]
        seen = f"this computer's is {_difference(-median_s)} those of all hosts, which agree"
        hint = _HINT.replace(" there", " here")
        yield judged(ALL, "clock", seen, False, wanted=f"within {TOLERATED_S:g} s", hint=hint)
        return
    for host, measured in offsets.items():
        seen = f"{_difference(measured.offset_s)} this computer's (±{measured.error_s:.2f} s)"
        is_ok = measured.at_least_s <= TOLERATED_S
        yield judged(host, "clock", seen, is_ok, wanted=f"within {TOLERATED_S:g} s", hint=_HINT)


def _difference(offset_s: float) -> str:
    return f"{abs(offset_s):.2f} s {'ahead of' if offset_s >= 0 else 'behind'}"
