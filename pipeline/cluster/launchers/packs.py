"""A data pack for the hosts that lack it: this computer sends one copy, and the hosts pass it on among themselves."""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.launchers.relaying import SLOWEST_BYTES_PER_S, notes, relay
from pipeline.cluster.launchers.sending import append
from pipeline.core.files import sha256_file
from pipeline.core.specs import NodeFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

SENT_WITH_RUN_BYTES = 8 << 20  # what travels with the run, to all hosts together: it saves a round trip
_WHAT = "the data pack"
NOT_SENT = "stamps.json"  # says which files need not be hashed again on this computer


def size_bytes(folder: Path) -> int:
    """Of all files of a pack."""
    files = _tree(folder)
    return sum(files.values()) if files else _size_bytes(folder)


def _tree(folder: Path) -> dict[str, int]:
    """The files that the manifest names, of a script's data and of encoded images, with their sizes; else none."""
    try:
        return _sizes_in(folder / "manifest.json")
    except (OSError, ValueError, AttributeError):
        return {}


@lru_cache(maxsize=8)
def _sizes_in(manifest: Path) -> dict[str, int]:
    """Read once: a send asks several times, it may name 100,000 files, and its folder's name holds its digest."""
    found = json.loads(manifest.read_text(encoding="utf-8")).get("files")
    return found if isinstance(found, dict) else {}


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def rides_with_the_run(pack: PackSource, nnodes: int) -> bool:
    return size_bytes(pack.path) * nnodes <= SENT_WITH_RUN_BYTES


def send(launcher: AgentLauncher, pack: PackSource, facts: Sequence[NodeFacts]) -> list[str]:
    """Lay the data pack on every host that lacks it, whole or not at all; what is remarkable about that, in lines.

    One host gets it from here, unless one has it already; from there the others take it over the network that connects
    the hosts (``agent/relay.py``). Whom no host can serve gets this computer's copy. With ``cluster.tls_…`` set all of
    them do: then what hosts send each other is to be encrypted, and the way from here is.

    Raises:
        HostError: a host could not be sent it, or has no room for it.
    """
    lacking = [fact for fact in facts if fact.pack_path is None]
    holders = [fact for fact in facts if fact.pack_path is not None]
    if len(facts) == 1 or launcher.cluster.tls_certificate is not None:
        _from_here(launcher, pack, lacking)
        return []
    if not holders:
        first, *lacking = lacking
        path = _from_here(launcher, pack, [first])[first.host]
        holders = [dataclasses.replace(first, pack_path=path)]
    unserved = _relayed(launcher, pack, [holders[0], *lacking]) if lacking else {}
    if unserved:
        _from_here(launcher, pack, [fact for fact in lacking if fact.host in unserved])
    return notes(_WHAT, holders[0].host, unserved)


def _from_here(launcher: AgentLauncher, pack: PackSource, facts: Sequence[NodeFacts]) -> dict[str, str]:
    """Send this computer's copy; host → where it lies there. Raises HostError."""
    wanted = {fact.host for fact in facts}
    request = {"do": "put_pack", "workdir": launcher.workdir, "pack_digest": pack.digest}
    answers = launcher.ask(
        request,
        hosts=[host for host in launcher.cluster.hosts if host.label in wanted],
        timeout_s=launcher.short_s + size_bytes(pack.path) * len(facts) / SLOWEST_BYTES_PER_S,
        payload=lambda stdin: append(stdin, pack.path, "."),
        what=_WHAT,
    )
    values = launcher.demand("sending the data pack", answers)
    return {label: str(value["pack_path"]) for label, value in values.items()}


def _relayed(launcher: AgentLauncher, pack: PackSource, nodes: Sequence[NodeFacts]) -> dict[str, str]:
    """Let the first of ``nodes`` serve the others; host → why it could not be served."""
    manifest = json.loads((pack.path / "manifest.json").read_text(encoding="utf-8"))
    request = {"do": "relay_pack", "workdir": launcher.workdir, "pack_digest": pack.digest}
    rows = [{"pack_path": fact.pack_path} for fact in nodes]
    return relay(
        launcher, {**request, "empty": manifest.get("empty", [])}, _files(pack, manifest), nodes, rows, what=_WHAT
    )


def _files(pack: PackSource, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Name, size and digest of each file that makes the pack, and whether it can be executed."""
    lying = {path.name for path in pack.path.iterdir() if path.is_file() and path.name != NOT_SENT}
    known = manifest.get("sha256", {})
    files = []
    for name in sorted({*lying, *manifest.get("files", {})}):
        path = pack.path / name
        about = path.stat()
        row = {"name": name, "bytes": about.st_size, "sha256": known.get(name) or sha256_file(path)}
        files.append({**row, "executable": True} if about.st_mode & stat.S_IXUSR else row)
    return files
