"""The process that a script's parent starts on its host: torchrun, Python or a program, and how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

_LOOK_S = 0.5


class Child:
    """A process in this process's group. SIGTERM and SIGINT are passed on to it; ``was_stopped``: one has come."""

    def __init__(self, command: Sequence[str], workdir: Path, env: dict[str, str], log_dir: Path | None) -> None:
        """Start it.

        Args:
            log_dir: folder for the output of a process that torchrun doesn't start, where torchrun would write it;
                None: the output is that of this process.

        Raises:
            OSError: it can't be started.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self.was_stopped = False
        # the agent signals every process of a run, other senders only this one
        signal.signal(signal.SIGTERM, self._pass_on)
        signal.signal(signal.SIGINT, self._pass_on)
        with ExitStack() as logs:
            stdout, stderr = (None, None) if log_dir is None else _logs_of_rank_0(log_dir, logs)
            self._process = subprocess.Popen(
                command, cwd=workdir, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )

    def wait(self, look: Callable[[], None]) -> int:
        """Return the exit code (negative: the signal that ended it); until then ``look`` is called twice a second.

        An error of ``look``, such as a full disk, ends the process and is raised.
        """
        assert self._process is not None
        try:
            while True:
                try:
                    return self._process.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    look()
        except BaseException:
            self._process.terminate()
            raise

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.was_stopped = True
        if self._process is not None:
            self._process.send_signal(number)


def _logs_of_rank_0(log_dir: Path, stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    folder = log_dir / "alone" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    stdout, stderr = (stack.enter_context((folder / f"{name}.log").open("ab")) for name in ("stdout", "stderr"))
    return stdout, stderr


def how_it_ended(code: int) -> str:
    """Describe the exit code of a child (negative: the signal that ended it)."""
    if code > 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def end_as(code: int) -> NoReturn:
    """End with an exit code, or by the signal that ended the child (negative), for the agent to see."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
