"""The share of the processors that a process beside a training takes.

Under Linux's autogrouping (sched(7)) niceness counts among the processes of a session alone, and sessions share the
processor evenly: so the session's niceness is set, too, where the process leads it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_GIVING_WAY, _RECORDING, _AS_OTHERS = 10, 19, 0  # niceness
_TRIES, _AGAIN_S = 10, 0.1  # of all who aren't root the kernel takes ten changes a second together


def give_way() -> None:
    """Let others have the processor first: for a process that works beside a training, and by itself."""
    os.nice(_GIVING_WAY)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # not Linux, or without autogrouping
            Path("/proc/self/autogroup").write_text(str(_GIVING_WAY))


def lower_priority(pid: int) -> None:
    """Leave a training the cores, also where its ranks have all: some hundredths of one are left to the process.

    Whoever started it does this, not the process itself: it may come to it only after the training has ended already.
    """
    _set_priority(pid, _RECORDING)


def restore_priority(pid: int) -> None:
    """The ranks are gone: the recorder ``pid``, which leads its session, has the priority of others again, as somebody
    waits for it. Anybody may set back a session's niceness, a process's root alone."""
    _set_priority(pid, _AS_OTHERS)


def _set_priority(pid: int, niceness: int) -> None:
    with contextlib.suppress(OSError):  # to a lower niceness root alone may; or it has ended
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):  # not Linux, without autogrouping, or it has ended
        if os.getsid(pid) != pid:
            return
        for _ in range(_TRIES):
            try:
                Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")
                return
            except BlockingIOError:
                time.sleep(_AGAIN_S)
