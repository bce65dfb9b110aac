"""The examination of ranks that no longer move: what the system shows of them from outside, and their stacks.

Their states, processor time, sockets, stacks and NCCL's collectives. Ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time

from trainers.contract.beats import STACKS, STACKS_SIGNAL, NodeExamination, RankBeat, RankExamination, Socket

from ..node import read_text
from ..requests import ExamineOrder, NodeStart
from .flight_recorder import DUMP_S, read_dump, request_dump
from .heartbeats import note_stacks, read_beats
from .processes import LINUX, ip_address, open_files, pids_of_tree, process_state, stat_fields, tcp_table

WINDOW_S = 1.5  # in which processor time is counted and stacks are written
MOST_FRAMES = 12
_PEER_S = 1.0
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+) in (.+)$')
_ESTABLISHED = "01"
_STOPPED = ("T", "t")  # by a signal, or by a debugger


def examine(node: NodeStart, order: ExamineOrder) -> NodeExamination:
    """Return what can be seen of each rank of this node, or which of the ordered ssh servers answer."""
    if order.peers:
        peers = tuple((f"{host}:{port}", _try_ssh_server(host, port)) for host, port in order.peers)
        return NodeExamination(host=node.host, peers=peers)
    beats = read_beats(node)
    note_stacks()
    cpu_before_s = [_state_and_cpu_s(beat.pid)[1] for _, beat in beats]
    stacks_bytes = [_request_stacks(folder, beat) if order.with_stacks else None for folder, beat in beats]
    dumps = [request_dump(folder, beat.rank) if order.with_stacks else None for folder, beat in beats]
    dumps_until = time.monotonic() + DUMP_S
    time.sleep(WINDOW_S)
    note_stacks()
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
    """Return what can be seen of one rank.

    Args:
        folder: of its files.
        cpu_before_s: its processor time at the beginning of the window.
        stacks_bytes: where its new stacks begin in their file; None: it wasn't asked for them.
    """
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
    """Send the signal at which the rank writes its stacks; return where the new ones begin in its file.

    None: it has no handler for it, and would end.
    """
    try:
        size = os.path.getsize(os.path.join(folder, STACKS))
        if not LINUX or _catches(beat.pid, STACKS_SIGNAL):
            os.kill(beat.pid, STACKS_SIGNAL)
            return size
    except OSError:
        pass
    return None


def _catches(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)  # signals are counted from 1, bits from 0


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
    return [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in matches if frame][:MOST_FRAMES]


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
