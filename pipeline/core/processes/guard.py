"""``python guard.py COMMAND…``: run a command that ends together with its starter. Standard library only.

When the starter's end of the stdin pipe closes, the command and all its descendants get SIGTERM, after 3 s SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

_GRACE_S = 3.0
_LOOK_S = 0.02
_SUBREAPER = 36


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; 128 + N if signal N ended it, 127 if the program doesn't exist."""
    _adopt()
    try:
        child = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{argv[0]} can't be run: {error.strerror}", flush=True)
        return 127
    code = _exit_code(child)
    _signal(child.pid, signal.SIGKILL)
    _end_adopted()
    return code if code >= 0 else 128 - code


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    killed_at = float("inf")
    waiting = _LOOK_S
    while (code := child.poll()) is None:
        if killed_at == float("inf"):
            # An empty read means that the pipe was closed.
            if select.select([0], [], [], waiting)[0] and not os.read(0, 1):
                _signal(child.pid, signal.SIGTERM)
                killed_at = time.monotonic() + _GRACE_S
        else:
            time.sleep(_LOOK_S)
            if time.monotonic() > killed_at:
                _signal(child.pid, signal.SIGKILL)
        waiting = min(0.1, waiting * 1.5)
    return code


def _adopt() -> None:
    """Become the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER in prctl(2), Linux only)."""
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes  # missing in some builds of Python

            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _end_adopted() -> None:
    """Kill children until none is left: children of a killed child are adopted in turn."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for pid in _children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)


def _children() -> list[int]:
    pids = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():  # noqa: PTH208  (pathlib takes 10 ms to import)
        with suppress(OSError):
            if name.isdigit() and _parent_of(name) == os.getpid():
                pids.append(int(name))
    return pids


def _parent_of(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        return int(file.read().rpartition(b")")[2].split()[1])


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C reaches the starter, which closes the pipe
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
