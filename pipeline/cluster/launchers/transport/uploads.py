"""Payloads sent to a host after a request (a run as a node needs it, data packs), and their progress."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO

from pipeline.cluster.launchers.base import PackSource
from pipeline.core import program as programs
from pipeline.core.tables import counted
from trainers.contract import run_folder

SLOWEST_BYTES_PER_S = 1e6  # slower transfers are given up
WITH_RUN_BYTES = 8 << 20  # for all hosts together: a smaller pack is sent with the run, which saves a round trip


def pack_bytes(folder: Path) -> int:
    """Return the size of all files of a pack."""
    try:
        sizes = _sizes_in(folder / "manifest.json")
    except (OSError, ValueError, AttributeError):
        sizes = {}
    return sum(sizes.values() or (path.stat().st_size for path in folder.iterdir() if path.is_file()))


@lru_cache(maxsize=8)
def _sizes_in(manifest: Path) -> dict[str, int]:
    """Return the sizes in a manifest: packs of scripts' data and of encoded images have them, others don't.

    Cached: a send needs them several times, there may be 100,000 files, and the folder's name holds the digest.
    """
    files = json.loads(manifest.read_text(encoding="utf-8")).get("files")
    return files if isinstance(files, dict) else {}


def append(stdin: IO[bytes], source: Path, name: str) -> None:
    """Append a tar of ``source`` under another name."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        archive.add(source, arcname=name)


def append_run(stdin: IO[bytes], run_dir: Path, pack: PackSource | None) -> None:
    """Append the run as a node needs it: code, config, what an attempt resumes from, and a small pack."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        for path, name in _staged(run_dir):
            archive.add(path, arcname=name, filter=lambda member: None if "__pycache__" in member.name else member)
        if pack is not None:
            archive.add(pack.path, arcname="pack")


def weights_bytes(run_dir: Path) -> int:
    """Return the size of the weights that the run starts from, or of what a script resumes from; 0: none."""
    sent = [run_dir / run_folder.INITIAL_WEIGHTS]
    if programs.of_run(run_dir).starts_torchrun:
        sent += [path for place, _ in _of_script(run_dir) for path in (place, *place.rglob("*"))]
    return sum(path.stat().st_size for path in sent if path.is_file())


def _of_script(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield what earlier attempts of a script left, with its name on the host. Each rank reads its part itself.

    What only one node gets lies in ``carried/RANK``, from where trainers/script/workdir.py takes it.
    """
    for name in ("checkpoints", "work", run_folder.METRICS):
        yield run_dir / name, name
    yield run_dir / run_folder.OUTPUTS, f"{run_folder.CARRIED}/0/outputs"
    for node in sorted(run_dir.glob(f"{run_folder.NODES}/*")):
        yield node, f"{run_folder.CARRIED}/{node.name}"


def _staged(run_dir: Path) -> Iterable[tuple[Path, str]]:
    """Yield the files of a run to send, each with its name on the host."""
    for name in ("code", run_folder.CONFIG, run_folder.ATTEMPT_IDS):
        yield run_dir / name, name
    if (run_dir / run_folder.INITIAL_WEIGHTS).exists():
        yield run_dir / run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS
    if programs.of_run(run_dir).starts_torchrun:
        yield from ((path, name) for path, name in _of_script(run_dir) if path.exists())
        return
    checkpoints = sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"))[-1:]
    for checkpoint in checkpoints:
        for path in (checkpoint, checkpoint.with_suffix(".json"), run_dir / run_folder.METRICS):
            yield path, str(path.relative_to(run_dir))


_NAMED = 4  # hosts in a line


@dataclass(frozen=True)
class Transfer:
    """A payload on its way to hosts.

    ``what``: its name; ``hosts``: labels; ``total_bytes``: for each host; ``began``: monotonic seconds.
    """

    what: str
    hosts: Sequence[str]
    total_bytes: int
    began: float = field(default_factory=time.monotonic)

    def text(self, arrived: Mapping[str, int], now: float) -> str:
        """Return the progress and mean rate of each host; of many hosts those that are furthest behind.

        Args:
            arrived: host → bytes that it has reported.
            now: monotonic seconds.
        """
        order = sorted(self.hosts, key=lambda host: arrived.get(host, 0)) if len(self.hosts) > _NAMED else self.hosts
        rows = [self._part(host, arrived.get(host, 0), now) for host in order[:_NAMED]]
        if len(self.hosts) > _NAMED:
            done = sum(arrived.get(host, 0) >= self.total_bytes for host in self.hosts)
            rows = [f"{done} of {counted(len(self.hosts), 'host')} have it; furthest behind {rows[0]}", *rows[1:]]
        return f"sending {self.what}: {', '.join(rows)}"

    def _part(self, host: str, count_bytes: int, now: float) -> str:
        rate = count_bytes / max(now - self.began, 1e-3)
        return f"{host} {count_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB ({rate / 1e6:,.1f} MB/s)"
