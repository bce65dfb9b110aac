"""Heartbeats of ranks, and the examination of ranks that don't move any more: files, signal and records.

A rank writes eight numbers (``CELLS``) into shared memory. The node agent on its host reads those of all ranks there
and sends them to the controller each second, as a ``NodeBeat``. When no rank moves, the controller sends an
``ExamineOrder``, and each agent answers with a ``NodeExamination``.
"""

# No ``from __future__ import annotations``: ``from_json`` needs the types. Python 3.9 has no ``X | None``.
# ruff: noqa: UP045
import enum
import signal
import struct
from typing import NamedTuple, Optional

# Files of one rank, all in the folder that torchrun makes for the rank's error file.
FILE, STACKS = "beat", "stacks"
"""The link to the rank's numbers, and the file to which it writes the stacks of its threads."""

RUNNING = "running-"
"""Followed by the process id: the rank's run isn't over. The rank removes the file at a good end."""

ENDED = "ended"
"""A script's rank has ended by itself, not by a signal. The file has one byte if the rank certainly never had a process
group of torch, else none."""

FLIGHT_PIPE, FLIGHT_DUMP = "nccl-", "nccl-collectives-"
"""Followed by the rank: the pipe that requests a dump of torch's flight recorder (with ``.pipe``), and the dump."""

STACKS_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""On this signal a rank writes the stacks of all its threads to ``STACKS``. SIGUSR2 is only the fallback: schedulers
send it before they take a host away, so scripts may handle it themselves."""

CELLS = struct.Struct("@8q")
PID, STEP, PHASE, MOVES, SINCE_NS, COLLECTIVES, OWN_NS = range(7)
"""Indices of a rank's numbers, as in ``RankBeat``; the eighth is free. ``SINCE_NS``: the monotonic clock at the last
change. ``OWN_NS``: nanoseconds spent on the rank's own part of its steps."""


class Phase(enum.IntEnum):
    """The current work of a rank."""

    STARTING = 0
    LOADING = 1
    COMPUTING = 2
    WAITING = 3
    UPDATING = 4
    EVALUATING = 5
    SAVING = 6
    ENDING = 7
    RUNNING_A_SCRIPT = 8  # its own phases are unknown (trainers/script/rank_hook.py)


_PHASE_WORDS = (
    "starting",
    "loading data",
    "computing gradients",
    "waiting in a collective",
    "updating weights",
    "evaluating",
    "saving a checkpoint",
    "writing the results",
    "running the script",
)


def hook_arguments() -> str:
    """Return the arguments of ``trainers.script.rank_hook.publish`` as Python text, for ranks without this package."""
    cells = [0] * (CELLS.size // 8)
    cells[PHASE] = Phase.RUNNING_A_SCRIPT.value
    return f"{FILE!r}, {STACKS!r}, {int(STACKS_SIGNAL)}, {ENDED!r}, {cells}, {PID}"


def phase_words(number: int) -> str:
    """Return a phase in words for users; "busy" for a number that this version doesn't know."""
    return _PHASE_WORDS[number] if 0 <= number < len(_PHASE_WORDS) else "busy"


class RankBeat(NamedTuple):
    """The progress of one rank."""

    rank: int
    pid: int
    step: int  # from 1; 0: none begun
    phase: int
    moves: int  # grows with each change of phase; for a script each time its agent sees that it has worked
    for_s: float  # seconds since the last change
    collectives: int  # entered so far
    own_s: float  # spent on its own part of its steps, without waiting for others

    @property
    def doing(self) -> str:
        return phase_words(self.phase)


class Gpu(NamedTuple):
    """Load of one GPU, from 0 to 1, and its memory."""

    busy: float
    memory_bytes: int
    memory_total_bytes: int


class Usage(NamedTuple):
    """Load of a node: its processors, memory, network without the loopback, and the disk of the run's folder."""

    cpu: float  # 0 to 1 of all cores
    memory_bytes: int
    memory_total_bytes: int
    received_per_s: float
    sent_per_s: float
    received_bytes: int = 0
    sent_bytes: int = 0
    disk_bytes: int = 0
    disk_free_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()


class NodeBeat(NamedTuple):
    """The message of a node each second."""

    host: str
    ranks: tuple[RankBeat, ...] = ()
    saved: int = 0  # the newest checkpoint: its step, for a script its unix time in ms; 0: none
    usage: Optional[Usage] = None


class Socket(NamedTuple):
    """A TCP connection to another host on which bytes wait."""

    peer: str  # IP address
    unsent_bytes: int
    sent_again: int  # how often the kernel has sent the same bytes again
    unread_bytes: int = 0  # received here, and not read by the rank


class Collectives(NamedTuple):
    """A rank's NCCL collectives of one process group, from torch's flight recorder."""

    group: str
    enqueued: int  # number of collectives passed to the rank's GPU
    completed: int  # of the enqueued ones
    next: str = ""  # the first incomplete one: all_reduce of 1000 Float
    at: str = ""  # ``file:line in function`` that called it, if known


class RankExamination(NamedTuple):
    """What a node agent saw of one rank from outside of its process."""

    beat: RankBeat
    host: str  # label in the configuration, filled in by the controller
    state: str = ""  # of its process, as in ps: T: stopped, D: waits for a disk, R: runs, S: sleeps; "": unknown
    cpu: float = 0.0  # how many cores it used
    sleeps_in: str = ""  # the kernel's function in which it sleeps
    stack: tuple[str, ...] = ()  # ``file:line in function`` of its main thread, innermost first
    sockets: tuple[Socket, ...] = ()
    nccl: tuple[Collectives, ...] = ()  # by process group, for ranks on GPUs


class NodeExamination(NamedTuple):
    """A node's answer to an ``ExamineOrder``: its ranks, or which ssh servers of other nodes it reaches."""

    host: str
    ranks: tuple[RankExamination, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()  # (address:port, one of answers, silent, refuses, unreachable)
