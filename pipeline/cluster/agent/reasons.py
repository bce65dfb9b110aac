"""What the controller is told when a command fails."""

# Requests carry paths as text, and much of this is file descriptors and /proc: os.path all the way.
# ruff: noqa: PTH120
from __future__ import annotations

import errno
import os
import shlex

from .staging import free_bytes

HERE, THERE = "; here: ", "; there: "
"""Between what an agent found and the command that mends it: typed to doit, or on that host."""


FULL = (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: OSError, free: int | None) -> str:
    seen = "" if free is None else f", {free} bytes are free there"
    return (
        f"has a full disk ({error}{seen}); make room there, or set cluster.workdir (on this computer paths.runs) to a "
        "folder on another disk"
    )


def reason(error: BaseException) -> str:
    """What the controller is told, as it stands behind the host's name."""
    if isinstance(error, SystemExit):
        return str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return full_disk(error, free_bytes(os.path.dirname(error.filename)) if error.filename else None)
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            f"can't write there ({error}); set cluster.workdir (on this computer paths.runs) to a folder that "
            "this login can write to, or fix its permissions"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"a limit of its login keeps files small ({error}): see its start files{THERE}ulimit -f"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        name = shlex.quote(str(error.filename))
        return f"something that is no folder is in the way of {name} there ({error.strerror}){THERE}ls -ld {name}"
    return f"{type(error).__name__}: {error}"
