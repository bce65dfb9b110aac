"""The events of an attempt, as one stream: what its nodes send, what the controller does, and what it concludes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.cluster.attempt.stalls import Verdict
from pipeline.core.specs import Event, LaunchPlan, LogLine, NodeFacts


@dataclass(frozen=True, kw_only=True)
class ShownLine:
    """A line for the terminal. Every line of a node comes as ``LogLine`` too, also those that only its log needs."""

    line: LogLine


@dataclass(frozen=True, kw_only=True)
class HostNote:
    """A remark about a host, which further attempts on the same hosts would repeat."""

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

    facts: Sequence[NodeFacts]


@dataclass(frozen=True)
class CheckpointSaved:
    """The run folder has a new checkpoint; after a failure, the last one. It may come from another thread."""


@dataclass(frozen=True)
class AllSucceeded:
    """All nodes have succeeded. Their hosts are free, and the outputs are fetched next."""


FollowedEvent = LaunchPlan | Event | Verdict
"""What following an attempt yields: its plan when all nodes have started, the events of its nodes, a stall's cause."""
AttemptEvent = FollowedEvent | ShownLine | HostNote | Notice | Doing | HostsProbed | CheckpointSaved | AllSucceeded
Emit = Callable[[AttemptEvent], None]
"""Takes each event; it must not block, but for the copy of a ``CheckpointSaved``."""
