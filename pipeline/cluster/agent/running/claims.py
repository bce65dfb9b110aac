"""Claims: files on a host that tell all of its users which run computes on which devices (GPUs, or the CPUs).

A claim is a file in a folder below /tmp, locked (flock) by the process that made it. The claim ends with that process,
however it dies. The folder belongs to whoever used it first, and this user could replace anything in it by links. So
the folder is opened once, without following links, and all paths are relative to that descriptor.

Each claim names its group: an id of the controller process. Claims of one group never collide, because a controller
with several runs, such as a sweep, divides the devices among them itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator

from trainers.contract.host_facts import HeldClaim

from ..node import user_name
from ..requests import ClaimRequest
from ..wire import BUSY, LONGEST_TITLE, clock, printable_title

FOLDER = "/tmp/paceline-claims"
_MODE = 0o1777  # all users make claims there, and remove only their own
_REMEDY = "ask its owner or an administrator to release it, or start without a claim: cluster.when_busy=share"
_NUMBER = "000000000"  # for agents of older versions, which order claims by a number, and never displace the lowest
_NAME = re.compile(r"\d{9}-\d+-\d+")  # of a claim's file: number, process, moment
_MUTEX_S = 5.0  # limit for the folder's lock, which is held for milliseconds
_MOST_BYTES = 4096  # of a claim's file that are read: another user may have written anything
_LATEST = 1e11  # unix seconds in the far future; ``time`` can't format still later ones


class Claim:
    """A claim of this process. Children that it forks share the lock, and the claim ends with the last of them."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    def release(self) -> None:
        folder, name = os.path.split(self.path)
        with contextlib.suppress(OSError), opened(folder) as folder_fd:
            # another user of the folder may have put another file there
            if os.path.samestat(os.stat(name, dir_fd=folder_fd, follow_symlinks=False), os.fstat(self.descriptor)):
                os.unlink(name, dir_fd=folder_fd)
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def claim_devices(request: ClaimRequest, folder: str = FOLDER) -> Claim:
    """Claim devices of this host. Raises OSError; SystemExit: others hold them, and ``refuses_others`` is set."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
        with opened(folder) as folder_fd:
            os.fchmod(folder_fd, _MODE)  # ``mkdir`` would apply the umask
    with locked(folder) as folder_fd:
        if request.refuses_others:
            others = [claim for claim in living(folder_fd) if request.collides_with(claim)]
            if others:
                raise SystemExit(BUSY + "; ".join(claim.description for claim in others))
        name = f"{_NUMBER}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder_fd)
        except PermissionError as error:  # the folder's owner has closed it to others
            status = os.fstat(folder_fd)
            mode = f"{stat.S_IMODE(status.st_mode):04o}, and needs {_MODE:o}"
            why = f"it belongs to {user_name(status.st_uid)} and has mode {mode}; {_REMEDY}"
            raise OSError(error.errno, why, folder) from error
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # never blocks, as the file is new
        os.write(descriptor, claim_file(request, time.time()))
        os.fchmod(descriptor, 0o644)  # readable for other users, whatever the umask
    return Claim(os.path.join(folder, name), descriptor)


def claim_file(request: ClaimRequest, since: float) -> bytes:
    """Return the content of a claim's file. Agents of other versions on this host read these names too."""
    value = {
        "resources": request.resources,
        "attempts": request.attempt_prefix,
        "group": request.group,
        "what": request.title[:LONGEST_TITLE],
        "since": since,
    }
    return json.dumps(value).encode()


@contextlib.contextmanager
def opened(folder: str) -> Iterator[int]:
    """Open the folder, and yield its descriptor. Raises OSError: it is missing, or a link or file is in its place."""
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (NotADirectoryError, PermissionError) as error:  # NotADirectoryError comes for a link, too
        owner = user_name(os.lstat(folder).st_uid)
        is_closed = isinstance(error, PermissionError)
        cause = "has closed it" if is_closed else "has put a link or a file where a folder of claims should be"
        raise OSError(error.errno, f"{owner} {cause}; {_REMEDY}", folder) from error
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[int]:
    """Open the folder and hold its lock. Raises OSError: as ``opened``, or another process keeps the lock."""
    with opened(folder) as folder_fd:
        # not a blocking lock, because any user of the host could hold it for ever
        until = time.monotonic() + _MUTEX_S
        while True:
            try:
                fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    cause = f"a process has held a lock on it for more than {_MUTEX_S:g} s (lsof shows which)"
                    raise OSError(errno.EBUSY, f"{cause}; {_REMEDY}", folder) from None
                time.sleep(0.01)
        yield folder_fd


def living(folder_fd: int) -> list[HeldClaim]:
    """Return the claims of living processes, oldest first; remove those of this user's ended processes."""
    claims = []
    for name in filter(_NAME.fullmatch, sorted(os.listdir(folder_fd))):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # no claim, or removed meanwhile
            claim = read_claim(name, folder_fd)
            if claim is not None:
                claims.append(claim)
            elif os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(name, dir_fd=folder_fd)
    return sorted(claims, key=lambda claim: claim.since)


def read_claim(name: str, folder_fd: int) -> HeldClaim | None:
    """Read a claim; None if its process has ended. Raises OSError, ValueError, TypeError, KeyError: it is no claim."""
    # O_NONBLOCK: opening a pipe would block
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(name)
        with contextlib.suppress(BlockingIOError):  # if the lock can be taken, the claim's process has ended
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        value = json.loads(os.read(descriptor, _MOST_BYTES))
        since = float(value["since"])
        if not 0 <= since < _LATEST:
            raise ValueError(name)
        claim = HeldClaim(
            resources=tuple(str(resource) for resource in value["resources"]),
            attempt_prefix=str(value["attempts"]),
            group=str(value["group"]),
            title=printable_title(str(value["what"])),
            since=since,
            user=user_name(status.st_uid),
        )
        return claim._replace(description=described(claim))
    finally:
        os.close(descriptor)


def described(claim: HeldClaim) -> str:
    """Return ``alice's run 5a0c12ab34cd (resnet18) has GPU 0 and 1 since 09:12``."""
    gpus = [name.partition(":")[2] for name in claim.resources if name.startswith("gpu:")]
    devices = f"GPU {' and '.join(gpus)}" if gpus else "its processors"
    return f"{claim.user}'s {claim.title} has {devices} since {clock(claim.since)}"


def claims_here(folder: str = FOLDER) -> tuple[HeldClaim, ...]:
    """Return all claims on this host, oldest first; none if the folder can't be read."""
    with contextlib.suppress(OSError), locked(folder) as folder_fd:
        return tuple(living(folder_fd))
    return ()


def claim_for_run(request: ClaimRequest | None) -> Claim | None:
    """Claim devices for the start of an attempt. Raises OSError; SystemExit: others hold them."""
    if request is None:
        return None
    try:
        return claim_devices(request)
    except OSError:
        if request.refuses_others:
            raise
        return None  # a run that shares the host needs no claim: it only informs others
