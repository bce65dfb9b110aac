"""Send a data pack to the hosts that lack it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.launchers.sending import append
from pipeline.core.specs import NodeFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

SENT_WITH_RUN_BYTES = 8 << 20  # what travels with the run, to all hosts together: it saves a round trip
SLOWEST_BYTES_PER_S = 1e6  # a transfer that is slower is given up
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


def send(launcher: AgentLauncher, pack: PackSource, facts: Sequence[NodeFacts]) -> None:
    """Send the data pack to all hosts that lack it, at once; each has it whole, with its digests, or not at all.

    Raises:
        HostError: a host could not be sent it, or has no room for it.
    """
    lacking = {fact.host for fact in facts if fact.pack_path is None}
    if not lacking:
        return
    request = {"do": "put_pack", "workdir": launcher.workdir, "pack_digest": pack.digest}
    answers = launcher.ask(
        request,
        hosts=[host for host in launcher.cluster.hosts if host.label in lacking],
        timeout_s=launcher.short_s + size_bytes(pack.path) * len(lacking) / SLOWEST_BYTES_PER_S,
        payload=lambda stdin: append(stdin, pack.path, "."),
        what=_WHAT,
    )
    launcher.demand("sending the data pack", answers)
