"""Heartbeats: the progress of each rank, the load of its node, and the examination of ranks that don't move.

A rank writes numbers into memory (``CELLS``), from which its agent makes a ``NodeBeat`` each second.
"""

# No ``from __future__ import annotations``: ``from_json`` needs the types. Python 3.9 has no ``X | None``.
# ruff: noqa: UP045
import enum
import signal
import struct
from typing import NamedTuple, Optional

FILE, STACKS = "beat", "stacks"
"""Next to a rank's error file: the link to its numbers, and the file for the stacks of its threads."""

RUNNING = "running-"
"""Next to them, followed by the process id: the rank's run isn't over. It is removed at a good end."""

ENDED = "ended"
"""Next to them: a script's rank has ended by itself, not by a signal. It has a byte if the rank certainly never had a
process group of torch."""

FLIGHT_PIPE, FLIGHT_DUMP = "nccl-", "nccl-collectives-"
"""Next to them, followed by the rank: the pipe for requests to torch's flight recorder (``.pipe``), and its answer."""

STACKS_SIGNAL = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""On this signal a rank writes the stacks of all its threads to ``STACKS``. Not SIGUSR2 if another one is free: scripts
handle it themselves, because schedulers send it before they take a host away."""

CELLS = struct.Struct("@8q")
PID, STEP, PHASE, MOVES, SINCE_NS, COLLECTIVES, OWN_NS = range(7)
"""Indices of a rank's numbers; the eighth is free. ``SINCE_NS``: the monotonic clock at the last change."""


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
    moves: int  # grows with each change; for a script with each sample in which its processes had worked
    for_s: float  # since the last change
    collectives: int  # entered so far
    own_s: float  # of its own part of its steps, without waiting for others

    @property
    def doing(self) -> str:
        return phase_words(self.phase)


class Gpu(NamedTuple):
    """Load of one GPU, from 0 to 1, and its memory."""

    busy: float
    memory_bytes: int
    memory_total_bytes: int


class Usage(NamedTuple):
    """Load of a node: ``cpu`` from 0 to 1 of all cores; network without the loopback; the disk of the run's folder."""

    cpu: float
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
    saved: int = 0  # step of the newest checkpoint, of a script unix time in ms; 0: none
    usage: Optional[Usage] = None


class Socket(NamedTuple):
    """A connection to another host with bytes that are unsent, sent again (number of times), or unread here."""

    peer: str
    unsent_bytes: int
    sent_again: int
    unread_bytes: int = 0


class Collectives(NamedTuple):
    """A rank's NCCL collectives of one process group, from torch's flight recorder."""

    group: str
    given: int  # passed to its GPU
    ended: int  # of these
    next: str = ""  # the first incomplete one: all_reduce of 1000 Float
    at: str = ""  # ``file:line in function`` that called it, if known


class RankExamination(NamedTuple):
    """The examination of one rank."""

    beat: RankBeat
    host: str
    state: str = ""  # letter of its process: T: stopped, D: waits for a disk, R: runs, S: sleeps; "": unknown
    cpu: float = 0.0  # cores that it used
    sleeps_in: str = ""  # the kernel's function
    stack: tuple[str, ...] = ()  # ``file:line in function`` of its main thread, innermost first
    sockets: tuple[Socket, ...] = ()
    nccl: tuple[Collectives, ...] = ()  # by process group, for ranks on GPUs


class NodeExamination(NamedTuple):
    """A node's answer to an ``ExamineOrder``. ``peers``: address:port, answers, silent, refuses or unreachable."""

    host: str
    ranks: tuple[RankExamination, ...] = ()
    peers: tuple[tuple[str, str], ...] = ()
