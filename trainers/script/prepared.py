"""A torchrun that the node agent has begun ahead: a child of this process that has imported torch and waits.

``pipeline/cluster/agent/torchrun.py`` is what it runs. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainers.contract import variables

_LOOK_S = 0.02
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class PreparedTorchrun:
    """With the methods of Popen that its parent needs."""

    def __init__(self, pid: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self.pid, self._socket = pid, socket.socket(fileno=descriptor)

    @classmethod
    def found(cls) -> PreparedTorchrun | None:
        """That which the environment names; no other process hears of it."""
        pid, _, descriptor = os.environ.pop(variables.TORCHRUN, "").partition(":")
        if not pid:
            return None
        with contextlib.suppress(ImportError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # this has the run's mark: the agent ends it by that
        return cls(int(pid), int(descriptor))

    def become(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> bool:
        """Run ``argv``, with the outputs of this process. False: it is gone, or somebody has stopped it (SIGSTOP)."""
        if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        told = json.dumps({"argv": [*argv], "cwd": str(cwd), "env": {**env}}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [told], [1, 2])
            if sent < len(told):  # once it has read all, it closes its end
                self._socket.sendall(told[sent:])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """It isn't needed."""
        self._socket.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def wait(self, timeout: float) -> int:
        """Its exit code (negative: the signal). Raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            left = until - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("torchrun", timeout)
            time.sleep(min(_LOOK_S, left))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)
