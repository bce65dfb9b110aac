"""The events of an attempt, as one stream: what its nodes send, what the controller does, and what it concludes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.core.specs import LaunchPlan
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import HostFacts

_LINE_LIMIT = 2000  # characters of a line on the terminal


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The first error of one rank, from torch's error file."""

    rank: int
    unix_time: float
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a node's output. ``rank`` is None for torchrun's own lines."""

    host: str
    rank: int | None
    text: str

    @property
    def shown(self) -> str:
        """The line for the terminal; one that would fill pages, such as a printed array, is cut."""
        excess = len(self.text) - _LINE_LIMIT
        text = self.text
        if excess > 0:
            text = f"{text[:_LINE_LIMIT]}… (cut: {excess:,} more characters are in the log)"
        return f"{self.host}:{'-' if self.rank is None else self.rank} | {text}"


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One raw line of rank 0's metrics.jsonl, newline stripped."""

    text: str


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """torchrun on a node and its whole process tree have ended.

    ``outlived`` names processes started by a script that had to be killed afterwards.
    """

    host: str
    code: int
    reason: str = ""
    errors: tuple[RankError, ...] = ()
    outlived: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """The node no longer answers, its agent died without an exit code, or its processes could not be ended.

    ``is_explained``: the host or the run folder shows what happened, and ``reason`` is a sentence of its own; else
    ``reason`` follows the host's name (``gpu1 can no longer be followed``).
    """

    host: str
    reason: str
    is_explained: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeSilent:
    """The node has sent nothing for some seconds; its ranks may keep training, and the stream is reopened."""

    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeAnswers:
    """A node that was silent for ``silent_s`` answers again; none of its output is lost."""

    host: str
    silent_s: float


Event = LogLine | MetricsLine | NodeBeat | NodeExamination | NodeSilent | NodeAnswers | NodeExit | NodeLost
"""What the nodes of an attempt send, and the silence of one."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why ranks don't move.

    ``kind``: stopped, disk, spins, lock, locked file, connection, worker, sleeps, skipped, slow link, dropped link, or
    collective (no rank stands out: ``rank`` is None). ``text`` describes it; ``stack`` is that rank's, innermost first.
    """

    rank: int | None
    host: str
    kind: str
    text: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownLine:
    """A line for the terminal. Every line of a node comes as ``LogLine`` too, also those that only its log needs."""

    line: LogLine


@dataclass(frozen=True, kw_only=True)
class HostNote:
    """A remark about a host. Each attempt on it emits the remark again, so only a first attempt's is shown."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """News of this attempt: a queued job, a busy or silent host, outputs that could not be fetched yet."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What is waited for from now on: words that follow "still", or a function that returns them when needed.

    None: nothing but the ranks.
    """

    what: str | Callable[[], str] | None


@dataclass(frozen=True, kw_only=True)
class HostsProbed:
    """The hosts have answered and can take part; nothing has started."""

    facts: Sequence[HostFacts]


@dataclass(frozen=True)
class EarlierStartsEnded:
    """Nothing of an earlier attempt runs any more, and what it left on hosts is here; this one hasn't started."""


@dataclass(frozen=True)
class CheckpointSaved:
    """The run folder has a new checkpoint; after a failure, the last one. It may come from another thread."""


@dataclass(frozen=True)
class AllSucceeded:
    """All nodes have succeeded. Their hosts are free, and the outputs are fetched next."""


FollowedEvent = LaunchPlan | Event | Verdict
"""What following an attempt yields: its plan when all nodes have started, the events of its nodes, a stall's cause."""
AttemptEvent = (
    FollowedEvent
    | ShownLine
    | HostNote
    | Notice
    | Doing
    | HostsProbed
    | EarlierStartsEnded
    | CheckpointSaved
    | AllSucceeded
)
Emit = Callable[[AttemptEvent], None]
"""Takes each event; it must not block, but for the copy of a ``CheckpointSaved``."""
