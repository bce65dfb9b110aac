"""How the agent's processes talk: answer lines for the controller, error messages, and small JSON files on the node."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from trainers.contract.records import Record, as_json, from_json

Json = dict[str, Any]
SAYS = "paceline: "
"""Begins an agent's last line in the output of a scheduler's job."""
BUSY = "is busy: "
"""Begins the message about devices that others hold."""
FIX_HERE, FIX_THERE = "; here: ", "; there: "
"""Separate an error from the command that fixes it: on the controller's computer, or on the host."""
LARGE_LOST = "small packets pass, large ones are lost"
UNRESOLVED = "can't resolve it: "
"""What a host reports about its connection to another one."""
REMOVED = "the run's folder %s was removed while the run was going on; the same command goes on with what is left"
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk, and of a user's quota
LONGEST_TITLE = 120  # characters
LONGEST_LOOK_S = 1.5  # the most that a gap between two looks counts (``Silence``)
token = ""
"""The token of this process's request. It is random, so no other output is taken for an answer."""


def say(**fields: Any) -> None:
    """Print one answer line. Raises OSError: the controller is gone."""
    # begins with a newline, because the output of a login shell may have ended without one
    sys.stdout.write(f"\n@paceline {token} {json.dumps(as_json(fields))}\n")
    sys.stdout.flush()


def refuse(why: str) -> NoReturn:
    """End this agent with a line in the output of the scheduler's job, where the controller finds it."""
    sys.stderr.write(f"{SAYS}{why}\n")
    raise SystemExit(why)


def write_json(path: str, value: Any) -> None:
    """Write JSON, or a record as such, atomically."""
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(as_json(value), file)
    os.replace(temporary, path)


def read_json(path: str) -> Any:
    """Return the value; None while the file doesn't exist (the agent's files appear complete or not at all)."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def read_record(kind: type[Record], path: str) -> Record | None:
    """Return the record in a file of an agent; None while the file doesn't exist, or if it holds no such record."""
    try:
        return from_json(kind, read_json(path))
    except ValueError:
        return None


def in_thread(target: Callable[..., Any], *args: Any, on_error: Callable[[str], Any]) -> threading.Thread:
    """Run ``target`` in a daemon thread; an exception is printed and passed as text to ``on_error``."""

    def run() -> None:
        try:
            target(*args)
        except BaseException as error:
            sys.excepthook(*sys.exc_info())
            on_error(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        os.utime(path)


class Silence:
    """Measures for how many seconds a file hasn't changed. Call ``look`` again and again.

    The file's times are compared only with each other, never with a wall clock. A gap between two looks counts as
    LONGEST_LOOK_S at most: if it was longer, this process itself was stopped, and can't know what happened meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seconds = 0.0
        self.looked_at = time.monotonic()
        self.last_state = self.state()

    def state(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = os.stat(self.path)
            return status.st_mtime_ns, status.st_ino
        return None

    def look(self) -> float:
        """Return the seconds of silence so far."""
        now, state = time.monotonic(), self.state()
        is_changed = state is not None and state != self.last_state  # a removed file counts as unchanged
        self.seconds = 0.0 if is_changed else self.seconds + min(now - self.looked_at, LONGEST_LOOK_S)
        self.looked_at, self.last_state = now, state or self.last_state
        return self.seconds


# ------------------------------------------------------------------ messages about other users of a host
def printable_title(text: str) -> str:
    """Return another user's text, shortened and without control characters, which could change the terminal."""
    return "".join(character for character in text if character.isprintable())[:LONGEST_TITLE]


def clock(unix_time: float) -> str:
    """Return a time in words, with its date if it is more than 18 hours ago."""
    at = time.localtime(unix_time)
    return time.strftime("%H:%M" if time.time() - unix_time < 64800 else "%Y-%m-%d %H:%M", at)


# ------------------------------------------------------------------ error messages, and the free space that they state
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
    """Return whether the disk of a folder takes no further file, however many bytes are free."""
    status = os.statvfs(existing(folder))
    return status.f_files > 0 and status.f_favail == 0  # file systems such as btrfs have no inodes to count: 0


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
    """Return an error as the message that the controller shows behind the host's name."""
    if isinstance(error, SystemExit):
        return str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return full_disk(error, room_in(os.path.dirname(error.filename)) if error.filename else "")
    if is_process_limit(error):
        return (
            f"a limit of processes and threads of its login, or of its control group, is reached ({error}); end what "
            "it runs there, or raise the limit (ulimit -u in its start files, docker run --pids-limit=…)"
            f"{FIX_THERE}ulimit -u"
        )
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        or_permissions = "" if error.errno == errno.EROFS else ", or fix its permissions"
        return (
            f"can't write there ({error}); set cluster.workdir (on this computer paths.runs) to a folder that "
            f"this login can write to{or_permissions}"
        )
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"a limit of its login keeps files small ({error}): see its start files{FIX_THERE}ulimit -f"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        name = shlex.quote(str(error.filename))
        return f"something that is no folder is in the way of {name} there ({error.strerror}){FIX_THERE}ls -ld {name}"
    return f"{type(error).__name__}: {error}"
