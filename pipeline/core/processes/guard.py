"""``python guard.py COMMAND…``: a parent process that ends a command when the command's starter ends.

``process.guarded`` starts it. The starter holds the other end of the guard's stdin. When this pipe closes, even because
the starter was killed, the command and all its descendants get SIGTERM, and after 3 s SIGKILL. Standard library only.
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

_GRACE_S = 3.0  # between SIGTERM and SIGKILL
_POLL_S = 0.02
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; 128 + N if signal N ended it, 127 if the program doesn't exist."""
    _adopt_orphans()
    try:
        child = subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"{argv[0]} can't be run: {error.strerror}", flush=True)
        return 127
    code = _wait(child)
    _signal_group(child.pid, signal.SIGKILL)  # its background processes
    _kill_adopted()
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Return the child's exit code; end its process group when the pipe on stdin closes."""
    kill_at = float("inf")
    waiting_s = _POLL_S
    while (code := child.poll()) is None:
        if kill_at == float("inf"):
            # An empty read means that the pipe was closed.
            if select.select([0], [], [], waiting_s)[0] and not os.read(0, 1):
                _signal_group(child.pid, signal.SIGTERM)
                kill_at = time.monotonic() + _GRACE_S
        else:
            time.sleep(_POLL_S)
            if time.monotonic() > kill_at:
                _signal_group(child.pid, signal.SIGKILL)
        waiting_s = min(0.1, waiting_s * 1.5)  # short at first, so that a short command isn't delayed
    return code


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants (Linux only)."""
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):
            import ctypes  # missing in some builds of Python

            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _kill_adopted() -> None:
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
            time.sleep(_POLL_S)


def _children() -> list[int]:
    pids = []
    for name in os.listdir("/proc") if sys.platform == "linux" else ():  # noqa: PTH208  (pathlib takes 10 ms to import)
        with suppress(OSError):
            if name.isdigit() and _parent_of(name) == os.getpid():
                pids.append(int(name))
    return pids


def _parent_of(pid: str) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        return int(file.read().rpartition(b")")[2].split()[1])  # after the name in parentheses: state, parent


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C reaches the starter, which closes the pipe
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:]))
