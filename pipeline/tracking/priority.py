"""What share of the processors a recorder takes while the ranks compute, and afterwards. Effects alone."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_BESIDE, _AFTER = 19, 0  # niceness
_TRIES, _AGAIN_S = 10, 0.1  # of all who aren't root the kernel takes ten changes a second together


def lower(pid: int) -> None:
    """Leave a training the cores, also where its ranks have all: some hundredths of one are left to the process.

    Under Linux's autogrouping (sched(7)) niceness counts among the processes of a session alone, and sessions share
    the processor evenly: so the session's is set, too, which ``pid`` leads. Whoever started it does this, not the
    process itself: it may come to it only after the training has ended already.
    """
    _set_priority(pid, _BESIDE)


def restore(pid: int) -> None:
    """The ranks are gone: the recorder ``pid``, which leads its session, has the priority of others again, as somebody
    waits for it. Anybody may set back a session's niceness, a process's root alone."""
    _set_priority(pid, _AFTER)


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
