"""Where the ranks of a run stand, and what a look at them has shown: plain data (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = (
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
"""What a rank is at, by the number that it writes (trainers/distributed/heartbeat.py)."""
STARTING, LOADING, COMPUTING, WAITING, UPDATING, EVALUATING, SAVING, ENDING, SCRIPT = range(len(PHASES))


@dataclass(frozen=True, kw_only=True)
class RankBeat:
    """Where one rank stands. ``step`` counts from 1 (0: none begun yet), ``moves`` grows whenever anything changed (of
    a script: at each look at which its processes had done anything), the last time ``for_s`` seconds ago.
    ``collectives`` are those it has come to, ``own_s`` what its own part of its steps took, without the waiting for
    others."""

    rank: int
    pid: int
    step: int
    phase: int
    moves: int
    for_s: float
    collectives: int
    own_s: float

    @property
    def doing(self) -> str:
        return PHASES[self.phase] if 0 <= self.phase < len(PHASES) else "busy"


@dataclass(frozen=True, kw_only=True)
class Socket:
    """A connection to another host on which something waits to be sent, is sent for another time, or has come and
    waits for its process to read it."""

    peer: str
    unsent_bytes: int
    sent_again: int
    unread_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """A rank's NCCL collectives of one process group, as torch's flight recorder has them.

    ``given`` of them were handed to its GPU, of which ``ended`` are over. ``next`` is the first that isn't
    (``all_reduce of 1000 Float``; "" where all are), ``at`` the ``file:line in function`` that called it, if known.
    """

    group: str
    given: int
    ended: int
    next: str = ""
    at: str = ""


@dataclass(frozen=True, kw_only=True)
class RankLook:
    """What was seen of one rank while nothing moved.

    ``state`` is the letter of its process (T: stopped, D: waits for a disk, R: runs, S: sleeps; "": not known), ``cpu``
    how many cores it kept busy, ``sleeps_in`` what it waits for in the kernel, ``stack`` ``file:line in function`` of
    its main thread, innermost first; ``nccl`` a row for each process group, where the ranks compute on GPUs.
    """

    beat: RankBeat
    host: str
    state: str = ""
    cpu: float = 0.0
    sleeps_in: str = ""
    stack: tuple[str, ...] = ()
    sockets: tuple[Socket, ...] = ()
    nccl: tuple[Collectives, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """How busy one GPU is, as a part of 1, and its memory."""

    busy: float
    memory_bytes: int
    memory_total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How busy a node is. ``cpu`` is a part of all its cores; the network is all but the loopback, counted since the
    node started and now per second; the disk is that of the run's folder (0: it couldn't be asked)."""

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

    @staticmethod
    def of(value: Mapping[str, Any]) -> Usage:
        """From its JSON. Raises KeyError, TypeError or ValueError where that is damaged."""
        gpus = tuple(
            Gpu(
                busy=float(row["busy"]),
                memory_bytes=int(row["memory_bytes"]),
                memory_total_bytes=int(row["memory_total_bytes"]),
            )
            for row in value["gpus"]
        )
        return Usage(
            cpu=float(value["cpu"]),
            memory_bytes=int(value["memory_bytes"]),
            memory_total_bytes=int(value["memory_total_bytes"]),
            received_per_s=float(value["received_per_s"]),
            sent_per_s=float(value["sent_per_s"]),
            received_bytes=int(value["received_bytes"]),
            sent_bytes=int(value["sent_bytes"]),
            disk_bytes=int(value["disk_bytes"]),
            disk_free_bytes=int(value["disk_free_bytes"]),
            gpus=gpus,
        )


@dataclass(frozen=True, kw_only=True)
class NodeBeat:
    """What a node tells each second. ``saved`` is the step of its newest checkpoint (0: none, or not rank 0's node),
    of a script's the time of the newest, in ms. ``usage`` is None where the node doesn't know it (yet)."""

    host: str
    ranks: tuple[RankBeat, ...] = ()
    saved: int = 0
    usage: Usage | None = None


@dataclass(frozen=True, kw_only=True)
class NodeLook:
    """A node's answer to a look. ``peers`` are what the asked ssh servers do: answers, silent, refuses, unreachable."""

    host: str
    ranks: tuple[RankLook, ...] = ()
    peers: tuple[str, ...] = field(default=())
