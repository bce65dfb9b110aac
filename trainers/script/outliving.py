"""Processes that a script has started and that go on when it has ended well: waited for while they work, then ended.

They are found by two variables that the script was given and that they inherit, and by their descent from such ones.
One that has dropped both is ended by the agent (Linux; elsewhere all of them are).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WAIT_S = 60.0
IDLE_S = 3.0
SAID_AFTER_S = 5.0
_GRACE_S = 3.0
_LOOK_S = 0.2
_CORES = 0.02  # of processor time in a second: less is a loop that only looks whether there is something to do
_LONGEST = 200


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process has done so far. ``is_busy``: it waits for a core or a disk, or has one."""

    cpu_s: float
    written_bytes: int
    is_busy: bool


def wait_and_end(
    variables: dict[str, str], *, look: Callable[[], None], say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> str:
    """Wait until they have ended, for at most ``WAIT_S`` and as long as one of them works; end those that are left.

    Args:
        variables: what the script's environment has and no process of another script or host.
        look: called each ``_LOOK_S`` meanwhile.
        say: told once which processes are waited for, if that takes a while.
        is_stopped: the run is to end now.

    Returns:
        Which had to be ended and why, in words; '' if none had to be.
    """
    marks = {f"{name}={value}".encode() for name, value in variables.items()}
    begun = moved_at = time.monotonic()
    left = before = _works(marks)
    said = False
    while left and not is_stopped():
        time.sleep(_LOOK_S)
        look()
        left, now = _works(marks), time.monotonic()
        if has_moved(before, left):
            before, moved_at = left, now
        if not left or now - moved_at >= IDLE_S or now - begun >= WAIT_S:
            break
        if not said and now - begun >= SAID_AFTER_S:
            said = True
            say(f"the script has ended; waiting up to {WAIT_S:g} s for what it started and still works: {_shown(left)}")
    if not left:
        return ""
    words = _shown(left)
    why = (
        f"still at work after {WAIT_S:g} s"
        if time.monotonic() - begun >= WAIT_S
        else "the run was stopped"
        if is_stopped()
        else f"idle for {IDLE_S:g} s"
    )
    _end(marks)
    return f"{words}; {why}"


def has_moved(before: dict[int, Work], now: dict[int, Work]) -> bool:
    """Whether one of them has worked since: it computed for 2 % of ``IDLE_S``, wrote anything, or wants to go on."""
    none = Work(cpu_s=0.0, written_bytes=0, is_busy=False)
    pairs = [(before.get(pid, none), work) for pid, work in now.items()]
    cpu_s = sum(work.cpu_s - old.cpu_s for old, work in pairs)
    wrote = any(work.is_busy or work.written_bytes != old.written_bytes for old, work in pairs)
    return wrote or cpu_s >= _CORES * IDLE_S or not now.keys() <= before.keys()


def _works(marks: set[bytes]) -> dict[int, Work]:
    """Process id → its work, of each process that carries all ``marks``, and of those that it has started."""
    parents: dict[int, int] = {}
    works: dict[int, Work] = {}
    pids: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX" or pid == os.getpid():
                continue
            parents[pid] = int(fields[1])
            ticks = sum(map(int, fields[11:15]))  # its own and those of children that have ended
            cpu_s = ticks / os.sysconf("SC_CLK_TCK")
            works[pid] = Work(cpu_s=cpu_s, written_bytes=_written_bytes(pid), is_busy=fields[0] in "RD")
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                pids.add(pid)
    # those without the variables count by their parents, generation by generation
    while new := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= new
    return {pid: works[pid] for pid in sorted(pids)}


def _written_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines())
        return int(rows["wchar"])
    return 0


def _shown(works: dict[int, Work]) -> str:
    words = []
    for pid in works:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ").strip()
            shown = command if command.isprintable() else repr(command)[1:-1]
            words.append(f"process {pid} ({shown[:_LONGEST]})")
    return ", ".join(words)


def _end(marks: set[bytes]) -> None:
    """SIGTERM, and SIGKILL to what is left after ``_GRACE_S``."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 1.0)):
        for pid in _works(marks):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + wait_s
        while _works(marks) and time.monotonic() < until:
            time.sleep(_LOOK_S / 4)
