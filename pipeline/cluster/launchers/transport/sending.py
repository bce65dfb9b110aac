"""What is sent to a host behind a request (the run as a node needs it, data packs), and how much of it has arrived."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from pipeline.cluster.launchers.base import PackSource
from pipeline.core import program as programs
from pipeline.core.tables import counted
from trainers.contract import run_folder

SLOWEST_BYTES_PER_S = 1e6  # a transfer that is slower is given up
NOT_SENT = "stamps.json"  # of a pack: says which files need not be hashed again on this computer
_WITH_RUN_BYTES = 8 << 20  # of a pack that travels with the run, to all hosts together: it saves a round trip


def rides_with_the_run(pack: PackSource, nnodes: int) -> bool:
    """Whether a pack is so small that it is sent together with the run."""
    return pack_bytes(pack.path) * nnodes <= _WITH_RUN_BYTES


def pack_bytes(folder: Path) -> int:
    """The size of all files of a pack."""
    try:
        sizes = _sizes_in(folder / "manifest.json")
    except (OSError, ValueError, AttributeError):
        sizes = {}
    return sum(sizes.values() or (path.stat().st_size for path in folder.iterdir() if path.is_file()))


@lru_cache(maxsize=8)
def _sizes_in(manifest: Path) -> dict[str, int]:
    """The sizes in the manifest of a script's data and of encoded images; other packs' have none.

    Read once: a send needs them several times, there may be 100,000 files, and the folder's name holds the digest.
    """
    files = json.loads(manifest.read_text(encoding="utf-8")).get("files")
    return files if isinstance(files, dict) else {}


def append(stdin: IO[bytes], source: Path, name: str) -> None:
    """A tar of ``source`` under another name."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        archive.add(source, arcname=name)


def append_run(stdin: IO[bytes], run_dir: Path, pack: PackSource | None) -> None:
    """The run as a node needs it: code, config, what a later attempt resumes from, the pack where it is small."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        for path, name in _staged(run_dir):
            archive.add(path, arcname=name, filter=_no_caches)
        if pack is not None:
            archive.add(pack.path, arcname="pack")


def weights_bytes(run_dir: Path) -> int:
    """Of the weights that the run starts from, and of what a script goes on from; 0 where all is fresh."""
    sent = [run_dir / run_folder.INITIAL_WEIGHTS]
    if programs.of_run(run_dir).starts_torchrun:
        sent += [path for place, _ in _of_script(run_dir) for path in (place, *place.rglob("*"))]
    return sum(path.stat().st_size for path in sent if path.is_file())


def _of_script(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """What its earlier attempts left: each rank reads what it goes on from by itself. What only one node is to have
    lies in ``carried/RANK``, from where trainers/script/workdir.py takes it."""
    for name in ("checkpoints", "work", run_folder.METRICS):
        yield run_dir / name, name
    yield run_dir / run_folder.OUTPUTS, f"{run_folder.CARRIED}/0/outputs"
    for node in sorted(run_dir.glob(f"{run_folder.NODES}/*")):
        yield node, f"{run_folder.CARRIED}/{node.name}"


def _staged(run_dir: Path) -> Iterable[tuple[Path, str]]:
    """What is sent, and how it is called there."""
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
        shards = checkpoint.with_name(checkpoint.stem.replace("step-", "shards-"))  # of strategy=fsdp
        if shards.is_dir():
            yield shards, str(shards.relative_to(run_dir))


def _no_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


_NAMED = 4  # hosts in a line


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """``what`` is under way to ``hosts`` (labels), ``total_bytes`` to each of them, since ``began`` (monotonic
    seconds)."""

    what: str
    hosts: tuple[str, ...]
    total_bytes: int
    began: float

    @classmethod
    def begin(cls, what: str, hosts: Sequence[str], total_bytes: int) -> Transfer:
        return cls(what=what, hosts=tuple(hosts), total_bytes=total_bytes, began=time.monotonic())

    def text(self, arrived: Mapping[str, int], now: float) -> str:
        """Each host's part with its mean rate; of many hosts those that are furthest behind.

        Args:
            arrived: host → bytes that it has told to have.
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
