"""A look at the ranks of this node that no longer move: state, processor time, stacks, sockets. It ends nothing."""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH115, PTH118, PTH123, PTH202, PTH208
from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import struct
import subprocess
import time

from trainers.contract.beats import STACKS, STACKS_SIGNAL, NodeLook, RankBeat, RankLook, Socket

from . import flight_recorder
from .beats import read_beats
from .processes import LINUX
from .wire import Json

WINDOW_S = 1.5  # in which processor time is counted and stacks are written
MOST_FRAMES = 12
_PEER_S = 1.0
_FRAME = re.compile(r'^ *File "([^"]*)", line (\d+) in (.+)$')
_PY_SPY = re.compile(r"^ *(\S.*) \((.*):(\d+)\)$")
_ESTABLISHED = "01"
_STOPPED = ("T", "t")  # by a signal, or by a debugger


_looked = [0.0]


def looked_since(at: float) -> bool:
    """Whether ranks have written their stacks since ``at`` (of ``time.monotonic``): they did nothing else for it."""
    return _looked[0] >= at


def look(node: Json, peers: list[list[object]] | None) -> NodeLook:
    """What can be seen of each rank of this node; where ``peers`` (address, port) are named, only whether these ssh
    servers answer. None: without stacks, for which ranks that train would get a signal."""
    if peers:
        return NodeLook("", peers=tuple(_answers(str(address), int(str(port))) for address, port in peers))
    beats = read_beats(node)
    _looked[0] = time.monotonic()
    begun = [_stat(beat.pid) for _, beat in beats]
    sizes = [_ask_for_stacks(folder, beat) if peers is not None else None for folder, beat in beats]
    dumps = [flight_recorder.ask(folder, beat.rank) if peers is not None else None for folder, beat in beats]
    until = time.monotonic() + flight_recorder.LONGEST_S
    time.sleep(WINDOW_S)
    _looked[0] = time.monotonic()
    ranks = [_seen(*beats[n], begun[n], sizes[n]) for n in range(len(beats))]
    if not any(rank.state in _STOPPED for rank in ranks):  # it writes nothing, and is the reason
        ranks = [
            rank._replace(nccl=flight_recorder.read(dump, until) if dump is not None else ())
            for rank, dump in zip(ranks, dumps)  # noqa: B905 - Python 3.9 has no strict
        ]
    return NodeLook("", ranks=tuple(ranks))


def _seen(folder: str, beat: RankBeat, begun: tuple[str, float], size: int | None) -> RankLook:
    state, cpu_s = _stat(beat.pid)
    stack = _frames(os.path.join(folder, STACKS), size) if size is not None else []
    stack = stack or (_py_spy(beat.pid) if state in _STOPPED else [])
    return RankLook(
        beat=beat,
        host="",
        state=state,
        cpu=round(max(0.0, cpu_s - begun[1]) / WINDOW_S, 2),
        sleeps_in=_first_line(f"/proc/{beat.pid}/wchan"),
        stack=tuple(stack),
        sockets=tuple(_sockets(beat.pid)),
    )


def _stat(pid: int) -> tuple[str, float]:
    """State letter of the main thread ("" where it can't be told), processor seconds of all threads."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return "", 0.0


def _first_line(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().strip()
    return ""


def _ask_for_stacks(folder: str, beat: RankBeat) -> int | None:
    """Send the signal at which the rank writes its stacks; where the new ones will begin in its file. None: it has no
    handler for it, and would end."""
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
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _frames(path: str, size: int) -> list[str]:
    """``file:line in function`` of the main thread, the innermost first: faulthandler writes that thread last."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(size)
            text = file.read(1 << 18)
    except OSError:
        return []
    last = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1]
    found = (_FRAME.match(line) for line in last.splitlines())
    return [f"{frame[1]}:{frame[2]} in {frame[3]}" for frame in found if frame][:MOST_FRAMES]


def _py_spy(pid: int) -> list[str]:
    """The same of a process that can't write them itself (it is stopped), where py-spy is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = [program, "dump", "--nonblocking", "--pid", str(pid)]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=5, check=False)
        main = done.stdout.rpartition("MainThread")[2].partition("\nThread ")[0]
        found = (_PY_SPY.match(line) for line in main.splitlines())
        return [f"{frame[2]}:{frame[3]} in {frame[1]}" for frame in found if frame][:MOST_FRAMES]
    return []


def _sockets(pid: int) -> list[Socket]:
    """The TCP connections of a process to other hosts on which something waits to be sent, is sent again, or has come
    and isn't read."""
    inodes = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/net/{table}") as file:
            for fields in (line.split() for line in file.readlines()[1:]):
                if fields[3] != _ESTABLISHED or f"socket:[{fields[9]}]" not in inodes:
                    continue
                (unsent, unread), again = (int(part, 16) for part in fields[4].split(":")), int(fields[6], 16)
                if unsent or again or unread:
                    peer = _address(fields[2])
                    rows.append(Socket(peer=peer, unsent_bytes=unsent, sent_again=again, unread_bytes=unread))
    return rows


def _address(text: str) -> str:
    """``0100007F:1F90`` → 127.0.0.1; the kernel writes words of 4 bytes in the machine's order."""
    words = text.partition(":")[0]
    data = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    if len(data) == 16 and data.startswith(b"\0" * 10 + b"\xff\xff"):
        data = data[12:]
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _answers(address: str, port: int) -> str:
    """``answers``: an ssh server introduces itself; ``silent``: it only takes the connection; ``refuses``;
    ``unreachable``."""
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
