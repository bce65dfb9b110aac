"""Fetch the outputs of a node into the controller's run folder, for hosts that don't share it.

The agent sends one tar. Its files are extracted beside the run's own, verified, and then renamed into place. The host
isn't trusted: only plain files with requested names are taken, and no link may lead them out of the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import IO, Any

from pipeline.cluster.agent.node import SETTLED_S
from pipeline.cluster.agent.requests import Access, CollectRequest, NodeStart, TarHead, TarTrailer
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
from pipeline.runs.checkpoints import READ_ERRORS, read_verified
from trainers.contract import run_folder
from trainers.contract.records import from_json

SILENT_S = 10.0  # a connection that is silent for longer is replaced
_AT_ONCE = 8  # hosts from which files are fetched at the same time
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}  # of this computer
_CONNECTION_ERRORS = (ConnectionError, TimeoutError, EOFError, tarfile.ReadError)
_FAILURES = (OSError, PacelineError, *tars.DAMAGE)  # what ``_extract`` raises
_NAME_ERRORS = {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}  # this computer's file system doesn't accept the name
_SHOWN = 10  # files that a note names
_WAIT_S = 0.5  # for the end of a child, whose stderr is then complete
_MOST_BYTES = 1 << 42  # of one answer
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """A node whose files are fetched."""

    connection: Connection
    node: NodeStart  # its part of the start
    access: Access  # by which the agent finds which part is its own


@dataclass(frozen=True, kw_only=True)
class Received:
    """The result of a fetch."""

    is_complete: bool  # False: the files are still on the node
    notes: tuple[str, ...] = ()  # lines for the user


def receive(source: Source, run_dir: Path, *, final: bool, outputs: Outputs = TRAINING_OUTPUTS) -> Received:
    """Fetch a node's files into ``run_dir``; those of nodes other than the first one into ``nodes/RANK`` in it.

    ``final``: the attempt has ended well; else only the files are fetched from which a later attempt resumes. Raises
    TrainingError if ``final``: nothing came, a digest differs, or a needed file is missing. Raises OSError if not
    ``final``: ``run_dir`` can't be written.
    """
    host, rank = source.connection.host, source.node.node_rank
    request = _request(source, outputs, final=final)
    temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(".collect"), dir=run_dir))
    try:
        answer = _extract(source.connection, request, temporary)
        damaged = [] if outputs.whole else _drop_damaged(temporary)
        is_pruned = outputs.pruned is not None and (temporary / outputs.pruned).exists()
        needed = (outputs.pruned,) if outputs.pruned and is_pruned else outputs.needed
        missing = [name for name in needed if not (temporary / name).exists()]
        if final and (damaged or missing):
            what = f"damaged on the way: {', '.join(damaged)}" if damaged else f"missing: {', '.join(missing)}"
            raise TrainingError(f"{host} ended well, but its outputs could not be collected; {what}")
        target = run_dir / run_folder.NODES / str(rank) if rank else run_dir
        # A file that the host no longer has is deleted here too, unless the host didn't send everything: then the file
        # here may be the only copy.
        if outputs.until_s is None and not answer.trailer.unsent:
            for name in outputs.whole:
                _refuse_links(run_dir, target / name)
                _drop_others(target / name, temporary / name)
        received = _move_into_place(temporary, run_dir, target, needed[-1] if needed else "")
        if not outputs.whole:
            _drop_older(run_dir, received)
    except _FAILURES as error:
        _raise_unless_retried(error, host, run_dir, final=final)
        return Received(is_complete=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Received(is_complete=True, notes=tuple(_notes(host, answer, request, outputs)))


def receive_others(plan: LaunchPlan, sources: Mapping[str, Source], run_dir: Path, *, final: bool) -> list[str]:
    """Fetch the files that each node but the first has written. Returns notes, also about nodes that failed.

    ``sources``: host label → source, of the hosts that can be reached.
    """
    outputs = dataclasses.replace(
        plan.outputs, resume=plan.outputs.others, final=plan.outputs.others, needed=(), pruned=None
    )

    def receive_own(node: NodePlan) -> Received:
        return receive(sources[node.host], run_dir, final=final, outputs=outputs)

    reachable = [node for node in plan.nodes[1:] if node.host in sources]
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        fetched = dict(zip([node.host for node in reachable], pool.map(receive_own, reachable), strict=True))
    notes = [note for received in fetched.values() for note in received.notes]
    lacking = [node.host for node in plan.nodes[1:] if node.host not in fetched or not fetched[node.host].is_complete]
    if lacking:
        notes.append(
            f"{', '.join(lacking)}: what its ranks alone have saved (checkpoints, files in the working directory) "
            "can't be fetched; an attempt that goes on from a checkpoint does so without it"
        )
    return notes


def _raise_unless_retried(error: Exception, host: str, run_dir: Path, *, final: bool) -> None:
    """Raise what ``receive`` raises for a failed fetch; return if a later fetch may succeed."""
    if final and isinstance(error, _CONNECTION_ERRORS):
        hint = f"the same command once {host} answers; it fetches them, and nothing is trained again"
        what = f"{host} ended well, but its outputs could not be collected yet: {error}"
        raise TrainingError(what, hint=hint, cause="outputs") from error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        if not final:
            raise error
        what = f"{host} ended well, but its outputs can't be written here yet: {os_reason(error)}"
        raise TrainingError(what, hint=write_hint(error, run_dir), cause="outputs") from error
    if final:
        raise TrainingError(f"{host}: its outputs could not be collected: {error}") from error


def _request(source: Source, outputs: Outputs, *, final: bool) -> CollectRequest:
    rank = source.node.node_rank
    request = CollectRequest(
        nodes=(source.node,),
        patterns=outputs.final if final else outputs.resume,
        until_s=outputs.until_s,
        access=source.access,
    )
    if outputs.work:
        work = tuple(pattern.format(rank=rank) for pattern in outputs.work)
        request = request._replace(
            work_patterns=work if outputs.until_s is None else (),
            limit_bytes=outputs.limit_bytes,
            stamps_file=f"{run_folder.WORK}/node{rank}/{run_folder.GIVEN}",
        )
    # until_s is a time of rank 0's clock; another node takes what its own clock says is old enough
    if rank and outputs.until_s is not None:
        request = request._replace(until_s=None, settled_s=SETTLED_S)
    return request


def _notes(host: str, answer: _TarAnswer, request: CollectRequest, outputs: Outputs) -> list[str]:
    """Return lines for the user about files that stayed on the host."""
    (node,), notes = request.nodes, []
    if answer.head.too_large_bytes is not None and request.limit_bytes is not None:
        limit_gib = request.limit_bytes / (1 << 30)
        folders = ", ".join(f"{node.run_dir}/{pattern}" for pattern in request.work_patterns)
        notes.append(
            f"{host}: what the script wrote in its working directory ({file_size(answer.head.too_large_bytes)}) is "
            f"more than program.outputs_limit={limit_gib:g} GiB and stays there in {folders}; a higher limit brings "
            "such files back"
        )
    if answer.unwritable:
        names = "; ".join(answer.unwritable)
        notes.append(f"{host}: can't be written here, so it stays in {node.run_dir} there: {names}")
    trailer = answer.trailer
    if trailer.unsent and outputs.until_s is None:
        files = [f"{printable(name)} ({printable(why)})" for name, why in trailer.unsent.items()]
        more = f" and {trailer.unsent_count - _SHOWN} more" if trailer.unsent_count > _SHOWN else ""
        notes.append(f"{host}: not brought from there: {', '.join(files[:_SHOWN])}{more}")
    return notes


def _drop_damaged(folder: Path) -> list[str]:
    """Remove checkpoints that don't match the digest of their .json (or that have none) and return their names."""
    damaged = []
    for path in sorted((folder / run_folder.CHECKPOINTS).glob("*.pt")):
        try:
            read_verified(path)
        except READ_ERRORS:
            damaged.append(path.name)
            path.unlink()
            path.with_suffix(".json").unlink(missing_ok=True)
    return damaged


def _drop_others(folder: Path, received: Path) -> None:
    """Remove from ``folder`` what the node no longer has; nothing if the node sent no such folder."""
    if received.is_dir():
        for path in sorted(folder.rglob("*"), reverse=True):  # files before the folder that they are in
            if not os.path.lexists(received / path.relative_to(folder)):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _move_into_place(temporary: Path, run_dir: Path, folder: Path, last: str) -> list[Path]:
    """Rename all files into ``folder``, ``last`` at the end; return their names. Raises UnfitError: a link."""
    received = sorted(path.relative_to(temporary) for path in temporary.rglob("*") if path.is_file())
    for name in sorted(received, key=lambda name: str(name) == last):
        target = folder / name
        _refuse_links(run_dir, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).replace(target)
    return received


def _refuse_links(run_dir: Path, folder: Path) -> None:
    """Raise UnfitError if a link on the way from the run folder to ``folder`` would lead to other files."""
    for parent in (folder, *folder.parents):
        if parent == run_dir:
            return
        if parent.is_symlink():
            raise tars.UnfitError(f"{parent} is a link, and outputs are written into the run folder alone")


def _drop_older(run_dir: Path, received: list[Path]) -> None:
    """Remove checkpoints that the node has pruned, if a newer one was received."""
    if any(name.match("checkpoints/step-*.pt") for name in received):
        checkpoints = run_dir / run_folder.CHECKPOINTS
        for old in checkpoints.glob("step-*"):
            if old.relative_to(run_dir) not in received:
                shutil.rmtree(old) if old.is_dir() else old.unlink()  # a damaged one, set aside, may be a folder


# ----------------------------------------------------------------------------- the answer: a tar between two lines
@dataclass(frozen=True, kw_only=True)
class _TarAnswer:
    """What a node answered in addition to its files."""

    head: TarHead
    trailer: TarTrailer
    unwritable: tuple[str, ...]  # files with names that this computer doesn't accept, and why


def _extract(connection: Connection, request: CollectRequest, folder: Path) -> _TarAnswer:
    """Extract the files that a node sends into ``folder``; try once more if the connection breaks or is silent.

    Raises ``_FAILURES``: files are missing, or something came that wasn't requested.
    """
    silent_s = SILENT_S + connection.slow_s
    try:
        return _extract_once(connection.argv, request, folder, silent_s)
    except _FAILURES:
        shutil.rmtree(folder)
        folder.mkdir()
        return _extract_once(connection.retry(), request, folder, silent_s)


def _extract_once(argv: list[str], request: CollectRequest, folder: Path, silent_s: float) -> _TarAnswer:
    token = new_token()
    with tempfile.TemporaryFile(prefix="paceline-") as stdin:
        stdin.write(message(request, token))
        stdin.seek(0)
        child = process.stream(argv, stdin=stdin)
    if child.stdout is None or child.stderr is None:
        raise RuntimeError("a stream has pipes")
    try:
        pipe = _Pipe(child, child.stdout, silent_s)
        head = _next_answer(pipe, token, "tar")
        if head is None:
            raise ConnectionError(_last_words(child))
        unwritable = tuple(_write_files(pipe, [*request.patterns, *request.work_patterns], folder))
        trailer = _next_answer(pipe, token, "trailer")
        if trailer is None:
            raise ConnectionError(f"its answer broke off behind the tar: {_last_words(child)}")
        return _TarAnswer(head=from_json(TarHead, head), trailer=from_json(TarTrailer, trailer), unwritable=unwritable)
    finally:
        child.kill()  # also if it is stopped; after a full answer it has nothing left to do
        child.wait()
        child.stdout.close()
        child.stderr.close()


def _next_answer(pipe: _Pipe, token: str, name: str) -> Any:
    """Return the agent's next line of this name; None: there is none. Raises PacelineError: an agent's error."""
    for line in iter(pipe.readline, b""):
        value = parse(line, token)
        if value is not None and "error" in value:
            raise PacelineError(str(value["error"]))
        if value is not None and name in value:
            return value[name]
    return None


def _write_files(pipe: _Pipe, patterns: list[str], folder: Path) -> Iterator[str]:
    """Write the files of a tar into ``folder``; yield names that this computer doesn't accept, with the reason.

    Raises UnfitError: no pattern matches a file.
    """
    for member in tars.members(pipe, most_bytes=_MOST_BYTES):
        if not any(_matches(member.name.split("/"), pattern.split("/"), member) for pattern in patterns):
            raise tars.UnfitError(f"it sent {member.name[:200]!r}, which it was not asked for")
        try:
            member.write(folder)
        except OSError as error:
            if error.errno not in _NAME_ERRORS:
                raise
            yield f"{member.name[:200]!r} ({error.strerror})"


def _matches(parts: list[str], pattern: list[str], member: tars.Member) -> bool:
    """Return True if a pattern allows the member: the file itself, a file in a folder that it names, or a folder above.

    ``parts`` and ``pattern``: what remains of both paths, divided at their slashes.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[at:], pattern[1:], member) for at in range(len(parts) + 1))
    if not parts:
        return member.is_folder
    if not fnmatchcase(parts[0], pattern[0]):
        return False
    names_a_folder = pattern[1:] == [] and "*" not in pattern[0]  # and so all files in it
    return names_a_folder or _matches(parts[1:], pattern[1:], member)


class _Pipe:
    """A child's output. Its time limit is for a silence, not for the whole output."""

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
    """Return the end of the child's stderr."""
    with contextlib.suppress(TimeoutExpired):
        child.wait(timeout=_WAIT_S)
    stderr = b""
    if child.stderr is not None:
        os.set_blocking(child.stderr.fileno(), False)  # a child of the child may keep the pipe open
        stderr = child.stderr.read() or b""
    return stderr.decode(errors="replace").strip()[-400:] or "no answer"
