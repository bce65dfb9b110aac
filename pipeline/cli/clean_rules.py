"""Which runs `doit clean` chooses, and why. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.cli.options import is_on
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.core.tables import is_count

if TYPE_CHECKING:
    from pipeline.runs.index import Row

_DAY_S = 86_400.0
_BY = "val/accuracy"
_DECIDES = ("config", "data", "topology")  # of a key; the rest is code and environment


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the words ask for: each rule that is given narrows.

    ``keep_best``: so many finished runs with the best ``by`` stay. Without any rule, what failed and what is superseded
    is chosen; with ``checkpoints``, those of all finished runs.
    """

    state: str | None = None
    superseded: bool = False
    older_than_days: float | None = None
    keep_best: int | None = None
    by: str = _BY
    checkpoints: bool = False

    @property
    def none_given(self) -> bool:
        return self.state is None and not self.superseded and self.older_than_days is None and self.keep_best is None


def rules_of(options: Mapping[str, str]) -> Rules:
    """The rules that a command line gives. Raises UsageError: a value that none can have."""
    if "by" in options and "keep_best" not in options:
        raise UsageError(f"by={options['by']} says by what keep_best=N takes the best, and there is no keep_best")
    best = options.get("keep_best")
    if best is not None and not is_count(best):
        raise UsageError(f"keep_best={best} must be a whole number from 1, the runs to keep")
    return Rules(
        state=options.get("state"),
        superseded=is_on(options, "superseded"),
        older_than_days=_days(options.get("older_than")),
        keep_best=None if best is None else int(best),
        by=options.get("by", _BY),
        checkpoints=is_on(options, "checkpoints"),
    )


def _days(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        days = float(given)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise UsageError(f"older_than={given} must be a number of days, such as older_than=30")
    return days


def superseded(rows: Sequence[Row], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Key → that of the newest finished run of the same configuration, data and ranks, for each run older than that.

    Args:
        rows: all runs, oldest first.
        parts: key → what key.json holds.
    """
    alike = {key: repr([known.get(part) for part in _DECIDES]) for key, known in parts.items() if known.get("config")}
    newest = {alike[row.key]: row for row in rows if row.state == State.FINISHED and row.key in alike}
    pairs = [(row, newest[alike[row.key]]) for row in rows if alike.get(row.key) in newest]
    return {row.key: last.key for row, last in pairs if row.unix_time < last.unix_time}


def ranks(values: Mapping[str, float], *, least_first: bool) -> dict[str, int]:
    """Key → 1 of the best value, 2 of the next, …; NaN is the worst."""
    sign = 1.0 if least_first else -1.0
    best_first = sorted(values, key=lambda key: (math.isnan(values[key]), sign * values[key]))
    return {key: place for place, key in enumerate(best_first, start=1)}


def why_chosen(row: Row, rules: Rules, *, newer: str | None, rank: int | None, now: float) -> str:
    """In a few words; '' where the rules don't choose the run.

    Args:
        newer: the key of the run that supersedes it.
        rank: its place among the finished runs; 1 is the best, None: it lacks the metric.
        now: unix seconds.
    """
    by_newer = f"superseded by {newer}" if newer else ""
    if rules.none_given:
        return "finished" if rules.checkpoints else "failed" if row.state == State.FAILED else by_newer
    reasons = [row.state.lower()] if rules.state is not None else []
    if rules.superseded:
        reasons.append(by_newer)
    if rules.older_than_days is not None:
        days = (now - row.unix_time) / _DAY_S
        reasons.append(f"{days:,.0f} days old" if days > rules.older_than_days else "")
    if rules.keep_best is not None:
        reasons.append(f"number {rank} by {rules.by}" if rank is not None and rank > rules.keep_best else "")
    return ", ".join(reasons) if all(reasons) else ""
