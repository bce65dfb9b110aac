"""The ranks of a node as they are seen from outside: their heartbeats, and an examination of those that hang.

An examination reads states, processor time, sockets, stacks and NCCL's collectives. It ends nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pickle
import re
import socket
import struct
import time
from typing import NamedTuple

from trainers.contract import run_folder
from trainers.contract.beats import (
    CELLS,
    FILE,
    FLIGHT_DUMP,
    FLIGHT_PIPE,
    STACKS,
    STACKS_SIGNAL,
    Collectives,
    NodeExamination,
    Phase,
    RankBeat,
    RankExamination,
    Socket,
)

from ..node import RANK_OUTPUTS, read_text
from ..requests import ExamineOrder, NodeStart
from ..wire import Json
from .processes import LINUX, ip_address, open_files, pids_of_tree, process_state, stat_fields, tcp_table

WINDOW_S = 1.5  # in which processor time is counted and stacks are written
DUMP_S = 6.0  # until a dump is complete: torch reads the pipe once a second, and took 4 to 5 s for 30 collectives
_DUMP_POLL_S = 0.2
_DAMAGED_DUMP = (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)
_MOST_FRAMES = 12
_WORKING_CORES = 0.02  # processor seconds per second from which a script's rank counts as working
_WORKING_WAKES_PER_S = 30.0  # the same for wake-ups: a download wakes for each packet, a wait a few times a second
_PEER_S = 1.0
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+) in (.+)$')
_ESTABLISHED = "01"
_STOPPED = ("T", "t")  # by a signal, or by a debugger
_stacks_at = [0.0]  # monotonic time when ranks last wrote their stacks, which is no work of their own


def examine(node: NodeStart, order: ExamineOrder) -> NodeExamination:
    """Return what can be seen of each rank of this node, or which of the ordered ssh servers answer."""
    if order.peers:
        peers = tuple((f"{host}:{port}", _try_ssh_server(host, port)) for host, port in order.peers)
        return NodeExamination(host=node.host, peers=peers)
    beats = read_beats(node)
    _stacks_at[0] = time.monotonic()
    cpu_before_s = [_state_and_cpu_s(beat.pid)[1] for _, beat in beats]
    stacks_bytes = [_request_stacks(folder, beat) if order.with_stacks else None for folder, beat in beats]
    dumps = [request_dump(folder, beat.rank) if order.with_stacks else None for folder, beat in beats]
    dumps_until = time.monotonic() + DUMP_S
    time.sleep(WINDOW_S)
    _stacks_at[0] = time.monotonic()
    ranks = [
        _examine_rank(folder, beat, cpu_before_s[number], stacks_bytes[number])
        for number, (folder, beat) in enumerate(beats)
    ]
    if not any(rank.state in _STOPPED for rank in ranks):  # a stopped rank is the reason itself, and writes no dump
        ranks = [
            rank._replace(nccl=read_dump(dump, dumps_until) if dump is not None else ())
            for rank, dump in zip(ranks, dumps)  # noqa: B905 - Python 3.9 has no strict
        ]
    return NodeExamination(host=node.host, ranks=tuple(ranks))


def _examine_rank(folder: str, beat: RankBeat, cpu_before_s: float, stacks_bytes: int | None) -> RankExamination:
    pid = beat.pid
    state, cpu_s = _state_and_cpu_s(pid)
    if holder := _stopped_around(pid):  # the reason itself: it stands in the rank's place, to be named
        state, beat = _STOPPED[0], beat._replace(pid=holder)
    stack = _innermost_frames(os.path.join(folder, STACKS), stacks_bytes) if stacks_bytes is not None else []
    return RankExamination(
        beat=beat,
        host="",
        state=state,
        cpu=round(max(0.0, cpu_s - cpu_before_s) / WINDOW_S, 2),
        sleeps_in=read_text(f"/proc/{pid}/wchan"),
        stack=tuple(stack),
        sockets=tuple(_stuck_sockets(pid)),
    )


def _state_and_cpu_s(pid: int) -> tuple[str, float]:
    """Return the main thread's state letter ("" if unknown), and the processor seconds of all threads."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = stat_fields(pid)
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def _stopped_around(pid: int) -> int | None:
    """Return a stopped process that holds the rank ``pid`` up: one of its children, or torchrun, its parent."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        around = [*pids_of_tree(pid), int(stat_fields(pid)[1])]
        return next((other for other in around if process_state(other) in _STOPPED), None)
    return None


def _request_stacks(folder: str, beat: RankBeat) -> int | None:
    """Ask the rank for its stacks; return where they begin in its file. None: it has no handler, and would end."""
    try:
        size = os.path.getsize(os.path.join(folder, STACKS))
        caught = re.search(r"^SigCgt:\s*(\w+)", read_text(f"/proc/{beat.pid}/status"), re.MULTILINE)
        # signals are counted from 1, bits from 0
        if not LINUX or (caught is not None and int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1):
            os.kill(beat.pid, STACKS_SIGNAL)
            return size
    except OSError:
        pass
    return None


def _innermost_frames(path: str, start_bytes: int) -> list[str]:
    """Return ``file:line in function`` of the main thread, innermost first; faulthandler writes that thread last."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(start_bytes)
            written = file.read(1 << 18)
    except OSError:
        return []
    last = re.split(r"^(?:Current thread|Thread) .*$", written, flags=re.MULTILINE)[-1]
    matches = (_FRAME.match(line) for line in last.splitlines())
    return [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in matches if frame][:_MOST_FRAMES]


def _stuck_sockets(pid: int) -> list[Socket]:
    """Return TCP connections of a process to other hosts with unsent, resent or unread bytes."""
    inodes: set[str] = set()
    with contextlib.suppress(OSError):
        inodes.update(target for _, target in open_files(pid))
    rows = []
    for fields in tcp_table(f"/proc/{pid}/net"):
        # columns: 2 remote address, 3 state, 4 send:receive queue, 6 retransmits, 9 inode
        if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in inodes:
            (unsent, unread), resent = (int(part, 16) for part in fields[4].split(":")), int(fields[6], 16)
            if unsent or resent or unread:
                peer = ip_address(fields[2])
                rows.append(Socket(peer=peer, unsent_bytes=unsent, sent_again=resent, unread_bytes=unread))
    return rows


def _try_ssh_server(address: str, port: int) -> str:
    """Return ``answers``, ``silent`` (it accepts, no ssh server answers), ``refuses`` or ``unreachable``."""
    try:
        connection = socket.create_connection((address, port), timeout=_PEER_S)
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "unreachable"
    with connection:
        try:
            return "answers" if connection.recv(4) else "silent"
        except OSError:
            return "silent"


def read_beats(node: NodeStart) -> list[tuple[str, RankBeat]]:
    """Return (folder of the rank's files, heartbeat) of each rank whose process lives."""
    beats = []
    ranks = os.path.join(glob.escape(node.state_dir), "ranks/*/attempt_*/*")
    for path in sorted(glob.glob(os.path.join(ranks, FILE))):
        with contextlib.suppress(OSError, struct.error, ValueError):
            with open(path, "rb") as file:
                pid, step, phase, moves, since_ns, collectives, own_ns, _ = CELLS.unpack(file.read(CELLS.size))
            folder = os.path.dirname(path)
            beat = RankBeat(
                rank=node.first_rank + int(os.path.basename(folder)),
                pid=pid,
                step=step,
                phase=phase,
                moves=moves,
                for_s=round((time.monotonic_ns() - since_ns) / 1e9, 3),
                collectives=collectives,
                own_s=round(own_ns / 1e9, 3),
            )
            beats.append((folder, beat))
    return beats


class RankBeats:
    """The heartbeats of a node's ranks.

    A script publishes no phases. So ``moves`` of its rank counts the calls of ``read`` that found new work: processor
    time, bytes, wake-ups of the main thread, or a printed line or metric, which counts for all ranks.
    """

    def __init__(self, node: NodeStart) -> None:
        self._node = node
        self._samples: dict[int, _Sample] = {}  # by the rank's process id
        self._sizes: dict[str, int] = {}  # of files that grow when a rank prints

    def read(self) -> list[RankBeat]:
        beats = [beat for _, beat in read_beats(self._node)]
        wrote = any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in beats) and self._wrote()
        return [self._script_beat(beat, wrote) if beat.phase == Phase.RUNNING_A_SCRIPT else beat for beat in beats]

    def _script_beat(self, beat: RankBeat, wrote: bool) -> RankBeat:
        pid, now = beat.pid, time.monotonic()
        last = self._samples.get(pid, _Sample(now, {}, 0, now))
        work = {member: _work_of(member, is_rank=member == pid) for member in pids_of_tree(pid)}
        has_worked = _has_worked(last.work, work, now - last.at) and _stacks_at[0] < last.at
        has_moved = wrote or not last.work or has_worked
        moves, moved_at = (last.moves + 1, now) if has_moved else (last.moves, last.moved_at)
        self._samples[pid] = _Sample(now, work, moves, moved_at)
        return beat._replace(moves=moves, for_s=round(now - moved_at, 3))

    def _wrote(self) -> bool:
        """Whether a rank printed or logged since the last call (not by the log: the agent writes there, too)."""
        state = self._node.state_dir
        paths = glob.glob(os.path.join(glob.escape(state), RANK_OUTPUTS))
        paths += [os.path.join(state, "torchrun.log"), os.path.join(self._node.run_dir, run_folder.METRICS)]
        before, self._sizes = self._sizes, {path: _size(path) for path in paths}
        return self._sizes != before


class _Work(NamedTuple):
    """The work of one process so far."""

    cpu_s: float = 0.0
    bytes: int = 0  # read and written, and pages read from a disk
    wakes: int = 0  # of the main thread of a rank
    is_ready: bool = False  # it has a core, or waits for one


class _Sample(NamedTuple):
    """What a script's rank had done at a look."""

    at: float  # monotonic
    work: dict[int, _Work]  # by process id
    moves: int
    moved_at: float


def _has_worked(before: dict[int, _Work], now: dict[int, _Work], passed_s: float) -> bool:
    pairs = [(before.get(pid, _Work()), work) for pid, work in now.items()]
    cpu_s = sum(work.cpu_s - old.cpu_s for old, work in pairs)
    wakes = sum(work.wakes - old.wakes for old, work in pairs)
    return (
        any(work.is_ready or work.bytes != old.bytes for old, work in pairs)
        or cpu_s >= _WORKING_CORES * passed_s
        or wakes >= _WORKING_WAKES_PER_S * passed_s
    )


def _work_of(pid: int, *, is_rank: bool) -> _Work:
    """Return the work of one process. ``is_rank``: its wake-ups count."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = stat_fields(pid)
        ticks = sum(map(int, fields[11:15]))  # its own and those of children that have ended
        amount = int(fields[9]) + sum(_numbers_in(f"/proc/{pid}/io", "rchar", "wchar"))  # fields[9]: major faults
        wakes = sum(_numbers_in(f"/proc/{pid}/status", "voluntary_ctxt_switches")) if is_rank else 0
        return _Work(ticks / os.sysconf("SC_CLK_TCK"), amount, wakes, is_ready=fields[0] == "R")
    return _Work()


def _numbers_in(path: str, *names: str) -> list[int]:
    return [
        int(number) for name, number in re.findall(r"^(\w+):\s*(\d+)$", read_text(path), re.MULTILINE) if name in names
    ]


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return -1


class _Plain(pickle.Unpickler):
    """Unpickles numbers, texts, lists and dictionaries alone: nothing in a rank's file is imported or called."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def request_dump(folder: str, rank: int) -> str | None:
    """Ask the rank with files in ``folder`` for a dump; return its path. None: it has no flight recorder."""
    pipe, dump = (os.path.join(folder, name) for name in (f"{FLIGHT_PIPE}{rank}.pipe", f"{FLIGHT_DUMP}{rank}"))
    with contextlib.suppress(OSError):
        os.unlink(dump)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.write(descriptor, b"1\n")
    os.close(descriptor)
    return dump


def read_dump(dump: str, until: float) -> tuple[Collectives, ...]:
    """Return the collectives of each process group; empty if no complete dump exists by ``until`` (monotonic)."""
    while True:
        with contextlib.suppress(OSError, *_DAMAGED_DUMP), open(dump, "rb") as file:
            return _collectives_of(_Plain(file).load())
        if time.monotonic() >= until:
            return ()
        time.sleep(_DUMP_POLL_S)


def _collectives_of(dump: Json) -> tuple[Collectives, ...]:
    rows = []
    for group, status in dump["pg_status"].items():
        given, ended = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
        if given <= 0:
            continue
        waits = [
            entry
            for entry in dump["entries"]
            if str(entry["process_group"][0]) == str(group)
            and entry["collective_seq_id"] == ended + 1
            and not entry["is_p2p"]
        ]
        which = _next_collective(waits[-1]) if waits else {}
        rows.append(Collectives(group=str(group), given=given, ended=max(ended, 0), **which))
    return tuple(rows)


def _next_collective(entry: Json) -> dict[str, str]:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    sizes = " and ".join("×".join(map(str, size)) or "1" for size in entry["input_sizes"])
    kinds = " and ".join(sorted({str(kind) for kind in entry["input_dtypes"]}))
    frames = [frame for frame in entry.get("frames", [])[:_MOST_FRAMES] if "/torch/" not in frame["filename"]]
    at = f"{frames[0]['filename']}:{frames[0]['line']} in {frames[0]['name']}" if frames else ""
    return {"next": f"{name} of {sizes} {kinds}", "at": at}
