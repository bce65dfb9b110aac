"""What is sent to a host behind a request: the run as a node needs it, data packs. Tars, written to a file."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from pipeline.cluster.launchers.base import PackSource
from pipeline.core import program as programs
from pipeline.core.specs import INITIAL_WEIGHTS, SCRIPT_OUTPUTS
from pipeline.runs import attempts


def append(stdin: IO[bytes], source: Path, name: str) -> None:
    """A tar of ``source`` under another name."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        archive.add(source, arcname=name)


def append_run(stdin: IO[bytes], run_dir: Path, pack: PackSource | None) -> None:
    """The run as a node needs it: code, config, what a later attempt resumes from, the pack where it is small."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        for path in _staged(run_dir):
            archive.add(path, arcname=str(path.relative_to(run_dir)), filter=_no_caches)
        if pack is not None:
            archive.add(pack.path, arcname="pack")


def weights_bytes(run_dir: Path) -> int:
    """Of the weights that the run starts from; 0 where they are fresh."""
    path = run_dir / INITIAL_WEIGHTS
    return path.stat().st_size if path.exists() else 0


def _staged(run_dir: Path) -> Iterable[Path]:
    yield run_dir / "code"
    yield run_dir / "config.json"
    yield run_dir / attempts.FILE
    if (run_dir / INITIAL_WEIGHTS).exists():
        yield run_dir / INITIAL_WEIGHTS
    if programs.of_run(run_dir).starts_torchrun:  # each rank of a script reads what it goes on from by itself
        yield from (run_dir / name for name in SCRIPT_OUTPUTS.resume if (run_dir / name).exists())
        return
    checkpoints = sorted((run_dir / "checkpoints").glob("step-*.pt"))[-1:]
    for checkpoint in checkpoints:
        yield from (checkpoint, checkpoint.with_suffix(".json"), run_dir / "metrics.jsonl")
        shards = checkpoint.with_name(checkpoint.stem.replace("step-", "shards-"))  # of strategy=fsdp
        if shards.is_dir():
            yield shards


def _no_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member
