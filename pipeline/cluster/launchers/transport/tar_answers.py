"""The answer of a node's agent to a request for files: a tar between two lines, extracted into a folder here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any

from pipeline.cluster.agent.reports import TarHead, TarTrailer
from pipeline.cluster.agent.requests import CollectRequest
from pipeline.cluster.launchers.transport.answers import parse
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.cluster.launchers.transport.streams import Connection, read_some
from pipeline.core import tars
from pipeline.core.errors import PacelineError
from pipeline.core.processes import process
from trainers.contract.records import from_json

SILENT_S = 10.0
FAILURES = (OSError, PacelineError, *tars.DAMAGE)
"""What ``extract`` raises."""
_LOOK_S = 0.5
_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}  # names that this computer's file system doesn't accept
_MOST_BYTES = 1 << 42  # of one answer
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TarAnswer:
    """What a node answered besides its files.

    ``unwritable``: files whose names this computer doesn't accept, each with the reason.
    """

    head: TarHead
    trailer: TarTrailer
    unwritable: tuple[str, ...]


def extract(connection: Connection, request: CollectRequest, folder: Path) -> TarAnswer:
    """Extract the files that a node sends into ``folder``.

    If the connection breaks, or brings nothing for ``SILENT_S``, it is tried once more.

    Raises:
        OSError, PacelineError, tars.DAMAGE: nothing, or not everything, came; or something that wasn't requested.
    """
    silent_s = SILENT_S + connection.slow_s
    try:
        return _extract(connection.argv, request, folder, silent_s)
    except FAILURES:
        shutil.rmtree(folder)
        folder.mkdir()
        return _extract(connection.retry(), request, folder, silent_s)


def _extract(argv: list[str], request: CollectRequest, folder: Path, silent_s: float) -> TarAnswer:
    token = new_token()
    with tempfile.TemporaryFile(prefix="paceline-") as stdin:
        stdin.write(message(request, token))
        stdin.seek(0)
        child = process.stream(argv, stdin=stdin)
    if child.stdout is None or child.stderr is None:
        raise RuntimeError("a stream has pipes")
    try:
        pipe = Patient(child, child.stdout, silent_s)
        head = _next_answer(pipe, token, "tar")
        if head is None:
            raise ConnectionError(_last_words(child))
        unwritable = tuple(_written(pipe, [*request.patterns, *request.work_patterns], folder))
        trailer = _next_answer(pipe, token, "trailer")
        if trailer is None:
            raise ConnectionError(f"its answer broke off behind the tar: {_last_words(child)}")
        return TarAnswer(head=from_json(TarHead, head), trailer=from_json(TarTrailer, trailer), unwritable=unwritable)
    finally:
        child.kill()  # also if it is stopped; after a full answer it has nothing left to do
        child.wait()
        child.stdout.close()
        child.stderr.close()


def _next_answer(pipe: Patient, token: str, name: str) -> Any:
    """Return what the agent's next line with that name holds; None: the answer ends before.

    Raises PacelineError: the agent reports an error.
    """
    for line in iter(pipe.readline, b""):
        value = parse(line, token)
        if value is not None and "error" in value:
            raise PacelineError(str(value["error"]))
        if value is not None and name in value:
            return value[name]
    return None


def _written(pipe: Patient, patterns: list[str], folder: Path) -> Iterator[str]:
    """Write the files of a tar into ``folder``; yield those that can't be written here, with the reason.

    Raises UnfitError: no pattern matches a file.
    """
    for member in tars.members(pipe, most_bytes=_MOST_BYTES):
        if not any(_fits(member.name.split("/"), pattern.split("/"), member) for pattern in patterns):
            raise tars.UnfitError(f"it sent {member.name[:200]!r}, which it was not asked for")
        try:
            member.write(folder)
        except OSError as error:
            if error.errno not in _NAMES:
                raise
            yield f"{member.name[:200]!r} ({error.strerror})"


def _fits(parts: list[str], pattern: list[str], member: tars.Member) -> bool:
    """True if a pattern matches the file, a folder that contains it, or a folder on the way to it."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[at:], pattern[1:], member) for at in range(len(parts) + 1))
    if not parts:
        return member.is_folder
    if not fnmatchcase(parts[0], pattern[0]):
        return False
    # the name of a folder stands for all that lies in it
    return (pattern[1:] == [] and "*" not in pattern[0]) or _fits(parts[1:], pattern[1:], member)


class Patient:
    """Reads a child's output. The limit is for the silence between two pieces, not for the whole time."""

    def __init__(self, child: Popen[bytes], pipe: IO[bytes], silent_s: float) -> None:
        self._child, self._pipe, self._silent_s = child, pipe, silent_s
        self._rest = b""

    def read(self, size: int = 1 << 16) -> bytes:
        """Return at most ``size`` bytes; none at the end. Raises TimeoutError when nothing comes."""
        data = self._rest or read_some(self._child, self._pipe, self._silent_s)
        self._rest = data[size:]
        return data[:size]

    def readline(self) -> bytes:
        """Return a line, or the rest at the end. Raises TimeoutError."""
        data = b""
        while b"\n" not in data:
            more = self.read()
            if not more:
                return data
            data += more
            if len(data) > _LONGEST_LINE:
                raise ValueError(f"a line of its answer has more than {_LONGEST_LINE:,} bytes")
        end = data.index(b"\n") + 1
        self._rest = data[end:] + self._rest
        return data[:end]


def _last_words(child: Popen[bytes]) -> str:
    """Return what a child that has closed its output printed on stderr."""
    with contextlib.suppress(TimeoutExpired):
        child.wait(timeout=_LOOK_S)
    text = b""
    if child.stderr is not None:
        os.set_blocking(child.stderr.fileno(), False)
        text = child.stderr.read() or b""
    return text.decode(errors="replace").strip()[-400:] or "no answer"
