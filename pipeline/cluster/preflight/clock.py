"""Compare each host's clock with this computer's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.cluster.preflight.judgement import ALL, Check, judged
from pipeline.core.specs import NodeFacts

TOLERATED_S = 2.0
_HINT = "sudo chronyc makestep there, or sudo timedatectl set-ntp true"


@dataclass(frozen=True, kw_only=True)
class Offset:
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
    return Offset(offset_s=(there + back) / 2, error_s=abs(there - back) / 2)


def times(fact: NodeFacts) -> dict[str, float] | None:
    """Return the times of the probe; None if the launcher didn't record them."""
    if not {"asked", "answered", "began"} <= fact.extra.keys():
        return None
    return {**{name: float(fact.extra[name]) for name in ("asked", "answered", "began")}, "said": fact.unix_time}


def checks(facts: Sequence[NodeFacts], shorter: Mapping[str, Mapping[str, float]]) -> Iterator[Check]:
    """Check the clock of each host, or this computer's if all hosts differ from it by the same offset.

    Args:
        shorter: host → times of a round trip shorter than the probe's, if there was one.
    """
    times_by_host = {fact.host: round_trip for fact in facts if (round_trip := shorter.get(fact.host) or times(fact))}
    offsets = {host: offset(round_trip) for host, round_trip in times_by_host.items()}
    if len(offsets) > 1 and _all_differ_alike(list(offsets.values())):
        # the median tells how far this computer is off
        median_s = sorted(measured.offset_s for measured in offsets.values())[len(offsets) // 2]
        seen = f"this computer's is {_difference(-median_s)} those of all hosts, which agree"
        hint = _HINT.replace(" there", " here")
        yield judged(ALL, "clock", seen, False, wanted=f"within {TOLERATED_S:g} s", hint=hint)
        return
    for host, measured in offsets.items():
        yield _judged(host, measured)


def _all_differ_alike(offsets: Sequence[Offset]) -> bool:
    """True if all hosts are off by the same, so that this computer's clock is wrong."""
    values = [measured.offset_s for measured in offsets]
    return all(measured.at_least_s > TOLERATED_S for measured in offsets) and max(values) - min(values) <= TOLERATED_S


def _judged(host: str, measured: Offset) -> Check:
    seen = f"{_difference(measured.offset_s)} this computer's (±{measured.error_s:.2f} s)"
    is_ok = measured.at_least_s <= TOLERATED_S
    return judged(host, "clock", seen, is_ok, wanted=f"within {TOLERATED_S:g} s", hint=_HINT)


def _difference(offset_s: float) -> str:
    return f"{abs(offset_s):.2f} s {'ahead of' if offset_s >= 0 else 'behind'}"
