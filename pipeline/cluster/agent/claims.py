"""Who computes on this host, or waits for it: claims that end with the processes that hold them.

A claim is a file in a folder that all users of the host share, locked (flock) by the process that made it: when that is
gone, however it ended, so is the claim. Claims have tickets in the order in which they came; making one and reading all
of them happens under a lock on the folder. What stands in another user's file is shown and compared, no more.

The folder belongs to whoever came first, who may put anything in its place at any time. So it is opened once, without
following a link, and all that happens there is relative to that descriptor; only claims of this user are removed.
"""

# Much of this is file descriptors: os.path all the way.
# ruff: noqa: PTH102, PTH116, PTH118, PTH123
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import re
import stat
import sys
import threading
import time
from collections.abc import Iterator

from .wire import Json, in_thread, say

FOLDER = "/tmp/paceline-claims"
BUSY = "is busy: "
_MODE = 0o1777  # all users make claims there, and remove only their own
_MENDS = "ask them or an administrator to give it up, or start without a claim: cluster.when_busy=share"
_NAME = re.compile(r"(\d{9})-\d+-\d+")  # ticket, process, moment
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
        with locked(folder) as place:
            rows = living(place)
        return [row for row in rows if row["ticket"] < self.ticket and collide(row, self.wish)]

    def release(self) -> None:
        folder, name = os.path.split(self.path)
        with contextlib.suppress(OSError), opened(folder) as place:
            if os.path.samestat(os.stat(name, dir_fd=place, follow_symlinks=False), os.fstat(self.descriptor)):
                os.unlink(name, dir_fd=place)
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
        with opened(folder) as place:
            os.fchmod(place, _MODE)
    with locked(folder) as place:
        rows = living(place)
        own = [row["ticket"] for row in rows if row["attempts"] == wish["attempts"]]
        ticket = min(own, default=1 + max((row["ticket"] for row in rows), default=0))
        name = f"{ticket:09d}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=place)
        except PermissionError as error:
            raise OSError(error.errno, unusable(place), folder) from error
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else can have opened it yet
        os.write(descriptor, json.dumps({**wish, "since": time.time()}).encode()[:_MOST_BYTES])
        os.fchmod(descriptor, 0o644)  # whatever the umask says, others have to read it
    return Claim(wish, ticket, os.path.join(folder, name), descriptor)


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """A descriptor of the folder itself. Raises OSError: it isn't there, or a link or a file stands in its place."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError) as error:  # the first also where it is a link
        owner = user_name(os.lstat(folder).st_uid)
        closed = isinstance(error, PermissionError)
        what = "has closed it" if closed else "has put a link or a file where a folder of claims should be"
        raise OSError(error.errno, f"{owner} {what}; {_MENDS}", folder) from error
    try:
        yield place
    finally:
        os.close(place)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[int]:
    """Alone with the folder: its descriptor. Raises OSError: as ``opened``, or somebody doesn't let it go."""
    with opened(folder) as place:
        until = time.monotonic() + _MUTEX_S
        while True:
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    said = f"{holder(place)} has held a lock on it for more than {_MUTEX_S:g} s; {_MENDS}"
                    raise OSError(errno.EBUSY, said, folder) from None
                time.sleep(0.01)
        yield place


def holder(descriptor: int) -> str:
    """Whose process has a lock (flock) on this, in words, by the kernel's table of locks."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in table:
            words = line.split()
            if place in words and words[1:2] == ["FLOCK"]:  # "->" stands there for those who wait
                return process_words(words[4])
    return "somebody (lsof shows who)"


def process_words(pid: str) -> str:
    """``alice's process 4242 (sleep 600)``; one that isn't seen from here is in another container."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = printable(file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip())
        return f"{user_name(os.stat(f'/proc/{pid}').st_uid)}'s process {pid} ({command})"
    except OSError:
        return f"process {pid}, of another container or just ended,"


def unusable(place: int) -> str:
    """Why only its owner can put a claim there."""
    found = os.fstat(place)
    mode = f"{stat.S_IMODE(found.st_mode):04o}, and needs {_MODE:o}"
    return f"it belongs to {user_name(found.st_uid)} and has mode {mode}; {_MENDS}"


def living(place: int) -> list[Json]:
    """All claims in the folder whose processes live, by their tickets; what ended processes of this user have left
    there is removed."""
    rows = []
    for name in sorted(os.listdir(place)):
        known = _NAME.fullmatch(name)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            row = read_claim(name, place) if known else None
            if row is not None and known is not None:
                rows.append({**row, "ticket": int(known[1])})
            elif known and os.stat(name, dir_fd=place, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(name, dir_fd=place)
    return rows


def read_claim(name: str, place: int) -> Json | None:
    """What somebody claims; None: nobody holds it any more. Raises OSError, ValueError, TypeError, KeyError: it's no
    claim."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(name)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        value = json.loads(os.read(descriptor, _MOST_BYTES))
        since = float(value["since"])
        if not 0 <= since < _LATEST:
            raise ValueError(name)
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
        with locked(folder) as place:
            rows = living(place)
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
