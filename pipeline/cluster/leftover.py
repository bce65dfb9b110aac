"""What attempts that are over have left on hosts: which of it may go, and why the rest stays.

A host removes what its controller could not (the link was down, the controller was killed) once somebody asks it. The
host says what nothing there uses any more (pipeline/cluster/agent/running/leftovers.py); here stands what is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.cluster import earlier
from pipeline.core.specs import NodeFacts
from pipeline.core.tables import counted, file_size
from pipeline.runs import journal

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

KEPT_S = 7 * 86_400.0  # outputs of a run that this project doesn't know: another clone's command may fetch them
SETTLED_S = 3600.0  # what holds no outputs: its controller, if it lives, was away for this long


@dataclass(frozen=True, kw_only=True)
class Left:
    """The folder of one attempt on one host, which nothing there uses. ``name`` is ``RUN ID/node0``."""

    host: str
    name: str
    idle_s: float
    holds_outputs: bool
    bytes: int

    @property
    def run_id(self) -> str:
        return self.name.partition("/")[0]


def of(facts: Sequence[NodeFacts]) -> list[Left]:
    """What the hosts have told when they were probed."""
    return [Left(host=fact.host, **row) for fact in facts for row in fact.extra.get("left", [])]


def why_stays(left: Left, runs_dir: Path) -> str:
    """Why it is still wanted; '' where it may go.

    Args:
        runs_dir: of this project, whose runs it knows.
    """
    begin = journal.prefix_of(left.run_id)
    key = begin[: -len("-abcdef-")]
    run_dir = runs_dir.resolve() / key
    ours = begin == journal.prefix(key, run_dir)
    if ours and earlier.is_fetched(left.run_id, run_dir):
        return ""
    if ours and left.holds_outputs and earlier.is_gone_on_from(left.run_id, run_dir):
        return f"run {key} goes on from its checkpoints: the same doit train fetches them"
    wanted = left.holds_outputs and (not ours or run_dir.exists())
    limit_s = KEPT_S if wanted else SETTLED_S
    if left.idle_s > limit_s:
        return ""
    return f"it was in use {ago(left.idle_s)} ago" + (", and has outputs of a run unknown here" if wanted else "")


def clear(launcher: Launcher, facts: Sequence[NodeFacts], runs_dir: Path) -> list[str]:
    """Remove what may go; a line for each host that had something. Once for each time that the hosts were asked."""
    wanted = [left for left in of(facts) if not why_stays(left, runs_dir)]
    names = [(fact, [left.name for left in wanted if left.host == fact.host]) for fact in facts]
    gone = launcher.clear([(fact, chosen) for fact, chosen in names if chosen])
    for fact in facts:
        cast(dict[str, Any], fact.extra).pop("left", None)
    lines = []
    for host, removed in gone.items():
        size = sum(left.bytes for left in wanted if left.host == host and left.name in removed)
        what = f"what was left of {counted(len(removed), 'attempt')}, {file_size(size)}"
        lines += [f"{host}: removed {what}"] if removed else []
    return lines


def ago(seconds: float) -> str:
    """In words."""
    return f"{seconds / 86_400:.0f} days" if seconds >= 2 * 86_400 else f"{seconds / 60:.0f} minutes"
