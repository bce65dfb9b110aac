"""Waiting in tests: for what is to happen, not for a time. The limits only end a test that hangs."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HANG_S = 400.0
"""Nothing that a test starts takes this long, however busy the machine is. Less than pytest's own limit."""


def busy() -> float:
    """How many processes wanted each processor lately."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def promised_s(seconds: float) -> float:
    """How long what is promised within ``seconds`` may take here: longer by as much as others want the processors."""
    return seconds * max(1.0, 2 * busy())


def unhurried(text: str) -> str:
    """The output of a command without the lines in which it says what it waits for, as it does on a busy machine."""
    return re.sub(r"^still .* \(\d+ s\)\n", "", text, flags=re.MULTILINE)


def ended(
    argv: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """A program that has run to its end, however it ended: stdout and stderr are together in ``stdout``."""
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    done.stdout = unhurried(done.stdout)
    return done


def wait_until(
    happened: Callable[[], object], child: subprocess.Popen[Any] | None = None, *, every_s: float = 0.02
) -> None:
    """Return when ``happened`` is true. Raises AssertionError: ``child`` ended before, or HANG_S passed."""
    until = time.monotonic() + HANG_S
    while not happened():
        assert child is None or child.poll() is None, child.communicate()[0]
        assert time.monotonic() < until, f"waited {HANG_S:g} s in vain"
        time.sleep(every_s)
