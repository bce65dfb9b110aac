"""Who computes on this host, or waits for it: claims that end with the processes that hold them.

A claim is a file in a folder that all users of the host share, locked (flock) by the process that made it: when that is
gone, however it ended, so is the claim. Claims have tickets in the order in which they came; making one and reading all
of them happens under a lock on the folder. What stands in another user's file is shown and compared, no more.
"""

# Much of this is file descriptors: os.path all the way.
# ruff: noqa: PTH101, PTH102, PTH108, PTH118, PTH208
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import stat
import sys
import threading
import time
from collections.abc import Iterator

from .wire import Json, in_thread, say

FOLDER = "/tmp/paceline-claims"
BUSY = "is busy: "
_MUTEX_S = 5.0  # nobody needs the folder for more than some milliseconds
_MOST_BYTES = 4096
_LATEST = 1e11  # unix seconds; later ones have no date
_LOOK_S = 1.0
_HEARTBEAT_TIMEOUT_S = 8.0


class Claim:
    """This process's claim; children that are forked share it, and it ends with the last of them."""

    def __init__(self, wish: Json, ticket: int, path: str, descriptor: int) -> None:
        self.wish, self.ticket, self.path, self.descriptor = wish, ticket, path, descriptor

    def ahead(self, folder: str = FOLDER) -> list[Json]:
        """The claims that go before this one and are of the same devices."""
        with locked(folder):
            rows = living(folder)
        return [row for row in rows if row["ticket"] < self.ticket and collide(row, self.wish)]

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def stake(wish: Json, folder: str = FOLDER) -> Claim:
    """Take the next ticket, or that which another process of the same run folder holds here. Raises OSError.

    Args:
        wish: ``resources`` (such as gpu:0, or cpu), ``attempts`` (how the ids of the run folder's attempts begin),
            ``group`` (equal for runs of one controller, which arranges them itself), ``what`` for people.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        os.chmod(folder, 0o1777)
    with locked(folder):
        rows = living(folder)
        own = [row["ticket"] for row in rows if row["attempts"] == wish["attempts"]]
        ticket = min(own, default=1 + max((row["ticket"] for row in rows), default=0))
        path = os.path.join(folder, f"{ticket:09d}-{os.getpid()}-{time.monotonic_ns()}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.fchmod(descriptor, 0o644)  # whatever the umask says, others have to read it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps({**wish, "since": time.time()}).encode()[:_MOST_BYTES])
    return Claim(wish, ticket, path, descriptor)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Alone with the folder. Raises OSError: it isn't there, or somebody doesn't let it go."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        until = time.monotonic() + _MUTEX_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise OSError(errno.EBUSY, "somebody holds a lock on it", folder) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def living(folder: str) -> list[Json]:
    """All claims whose processes live, by their tickets; files of others are removed where that is allowed."""
    rows = []
    for name in sorted(os.listdir(folder)):
        path, ticket = os.path.join(folder, name), name.partition("-")[0]
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            row = read_claim(path)
            if row is None:
                os.unlink(path)
            elif ticket.isdecimal():
                rows.append({**row, "ticket": int(ticket)})
    return rows


def read_claim(path: str) -> Json | None:
    """What somebody claims; None: nobody holds it any more. Raises OSError, ValueError, TypeError, KeyError: it's no
    claim."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(path)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        value = json.loads(os.read(descriptor, _MOST_BYTES))
        since = float(value["since"])
        if not 0 <= since < _LATEST:
            raise ValueError(path)
        return {
            "resources": [str(resource) for resource in value["resources"]],
            "attempts": str(value["attempts"]),
            "group": str(value["group"]),
            "what": printable(str(value["what"])),
            "waits": bool(value.get("waits")),
            "since": since,
            "user": user_name(found.st_uid),
        }
    finally:
        os.close(descriptor)


def collide(row: Json, wish: Json) -> bool:
    """Whether two claims are of the same devices and of people or programs that know nothing of each other."""
    apart = row["attempts"] != wish["attempts"] and row["group"] != wish["group"]
    return apart and not set(row["resources"]).isdisjoint(wish["resources"])


def printable(text: str) -> str:
    return "".join(mark for mark in text if mark.isprintable())[:120]


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def words(row: Json) -> str:
    """``alice's run 5a0c… (resnet18) has GPU 0 and 1 since 09:12``, by this host's clock."""
    gpus = [name.partition(":")[2] for name in row["resources"] if name.startswith("gpu:")]
    devices = f"GPU {' and '.join(gpus)}" if gpus else "its processors"
    return (
        f"{row['user']}'s {row['what']} {'waits for' if row['waits'] else 'has'} {devices} since {clock(row['since'])}"
    )


def clock(unix_time: float) -> str:
    at = time.localtime(unix_time)
    return time.strftime("%H:%M" if time.time() - unix_time < 64800 else "%Y-%m-%d %H:%M", at)


def seen(folder: str = FOLDER) -> list[Json]:
    """All claims with what is said of them; none where the folder can't be read."""
    with contextlib.suppress(OSError):
        with locked(folder):
            rows = living(folder)
        return [{**row, "words": words(row)} for row in rows]
    return []


def claim_for_run(wish: Json | None) -> Claim | None:
    """What ``start`` takes before anything runs. Raises SystemExit: others go before it."""
    if not wish:
        return None
    try:
        claim = stake(wish)
    except OSError:
        if wish["alone"]:
            raise
        return None  # who shares the host needs no claim, it is only told to others
    rows = claim.ahead() if wish["alone"] else []
    if rows:
        claim.release()
        raise SystemExit(BUSY + "; ".join(map(words, rows)))
    return claim


def hold(request: Json) -> None:
    """Wait in order and then keep the place, for as long as the controller is heard: it starts the run meanwhile."""
    claim, heard, gone = stake({**request["claim"], "waits": True}), [time.monotonic()], threading.Event()
    in_thread(listen, heard, gone, on_error=lambda _: gone.set())
    try:
        while time.monotonic() - heard[0] < _HEARTBEAT_TIMEOUT_S:
            say(ahead=[words(row) for row in claim.ahead()])
            if gone.wait(_LOOK_S):
                break
    finally:
        claim.release()
        os._exit(0)  # the listening thread sits in a read


def listen(heard: list[float], gone: threading.Event) -> None:
    """The controller says something each second; its end ends this process."""
    while sys.stdin.buffer.readline():
        heard[0] = time.monotonic()
    gone.set()
