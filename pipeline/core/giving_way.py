"""A process that works beside a training. By itself: it is in the key of an evaluation, whose process calls it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NICENESS = 10


def give_way() -> None:
    """Let others have the processor first: for a process that works beside a training.

    Under Linux's autogrouping (sched(7)) niceness counts among the processes of a session alone, and sessions share the
    processor evenly: so the session steps back too, where this process leads it.
    """
    os.nice(_NICENESS)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # not Linux, or without autogrouping
            Path("/proc/self/autogroup").write_text(str(_NICENESS))
