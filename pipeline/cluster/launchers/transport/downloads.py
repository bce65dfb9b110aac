"""Outputs of a node, fetched into the controller's run folder: one tar, verified, then renamed.

The host isn't trusted: only plain files are taken whose names were requested, and they are put where no link leads out
of the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any

from pipeline.cluster.agent.running.follow import SETTLED_S
from pipeline.cluster.launchers.transport.answers import parse
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.cluster.launchers.transport.streams import Connection, read_some
from pipeline.core import tars
from pipeline.core.errors import PacelineError, TrainingError, os_reason
from pipeline.core.files import temporary_prefix, write_hint
from pipeline.core.printable import printable
from pipeline.core.processes import process
from pipeline.core.specs import TRAINING_OUTPUTS, LaunchPlan, NodePlan, Outputs
from pipeline.core.tables import file_size
from pipeline.runs.checkpoints import DAMAGE, read_verified
from trainers.contract import run_folder

SILENT_S = 10.0
_AT_ONCE = 8  # hosts at a time
_LOOK_S = 0.5
_OF_THIS_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}
_NAMES = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}  # names that this computer's file system doesn't accept
_BROKEN = (ConnectionError, TimeoutError, EOFError, tarfile.ReadError)  # errors of the connection, not of the files
_FAILURES = (OSError, PacelineError, *tars.DAMAGE)
_MOST_BYTES = 1 << 42  # of one answer
_LONGEST_LINE = 1 << 20
_SHOWN = 10  # files that a host could not send


def receive(
    connection: Connection,
    request: dict[str, Any],
    run_dir: Path,
    *,
    final: bool,
    outputs: Outputs = TRAINING_OUTPUTS,
    rank: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Request files from a node's agent and put them into ``run_dir``. Returns False if they are still on the node.

    If the connection breaks, or brings nothing for ``SILENT_S``, it is tried once more.

    Args:
        rank: node rank; files of nodes other than the first go to ``nodes/RANK``.
        say: takes what stays on the node, in a line.

    Raises:
        TrainingError: when ``final``: nothing came, a digest differs, or a needed file is missing.
        OSError: unless ``final``: ``run_dir`` can't be written.
    """
    host = connection.host
    request = {**request, **_wanted(outputs, rank, final=final)}
    temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(".collect"), dir=run_dir))
    try:
        answer, left_out = _extract_or_again(connection, request, temporary)
        if isinstance(size := answer.get("left_bytes"), int):
            say(_stays(host, size, request))
        if left_out:
            place = ", ".join(node["run_dir"] for node in request["nodes"] if node.get("host", host) == host)
            say(f"{host}: can't be written here, so it stays in {place} there: {'; '.join(left_out)}")
        unsent = _unsent(answer)
        if unsent and outputs.until_s is None:
            say(f"{host}: not brought from there: {unsent}")
        damaged = [] if outputs.whole else _drop_damaged(temporary)
        needed = _needed(outputs, temporary)
        missing = [name for name in needed if not (temporary / name).exists()]
        if final and (damaged or missing):
            what = f"damaged on the way: {', '.join(damaged)}" if damaged else f"missing: {', '.join(missing)}"
            raise TrainingError(f"{host} ended well, but its outputs could not be collected; {what}")
        here = run_dir / run_folder.NODES / str(rank) if rank else run_dir
        # where the host could not send all, what is here of it stays: it may be the only copy
        for name in outputs.whole if outputs.until_s is None and not unsent else ():
            _refuse_links(run_dir, here / name)
            _drop_others(here / name, temporary / name)
        received = _settle(temporary, run_dir, here, needed[-1] if needed else "")
        if not outputs.whole:
            _drop_older(run_dir, received)
    except _FAILURES as error:
        _refuse(error, host, run_dir, final=final)
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def receive_others(
    plan: LaunchPlan,
    connections: Mapping[str, Callable[[], Connection]],
    request: dict[str, Any],
    run_dir: Path,
    *,
    final: bool,
    say: Callable[[str], None],
) -> None:
    """Fetch the own files of all nodes but the first; ``say`` takes the names of those that failed.

    ``connections``: host label → how it is reached, for the hosts that can be.
    """
    outputs = dataclasses.replace(
        plan.outputs, resume=plan.outputs.others, final=plan.outputs.others, needed=(), pruned=None
    )

    def receive_own(node: NodePlan) -> bool:
        connection = connections[node.host]()
        return receive(connection, request, run_dir, final=final, outputs=outputs, rank=node.node_rank, say=say)

    reachable = [node for node in plan.nodes[1:] if node.host in connections]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        fetched = dict(zip([node.host for node in reachable], pool.map(receive_own, reachable), strict=True))
    lacking = [node.host for node in plan.nodes[1:] if not fetched.get(node.host)]
    if lacking:
        say(
            f"{', '.join(lacking)}: what its ranks alone have saved (checkpoints, files in the working directory) "
            "can't be fetched; an attempt that goes on from a checkpoint does so without it"
        )


def _refuse(error: Exception, host: str, run_dir: Path, *, final: bool) -> None:
    """Raise what ``receive`` raises, unless the files can be fetched later."""
    if final and isinstance(error, _BROKEN):
        hint = f"the same command once {host} answers; it fetches them, and nothing is trained again"
        what = f"{host} ended well, but its outputs could not be collected yet: {error}"
        raise TrainingError(what, hint=hint, cause="outputs") from error
    if isinstance(error, OSError) and error.errno in _OF_THIS_DISK:
        if not final:
            raise error
        what = f"{host} ended well, but its outputs can't be written here yet: {os_reason(error)}"
        raise TrainingError(what, hint=write_hint(error, run_dir), cause="outputs") from error
    if final:
        raise TrainingError(f"{host}: its outputs could not be collected: {error}") from error


def _wanted(outputs: Outputs, rank: int, *, final: bool) -> dict[str, Any]:
    """Return the fields of the request for these outputs."""
    patterns = outputs.final if final else outputs.resume
    request: dict[str, Any] = {"do": "collect", "patterns": patterns, "until_s": outputs.until_s}
    if outputs.work:
        work = [pattern.format(rank=rank) for pattern in outputs.work]
        request |= {"work": work if outputs.until_s is None else [], "limit_bytes": outputs.limit_bytes}
        request |= {"given": f"{run_folder.WORK}/node{rank}/{run_folder.GIVEN}"}
    if rank and outputs.until_s is not None:  # by its own clock
        request |= {"until_s": None, "settled_s": SETTLED_S}
    return request


def _unsent(answer: Mapping[str, Any]) -> str:
    """Return the files that the host could not send, each with the reason; '': it sent all."""
    names, count = answer["unsent"], answer.get("unsent_count")
    if not isinstance(names, dict) or not names:
        return ""
    each = [f"{printable(str(name))} ({printable(str(why))})" for name, why in names.items()]
    more = f" and {count - _SHOWN} more" if isinstance(count, int) and count > _SHOWN else ""
    return f"{', '.join(each[:_SHOWN])}{more}"


def _stays(host: str, size_bytes: int, request: dict[str, Any]) -> str:
    limit = request["limit_bytes"] / (1 << 30)
    places = [
        f"{node['run_dir']}/{work}" for node in request["nodes"] for work in request["work"] if node["host"] == host
    ]
    return (
        f"{host}: what the script wrote in its working directory ({file_size(size_bytes)}) is more than "
        f"program.outputs_limit={limit:g} GiB and stays there in {', '.join(places)}; a higher limit brings "
        "such files back"
    )


def _extract_or_again(
    connection: Connection, request: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], list[str]]:
    try:
        return _extract(connection.argv, request, folder, SILENT_S + connection.slow_s)
    except _FAILURES:
        shutil.rmtree(folder)
        folder.mkdir()
        return _extract(connection.retry(), request, folder, SILENT_S + connection.slow_s)


def _needed(outputs: Outputs, folder: Path) -> tuple[str, ...]:
    """Return the files that a good end has left."""
    pruned = outputs.pruned is not None and (folder / outputs.pruned).exists()
    return (outputs.pruned,) if outputs.pruned and pruned else outputs.needed


def _extract(
    argv: list[str], request: dict[str, Any], folder: Path, silent_s: float
) -> tuple[dict[str, Any], list[str]]:
    """Extract the files of an answer into ``folder``.

    Returns the answer (its lines before and after the tar), and the files whose names this computer doesn't accept,
    each with the reason.
    """
    token = new_token()
    with tempfile.TemporaryFile(prefix="paceline-") as stdin:
        stdin.write(message(request, token))
        stdin.seek(0)
        child = process.stream(argv, stdin=stdin)
    if child.stdout is None or child.stderr is None:
        raise RuntimeError("a stream has pipes")
    try:
        pipe = Patient(child, child.stdout, silent_s)
        answers = (value for line in iter(pipe.readline, b"") if (value := parse(line, token)) is not None)
        answer = next((value for value in answers if "tar" in value or "error" in value), None)
        if answer is None:
            raise ConnectionError(_last_words(child))
        if "error" in answer:
            raise PacelineError(str(answer["error"]))
        wanted = [*request["patterns"], *request.get("work", [])]
        left_out = list[str]()
        for member in tars.members(pipe, most_bytes=_MOST_BYTES):
            if not any(_fits(member.name.split("/"), pattern.split("/"), member) for pattern in wanted):
                raise tars.UnfitError(f"it sent {member.name[:200]!r}, which it was not asked for")
            try:
                member.write(folder)
            except OSError as error:
                if error.errno not in _NAMES:
                    raise
                left_out.append(f"{member.name[:200]!r} ({error.strerror})")
        trailer = next((value for value in answers if "unsent" in value), None)
        if trailer is None:
            raise ConnectionError(f"its answer broke off behind the tar: {_last_words(child)}")
        return {**answer, **trailer}, left_out
    finally:
        child.kill()  # also if it is stopped; after a full answer it has nothing left to do
        child.wait()
        child.stdout.close()
        child.stderr.close()


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


def _drop_damaged(folder: Path) -> list[str]:
    """Remove checkpoints that don't match the digest of their .json (or that have none) and return their names."""
    damaged = []
    for path in sorted((folder / run_folder.CHECKPOINTS).glob("*.pt")):
        try:
            read_verified(path)
        except DAMAGE:
            damaged.append(path.name)
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)
    return damaged


def _drop_others(here: Path, received: Path) -> None:
    """Remove what the node no longer has; nothing where it sent no such folder."""
    if received.is_dir():
        for path in sorted(here.rglob("*"), reverse=True):
            if not os.path.lexists(received / path.relative_to(here)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _settle(temporary: Path, run_dir: Path, here: Path, last: str) -> list[Path]:
    """Rename all files into ``here``, ``last`` as the last, and return their names. Raises UnfitError for links."""
    received = sorted(path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file())
    for name in sorted(received, key=lambda name: str(name) == last):
        target = here / name
        _refuse_links(run_dir, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(target)
    return received


def _refuse_links(run_dir: Path, folder: Path) -> None:
    """Raise UnfitError if a link lies between the run folder and ``folder``, as other files would be overwritten."""
    for parent in (folder, *folder.parents):
        if parent == run_dir:
            return
        if parent.is_symlink():
            raise tars.UnfitError(f"{parent} is a link, and outputs are written into the run folder alone")


def _drop_older(run_dir: Path, received: list[Path]) -> None:
    """Remove older checkpoints that the node dropped, once a newer one is here."""
    if any(name.match("checkpoints/step-*.pt") for name in received):
        checkpoints = run_dir / run_folder.CHECKPOINTS
        for old in checkpoints.glob("step-*"):
            if old.relative_to(run_dir) not in received:
                shutil.rmtree(old) if old.is_dir() else old.unlink()  # what was set aside may be a folder
