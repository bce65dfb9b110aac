"""CPU priority of processes that run next to a training.

With Linux autogrouping (sched(7)) niceness counts only within a session, and sessions share the processor evenly. So
the session's niceness is set too, if the process leads its session.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_GIVING_WAY, _RECORDING, _AS_OTHERS = 10, 19, 0  # niceness
_TRIES, _AGAIN_S = 10, 0.1  # the kernel accepts ten changes a second from all unprivileged users together


def give_way() -> None:
    """Lower this process's priority; for work next to a training."""
    os.nice(_GIVING_WAY)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # not Linux, or without autogrouping
            Path("/proc/self/autogroup").write_text(str(_GIVING_WAY))


def lower_priority(pid: int) -> None:
    """Leave the cores to the training, even if its ranks use all of them: the process gets some hundredths of a core.

    The parent calls this, not the process itself, which might get its first time slice only after the training ended.
    """
    _set_priority(pid, _RECORDING)


def restore_priority(pid: int) -> None:
    """Restore normal priority of the recorder ``pid``, a session leader, once the ranks are gone.

    Anyone may raise a session's priority again; only root may do so for a process.
    """
    _set_priority(pid, _AS_OTHERS)


def _set_priority(pid: int, niceness: int) -> None:
    with contextlib.suppress(OSError):  # only root may lower niceness; or the process has ended
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
