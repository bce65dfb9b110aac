"""Error messages of the agent for the controller, and the free space on a disk, which they state."""

from __future__ import annotations

import errno
import os
import shlex

from .wire import THERE

FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: str) -> int:
    """Return the free space on the disk of a folder, which need not exist."""
    disk = os.statvfs(existing(folder))
    return disk.f_frsize * disk.f_bavail


def existing(folder: str) -> str:
    """Return the folder, or the nearest one above it that exists."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def no_inodes(folder: str) -> bool:
    """Whether its disk takes no further file, however many bytes are free."""
    status = os.statvfs(existing(folder))
    return status.f_files > 0 and status.f_favail == 0


def room_in(folder: str) -> str:
    """Describe the free space on the disk of a folder, which need not exist."""
    free = f"{free_bytes(folder)} bytes are free there"
    return f"no inodes are left there for new files (df -i), though {free}" if no_inodes(folder) else free


def full_disk(error: OSError, room: str) -> str:
    """Return the message about a full disk. ``room``: the free space; '': unknown."""
    seen = f"{error}, {room}" if room else str(error)
    return (
        f"has a full disk ({seen}); make room there, or set cluster.workdir (on this computer paths.runs) to a folder "
        "on another disk"
    )


def is_process_limit(error: BaseException) -> bool:
    """Whether no further process or thread could be started."""
    return isinstance(error, BlockingIOError) or "can't start new thread" in str(error)


def reason(error: BaseException) -> str:
    """Return the message that the controller shows behind the host's name."""
    if isinstance(error, SystemExit):
        return str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return full_disk(error, room_in(os.path.dirname(error.filename)) if error.filename else "")
    if is_process_limit(error):
        return (
            f"a limit of processes and threads of its login, or of its control group, is reached ({error}); end what "
            "it runs there, or raise the limit (ulimit -u in its start files, docker run --pids-limit=…)"
            f"{THERE}ulimit -u"
        )
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        or_permissions = "" if error.errno == errno.EROFS else ", or fix its permissions"
        return (
            f"can't write there ({error}); set cluster.workdir (on this computer paths.runs) to a folder that "
            f"this login can write to{or_permissions}"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"a limit of its login keeps files small ({error}): see its start files{THERE}ulimit -f"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        name = shlex.quote(str(error.filename))
        return f"something that is no folder is in the way of {name} there ({error.strerror}){THERE}ls -ld {name}"
    return f"{type(error).__name__}: {error}"
