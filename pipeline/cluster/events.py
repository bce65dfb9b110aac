"""The events of an attempt: what its nodes send, and what the controller does. Log, view and recorder subscribe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.core.specs import LaunchPlan
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import HostFacts

_LINE_LIMIT = 2000  # characters of a line on the terminal


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The error of one rank, from torch's error file or its output."""

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
    """torchrun on a node and all of its processes have ended."""

    host: str
    code: int
    reason: str = ""
    errors: tuple[RankError, ...] = ()
    outlived: str = ""  # processes that went on after a script's end, until the agent ended them


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """The node no longer answers, its agent died without an exit code, or its processes could not be ended."""

    host: str
    reason: str  # if it isn't explained, words that follow the host's name: can no longer be followed
    is_explained: bool = False  # the host or the run folder shows what happened


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
    """Why ranks don't move, or why they mostly wait: which rank or connection is the cause.

    ``kind``: stopped, disk, spins, lock, locked file, connection, worker, sleeps, skipped, slow link, dropped link, or
    collective (no rank differs: ``rank`` is None). ``stack``: of that rank, innermost frame first.
    """

    rank: int | None
    host: str
    kind: str
    text: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ShownLine:
    """A line for the terminal. Each line of a node comes as a ``LogLine``, and only some of them as ``ShownLine``."""

    line: LogLine


@dataclass(frozen=True, kw_only=True)
class HostNote:
    """A remark about a host. Each attempt on the host emits it again, so only that of the first attempt is shown."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """News of this attempt: a queued job, a busy or silent host, outputs that could not be fetched yet."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What the command waits for from now on, besides the ranks."""

    what: str | Callable[[], str] | None  # words that follow "still", or a function that returns them when needed


@dataclass(frozen=True, kw_only=True)
class HostsProbed:
    """All hosts have answered and can take part. Nothing was started yet."""

    facts: Sequence[HostFacts]


@dataclass(frozen=True)
class EarlierStartsEnded:
    """Nothing of earlier attempts runs any more, and their checkpoints are here. Nothing was started yet."""


@dataclass(frozen=True)
class CheckpointSaved:
    """The run folder has a new checkpoint; after a failure, the last one. Another thread may emit this event."""


@dataclass(frozen=True)
class AllSucceeded:
    """All nodes have succeeded. Their hosts are free, and the outputs are fetched next."""


FollowedEvent = LaunchPlan | Event | Verdict
"""Events while an attempt is followed: its plan when all nodes have started, those of its nodes, a stall's cause."""
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
"""Takes an event. It must not block, except to copy a saved checkpoint."""
