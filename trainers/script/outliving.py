"""Processes that a script started and that go on after its good end: waited for while they work, then ended.

They are recognised by two variables that the script was given and that they inherit, or as children of such processes.
A process that has dropped both is ended by the agent (on Linux; elsewhere the agent ends all of them).
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
REPORT_AFTER_S = 5.0
_GRACE_S = 3.0
_LOOK_S = 0.2
_CORES = 0.02  # processor time per second; less is a loop that only checks for work
_LONGEST = 200


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a process so far. ``is_busy``: it has a core, or waits for a core or a disk."""

    cpu_s: float
    written_bytes: int
    is_busy: bool


def wait_and_end(
    variables: dict[str, str], *, look: Callable[[], None], say: Callable[[str], None], is_stopped: Callable[[], bool]
) -> str:
    """Wait until they have ended, at most ``WAIT_S`` and as long as one of them works; then end the others.

    Args:
        variables: variables that mark the script's environment, and no other script's or host's.
        look: called every ``_LOOK_S`` meanwhile.
        say: called once with the processes that are waited for, if that takes a while.
        is_stopped: whether the run should end now.

    Returns:
        The processes that had to be ended, and why; '' without any.
    """
    marks = {f"{name}={value}".encode() for name, value in variables.items()}
    began = moved_at = time.monotonic()
    left = before = _works(marks)
    is_reported = False
    while left and not is_stopped():
        time.sleep(_LOOK_S)
        look()
        left, now = _works(marks), time.monotonic()
        if has_moved(before, left):
            before, moved_at = left, now
        if not left or now - moved_at >= IDLE_S or now - began >= WAIT_S:
            break
        if not is_reported and now - began >= REPORT_AFTER_S:
            is_reported = True
            say(
                f"the script has ended; waiting up to {WAIT_S:g} s for what it started and still works: {_listed(left)}"
            )
    if not left:
        return ""
    described = _listed(left)
    why = (
        f"still at work after {WAIT_S:g} s"
        if time.monotonic() - began >= WAIT_S
        else "the run was stopped"
        if is_stopped()
        else f"idle for {IDLE_S:g} s"
    )
    _end(marks)
    return f"{described}; {why}"


def has_moved(before: dict[int, Work], now: dict[int, Work]) -> bool:
    """Whether one of them has worked since: computed for 2 % of ``IDLE_S``, wrote anything, or wants to go on."""
    none = Work(cpu_s=0.0, written_bytes=0, is_busy=False)
    pairs = [(before.get(pid, none), work) for pid, work in now.items()]
    cpu_s = sum(work.cpu_s - old.cpu_s for old, work in pairs)
    wrote = any(work.is_busy or work.written_bytes != old.written_bytes for old, work in pairs)
    return wrote or cpu_s >= _CORES * IDLE_S or not now.keys() <= before.keys()


def _works(marks: set[bytes]) -> dict[int, Work]:
    """Return process id → work, of each process with all ``marks``, and of its descendants."""
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
    # processes without the variables count by their parents, generation by generation
    while new := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= new
    return {pid: works[pid] for pid in sorted(pids)}


def _written_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines())
        return int(rows["wchar"])
    return 0


def _listed(works: dict[int, Work]) -> str:
    words = []
    for pid in works:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ").strip()
            shown = command if command.isprintable() else repr(command)[1:-1]
            words.append(f"process {pid} ({shown[:_LONGEST]})")
    return ", ".join(words)


def _end(marks: set[bytes]) -> None:
    """Send SIGTERM, and SIGKILL to the processes that are left after ``_GRACE_S``."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 1.0)):
        for pid in _works(marks):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        until = time.monotonic() + wait_s
        while _works(marks) and time.monotonic() < until:
            time.sleep(_LOOK_S / 4)
