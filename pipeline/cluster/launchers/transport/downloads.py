"""Outputs of a node, fetched into the controller's run folder: one tar, verified, then renamed.

The host isn't trusted: only plain files are taken whose names were requested, and they are put where no link leads out
of the run folder.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.agent.reports import TarTrailer
from pipeline.cluster.agent.requests import Access, CollectRequest, NodeStart
from pipeline.cluster.agent.running.follow import SETTLED_S
from pipeline.cluster.launchers.transport.streams import Connection
from pipeline.cluster.launchers.transport.tar_answers import FAILURES, TarAnswer, extract
from pipeline.core import tars
from pipeline.core.errors import TrainingError, os_reason
from pipeline.core.files import write_hint
from pipeline.core.printable import printable
from pipeline.core.specs import TRAINING_OUTPUTS, LaunchPlan, NodePlan, Outputs
from pipeline.core.tables import file_size
from pipeline.core.temporary_files import temporary_prefix
from pipeline.runs.checkpoints import DAMAGE, read_verified
from trainers.contract import run_folder

_AT_ONCE = 8  # hosts at a time
_OF_THIS_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO}
_BROKEN = (ConnectionError, TimeoutError, EOFError, tarfile.ReadError)  # errors of the connection, not of the files
_SHOWN = 10  # files that a host could not send


@dataclass(frozen=True, kw_only=True)
class Source:
    """A node whose files are fetched.

    ``node``: its part of the start, and with ``access`` what the agent needs to find that.
    """

    connection: Connection
    node: NodeStart
    access: Access


@dataclass(frozen=True, kw_only=True)
class Received:
    """The result of a fetch: whether all requested files came, or are still on the node; and lines for the user."""

    is_complete: bool
    notes: tuple[str, ...] = ()


def receive(source: Source, run_dir: Path, *, final: bool, outputs: Outputs = TRAINING_OUTPUTS) -> Received:
    """Fetch a node's files and put them into ``run_dir``; those of nodes other than the first into ``nodes/RANK``.

    Args:
        final: the attempt has ended well; else only what a later attempt resumes from is fetched.

    Raises:
        TrainingError: when ``final``: nothing came, a digest differs, or a needed file is missing.
        OSError: unless ``final``: ``run_dir`` can't be written.
    """
    host, rank = source.connection.host, source.node.node_rank
    request = _request(source, outputs, final=final)
    temporary = Path(tempfile.mkdtemp(prefix=temporary_prefix(".collect"), dir=run_dir))
    try:
        answer = extract(source.connection, request, temporary)
        damaged = [] if outputs.whole else _drop_damaged(temporary)
        needed = _needed(outputs, temporary)
        missing = [name for name in needed if not (temporary / name).exists()]
        if final and (damaged or missing):
            what = f"damaged on the way: {', '.join(damaged)}" if damaged else f"missing: {', '.join(missing)}"
            raise TrainingError(f"{host} ended well, but its outputs could not be collected; {what}")
        target = run_dir / run_folder.NODES / str(rank) if rank else run_dir
        # where the host could not send all, what is here of it stays: it may be the only copy
        for name in outputs.whole if outputs.until_s is None and not answer.trailer.unsent else ():
            _refuse_links(run_dir, target / name)
            _drop_others(target / name, temporary / name)
        received = _settle(temporary, run_dir, target, needed[-1] if needed else "")
        if not outputs.whole:
            _drop_older(run_dir, received)
    except FAILURES as error:
        _refuse(error, host, run_dir, final=final)
        return Received(is_complete=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Received(is_complete=True, notes=tuple(_notes(host, answer, request, outputs)))


def receive_others(plan: LaunchPlan, sources: Mapping[str, Source], run_dir: Path, *, final: bool) -> list[str]:
    """Fetch the own files of all nodes but the first. Return notes, also on the nodes whose files didn't come.

    ``sources``: by host label, of the hosts that can be reached.
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
    if rank and outputs.until_s is not None:  # by its own clock
        request = request._replace(until_s=None, settled_s=SETTLED_S)
    return request


def _notes(host: str, answer: TarAnswer, request: CollectRequest, outputs: Outputs) -> list[str]:
    """Return a line for each reason for which files stay on the host."""
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
    if answer.trailer.unsent and outputs.until_s is None:
        notes.append(f"{host}: not brought from there: {_unsent(answer.trailer)}")
    return notes


def _unsent(trailer: TarTrailer) -> str:
    """Return the files that the host could not send, each with the reason."""
    files = [f"{printable(name)} ({printable(why)})" for name, why in trailer.unsent.items()]
    more = f" and {trailer.unsent_count - _SHOWN} more" if trailer.unsent_count > _SHOWN else ""
    return f"{', '.join(files[:_SHOWN])}{more}"


def _needed(outputs: Outputs, folder: Path) -> tuple[str, ...]:
    """Return the files that a good end has left."""
    pruned = outputs.pruned is not None and (folder / outputs.pruned).exists()
    return (outputs.pruned,) if outputs.pruned and pruned else outputs.needed


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
