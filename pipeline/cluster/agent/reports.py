"""What agents report of runs: records in their answers and in the files of a run's node.

A *start* is one launch of torchrun on all nodes; ``run_id`` is its id, made of the run's key, the run folder, the
number of the attempt and a random part.
"""

# No ``from __future__ import annotations``: ``from_json`` needs the types. Python 3.9 has no ``X | None``.
# ruff: noqa: UP045
from typing import Any, NamedTuple, Optional

from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import Container


class RankFailure(NamedTuple):
    """The error of one rank, from its own files or from torchrun; ``rank`` is global."""

    rank: int
    unix_time: float  # by the node's clock
    message: str
    traceback: str = ""


class NodeEnd(NamedTuple):
    """How a node's part of a start ended: ``exit.json`` in its state folder."""

    code: int  # torchrun's exit code; negative: the signal that ended it
    reason: str = ""
    errors: tuple[RankFailure, ...] = ()  # the earliest first
    tail: tuple[str, ...] = ()  # torchrun's last lines
    gone: bool = True  # False: some processes could not be ended
    lost: bool = False  # the supervisor didn't see the end
    outlived: str = ""  # processes that went on after a script's end, and were ended


class Standing(NamedTuple):
    """Whether a node's part of a start still runs."""

    identity: str  # of the node, as ``agent.node.identity`` makes it: the same for two names of one node
    alive: bool
    code: Optional[int] = None  # None: it runs, nothing of it is there, or its agent was killed
    reason: str = ""
    errors: tuple[RankFailure, ...] = ()


class Lines(NamedTuple):
    """Whole lines of a node's log or of metrics.jsonl, with their byte range in that file."""

    file: str  # log or metrics
    texts: tuple[str, ...]
    start_bytes: int
    end_bytes: int


class TarHead(NamedTuple):
    """The answer to a ``CollectRequest`` in front of the tar."""

    too_large_bytes: Optional[int] = None  # the size of working directories that stay on the node; None: none does


class TarTrailer(NamedTuple):
    """The answer to a ``CollectRequest`` behind the tar."""

    unsent: dict[str, str]  # the first files that could not be sent → why
    unsent_count: int  # of all


class RegistryEntry(NamedTuple):
    """A registered supervisor: a file in the registry, and ``agent.json`` in its state folder."""

    identity: str  # of its node, as in ``Standing``
    run_key: str
    run_id: str
    mark: str  # in the environment of all its processes
    pid: int
    born: Optional[str]  # when that process started, in the system's form
    state_dir: str
    run_dir: str = ""
    remove: tuple[str, ...] = ()  # folders of the attempt
    container: Optional[Container] = None


class JobReport(NamedTuple):
    """A line of a job's node: its facts, the end of a start, or an examination of the ranks."""

    restart: int  # how often the scheduler had requeued the job; 0 at first
    now: float  # unix time of the node
    facts: Optional[dict[str, Any]] = None  # ``HostFacts`` as JSON, which the controller checks field by field
    run_id: str = ""  # of the start that the following fields belong to
    end: Optional[NodeEnd] = None
    was_terminated: bool = False  # the scheduler has ended the start with SIGTERM
    examination: Optional[NodeExamination] = None


class JobBeat(NamedTuple):
    """The newest states of the ranks on a job's node."""

    run_id: str
    unix_time: float
    beat: NodeBeat
