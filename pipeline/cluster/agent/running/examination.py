"""Observe the ranks of a node from outside: their heartbeats each second, and an examination of ranks that hang.

An examination reads process states, processor time, sockets, stacks and NCCL's collectives. It ends nothing.
``RankBeats.read`` and ``examine`` are called by the agent process that follows a start (``follow.py``, ``job.py``).
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

from trainers.contract import beats, run_folder
from trainers.contract.beats import Collectives, NodeExamination, Phase, RankBeat, RankExamination, Socket

from ..node import RANK_OUTPUTS, read_text
from ..requests import ExamineOrder, NodeStart
from ..wire import Json
from .processes import LINUX, ip_address, open_files, pids_of_tree, process_state, stat_fields, tcp_table

WINDOW_S = 1.5  # in which processor time is counted and stacks are written
DUMP_S = 6.0  # limit for a dump: torch reads the pipe once a second, and took 4 to 5 s for 30 collectives
_DUMP_POLL_S = 0.2
_DAMAGED_DUMP = (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)
_MOST_FRAMES = 12
# A script's rank counts as working from this load on. A wait for other ranks wakes a few times a second, but a
# download wakes for each packet.
_WORKING_CORES = 0.02
_WORKING_WAKES_PER_S = 30.0
_PEER_S = 1.0
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+) in (.+)$')
_ESTABLISHED = "01"
_STOPPED = ("T", "t")  # by a signal, or by a debugger
_stacks_at = [0.0]  # monotonic: the last examination; the stacks that ranks write for it are no work of a script


def examine(node: NodeStart, order: ExamineOrder) -> NodeExamination:
    """Return what can be seen of each rank of this node, or which of the ordered ssh servers answer."""
    if order.peers:
        peers = tuple((f"{host}:{port}", _try_ssh_server(host, port)) for host, port in order.peers)
        return NodeExamination(host=node.host, peers=peers)
    # first request everything that ranks have to write themselves, then give all of them the same time for it
    folders_and_beats = read_beats(node)
    _stacks_at[0] = time.monotonic()
    cpu_before_s = [_state_and_cpu_s(beat.pid)[1] for _, beat in folders_and_beats]
    stacks_bytes = [_request_stacks(folder, beat) if order.with_stacks else None for folder, beat in folders_and_beats]
    dumps = [request_dump(folder, beat.rank) if order.with_stacks else None for folder, beat in folders_and_beats]
    dumps_until = time.monotonic() + DUMP_S
    time.sleep(WINDOW_S)
    _stacks_at[0] = time.monotonic()
    ranks = [
        _examine_rank(folder, beat, cpu_before_s[number], stacks_bytes[number])
        for number, (folder, beat) in enumerate(folders_and_beats)
    ]
    # a stopped rank explains the hang already, and would let this wait for its dump in vain
    if not any(rank.state in _STOPPED for rank in ranks):
        ranks = [
            rank._replace(nccl=read_dump(dump, dumps_until) if dump is not None else ())
            for rank, dump in zip(ranks, dumps)  # noqa: B905 - Python 3.9 has no strict
        ]
    return NodeExamination(host=node.host, ranks=tuple(ranks))


def _examine_rank(folder: str, beat: RankBeat, cpu_before_s: float, stacks_bytes: int | None) -> RankExamination:
    """Return the examination of one rank. ``stacks_bytes``: where its newest stacks begin in its file; None: none."""
    pid = beat.pid
    state, cpu_s = _state_and_cpu_s(pid)
    # report a stopped process that holds the rank up as if it were the rank, so that the controller names it
    stopped_pid = _stopped_around(pid)
    if stopped_pid is not None:
        state, beat = _STOPPED[0], beat._replace(pid=stopped_pid)
    stack = _innermost_frames(os.path.join(folder, beats.STACKS), stacks_bytes) if stacks_bytes is not None else []
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
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime
    return "", 0.0


def _stopped_around(pid: int) -> int | None:
    """Return a stopped process that holds the rank ``pid`` up: one of its children, or torchrun, its parent."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        parent = int(stat_fields(pid)[1])
        return next((other for other in [*pids_of_tree(pid), parent] if process_state(other) in _STOPPED), None)
    return None


def _request_stacks(folder: str, beat: RankBeat) -> int | None:
    """Ask the rank for its stacks. Return where they will begin in its file (bytes); None: it can't write them."""
    try:
        size = os.path.getsize(os.path.join(folder, beats.STACKS))
        # without a handler the signal would end the rank. SigCgt: a mask in which bit 0 is signal 1
        caught = re.search(r"^SigCgt:\s*(\w+)", read_text(f"/proc/{beat.pid}/status"), re.MULTILINE)
        if not LINUX or (caught is not None and int(caught[1], 16) >> (beats.STACKS_SIGNAL - 1) & 1):
            os.kill(beat.pid, beats.STACKS_SIGNAL)
            return size
    except OSError:
        pass
    return None


def _innermost_frames(path: str, start_bytes: int) -> list[str]:
    """Return the main thread's frames as ``file:line in function``, innermost first."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(start_bytes)
            written = file.read(1 << 18)
    except OSError:
        return []
    main_thread = re.split(r"^(?:Current thread|Thread) .*$", written, flags=re.MULTILINE)[-1]  # faulthandler's order
    matches = (_FRAME.match(line) for line in main_thread.splitlines())
    return [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in matches if frame][:_MOST_FRAMES]


def _stuck_sockets(pid: int) -> list[Socket]:
    """Return TCP connections of a process to other hosts with unsent, resent or unread bytes."""
    inodes: set[str] = set()
    with contextlib.suppress(OSError):
        inodes.update(target for _, target in open_files(pid))
    rows = []
    for fields in tcp_table(f"/proc/{pid}/net"):
        # fields: 2 remote address, 3 state, 4 send queue:receive queue, 6 retransmits, 9 inode; numbers are hexadecimal
        if fields[3] == _ESTABLISHED and f"socket:[{fields[9]}]" in inodes:
            unsent, unread = (int(length, 16) for length in fields[4].split(":"))
            resent = int(fields[6], 16)
            if unsent or resent or unread:
                peer = ip_address(fields[2])
                rows.append(Socket(peer=peer, unsent_bytes=unsent, sent_again=resent, unread_bytes=unread))
    return rows


def _try_ssh_server(address: str, port: int) -> str:
    """Return ``answers``, ``silent`` (connected, but no greeting of ssh came), ``refuses`` or ``unreachable``."""
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
    found = []
    ranks = os.path.join(glob.escape(node.state_dir), "ranks/*/attempt_*/*")
    for path in sorted(glob.glob(os.path.join(ranks, beats.FILE))):
        with contextlib.suppress(OSError, struct.error, ValueError):
            with open(path, "rb") as file:
                numbers = beats.CELLS.unpack(file.read(beats.CELLS.size))
            pid, step, phase, moves, since_ns, collectives, own_ns, _ = numbers
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
            found.append((folder, beat))
    return found


class RankBeats:
    """Reads the heartbeats of a node's ranks again and again.

    A script publishes no phases. So ``moves`` of its rank counts how often ``read`` found that it had worked since the
    previous call: processor time, bytes, or wake-ups. A printed line or metric counts for all ranks.
    """

    def __init__(self, node: NodeStart) -> None:
        self._node = node
        self._samples: dict[int, _Sample] = {}  # by the rank's process id
        self._sizes: dict[str, int] = {}  # of files that grow when a rank prints

    def read(self) -> list[RankBeat]:
        new = [beat for _, beat in read_beats(self._node)]
        has_printed = any(beat.phase == Phase.RUNNING_A_SCRIPT for beat in new) and self._has_printed()
        return [self._script_beat(beat, has_printed) if beat.phase == Phase.RUNNING_A_SCRIPT else beat for beat in new]

    def _script_beat(self, beat: RankBeat, has_printed: bool) -> RankBeat:
        """Fill in ``moves`` and ``for_s`` of a script's rank by comparing its work with the previous sample."""
        pid, now = beat.pid, time.monotonic()
        last = self._samples.get(pid, _Sample(now, {}, 0, now))
        work = {member: _work_of(member, is_rank=member == pid) for member in pids_of_tree(pid)}
        # an examination since the last sample made the rank write its stacks: that is no work of the script
        has_worked = _has_worked(last.work, work, now - last.at) and _stacks_at[0] < last.at
        has_moved = has_printed or not last.work or has_worked
        moves, moved_at = (last.moves + 1, now) if has_moved else (last.moves, last.moved_at)
        self._samples[pid] = _Sample(now, work, moves, moved_at)
        return beat._replace(moves=moves, for_s=round(now - moved_at, 3))

    def _has_printed(self) -> bool:
        """Return whether a rank printed or logged since the last call, by the sizes of the files that ranks write."""
        state = self._node.state_dir
        paths = glob.glob(os.path.join(glob.escape(state), RANK_OUTPUTS))
        paths += [os.path.join(state, "torchrun.log"), os.path.join(self._node.run_dir, run_folder.METRICS)]
        before, self._sizes = self._sizes, {path: _size(path) for path in paths}
        return self._sizes != before


class _Work(NamedTuple):
    """The work of one process so far."""

    cpu_s: float = 0.0
    bytes: int = 0  # read and written, plus the number of pages read from a disk
    wakes: int = 0  # of the main thread, counted for ranks only
    is_ready: bool = False  # it has a core, or waits for one


class _Sample(NamedTuple):
    """What a script's rank and the processes below it had done at one moment."""

    at: float  # monotonic
    work: dict[int, _Work]  # by process id
    moves: int
    moved_at: float


def _has_worked(before: dict[int, _Work], now: dict[int, _Work], passed_s: float) -> bool:
    """Return whether processes (process id → work) did more in ``passed_s`` than waiting takes."""
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
        ticks = sum(map(int, fields[11:15]))  # of the process and of its children that have ended
        amount = int(fields[9]) + sum(_numbers_in(f"/proc/{pid}/io", "rchar", "wchar"))  # fields[9]: major faults
        wakes = sum(_numbers_in(f"/proc/{pid}/status", "voluntary_ctxt_switches")) if is_rank else 0
        return _Work(ticks / os.sysconf("SC_CLK_TCK"), amount, wakes, is_ready=fields[0] == "R")
    return _Work()


def _numbers_in(path: str, *names: str) -> list[int]:
    """Return the numbers in the lines ``NAME: NUMBER`` of a file of /proc."""
    return [
        int(number) for name, number in re.findall(r"^(\w+):\s*(\d+)$", read_text(path), re.MULTILINE) if name in names
    ]


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return -1


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles only numbers, texts, lists and dictionaries. Nothing that a rank's file names is imported or called."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def request_dump(folder: str, rank: int) -> str | None:
    """Ask a rank for a dump of torch's flight recorder (counts of NCCL collectives); return its path or None."""
    pipe = os.path.join(folder, f"{beats.FLIGHT_PIPE}{rank}.pipe")
    dump = os.path.join(folder, f"{beats.FLIGHT_DUMP}{rank}")
    with contextlib.suppress(OSError):
        os.unlink(dump)
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails if nobody reads the pipe
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
            return _collectives_of(_PlainUnpickler(file).load())
        if time.monotonic() >= until:
            return ()
        time.sleep(_DUMP_POLL_S)


def _collectives_of(dump: Json) -> tuple[Collectives, ...]:
    """Parse a dump of torch's flight recorder: counts of each process group, and the entries of recent collectives."""
    rows = []
    for group, status in dump["pg_status"].items():
        enqueued, completed = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
        if enqueued <= 0:
            continue
        first_incomplete = [
            entry
            for entry in dump["entries"]
            if str(entry["process_group"][0]) == str(group)
            and entry["collective_seq_id"] == completed + 1
            and not entry["is_p2p"]  # send and receive have numbers of their own
        ]
        described = _describe_collective(first_incomplete[-1]) if first_incomplete else {}
        rows.append(Collectives(group=str(group), enqueued=enqueued, completed=max(completed, 0), **described))
    return tuple(rows)


def _describe_collective(entry: Json) -> dict[str, str]:
    """Return the fields ``next`` and ``at`` of ``Collectives``."""
    name = str(entry["profiling_name"]).rpartition(":")[2]  # nccl:all_reduce
    sizes = " and ".join("×".join(map(str, size)) or "1" for size in entry["input_sizes"])
    kinds = " and ".join(sorted({str(kind) for kind in entry["input_dtypes"]}))
    frames = [frame for frame in entry.get("frames", [])[:_MOST_FRAMES] if "/torch/" not in frame["filename"]]
    at = f"{frames[0]['filename']}:{frames[0]['line']} in {frames[0]['name']}" if frames else ""
    return {"next": f"{name} of {sizes} {kinds}", "at": at}
