"""Files of a sharded checkpoint: names, reading and writing, and transfer between hosts without a shared folder."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.core.files import explained, write_atomic
from trainers.distributed.process_group import RankContext

_CHUNK_BYTES = 64 << 20


def folder_name(step: int) -> str:
    """Return the folder with the shards of a step, next to its step-*.pt."""
    return f"shards-{step:08d}"


def file_name(rank: int) -> str:
    """Return the file with a rank's slices in that folder."""
    return f"rank-{rank:05d}.pt"


class Slice(NamedTuple):
    """A rank's rows of a tensor with ``rows`` rows in total, starting at row ``first``."""

    first: int
    rows: int
    local: Tensor


def write_slices(path: Path, content: Mapping[str, Slice], needed_bytes: int) -> str:
    """Write a rank's slices as numbers and tensors, which torch loads with weights_only. Returns the file's sha256.

    Raises:
        TrainerError: the folder is not writable or the disk is full.
    """
    with explained(path.parent, needed_bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
    held = {  # copied: for a view, torch.save would write the whole storage
        name: (item.first, item.rows, item.local.to("cpu", memory_format=torch.contiguous_format, copy=True))
        for name, item in content.items()
    }
    return write_atomic(path, lambda file: file.save(held), needed_bytes=needed_bytes)


def read_slices(paths: Sequence[Path], content: Mapping[str, Slice]) -> str | None:
    """Fill ``content`` from the files of all ranks that saved, whatever their number. Returns a misfit, or None."""
    left = {name: len(item.local) for name, item in content.items()}
    for path in paths:
        stored = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if stored.keys() != content.keys():
            return f"{path.name} differs in {', '.join(sorted(stored.keys() ^ content.keys())[:3])}"
        for name, (first, rows, part) in stored.items():
            own = content[name]
            # overlap of the stored rows and this rank's rows; start >= stop: none
            start, stop = max(first, own.first), min(first + len(part), own.first + len(own.local))
            if rows != own.rows or (start < stop and part.shape[1:] != own.local.shape[1:]):
                return f"{name} has {rows} rows of {[*part.shape[1:]]}, and here {own.rows} of {[*own.local.shape[1:]]}"
            if start < stop:
                own.local[start - own.first : stop - own.first] = part[start - first : stop - first]
                left[name] -= stop - start
    return next((f"{count} rows of {name} are missing" for name, count in left.items() if count), None)


def missing_files(folder: Path, context: RankContext) -> tuple[list[int], list[int]]:
    """Return the ranks that do not see rank 0's ``folder``, and those of them with local_rank 0.

    Every rank must call it.
    """
    path = folder / context.share(f".seen-{secrets.token_hex(8)}")[0]
    if context.is_rank_zero:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    dist.barrier()
    seen = context.share((path.exists(), context.ranks.local_rank))
    if context.is_rank_zero:
        path.unlink()
    far = [(rank, local_rank) for rank, (near, local_rank) in enumerate(seen) if not near]
    return [rank for rank, _ in far], [rank for rank, local_rank in far if local_rank == 0]


def exchange(folder: Path, names: list[str], *, source: int, target: int, context: RankContext) -> None:
    """Copy files of ``folder`` from rank ``source`` to rank ``target`` in chunks; other ranks do nothing."""
    if context.ranks.rank == source:
        for name in names:
            _send(folder / name, target)
    elif context.ranks.rank == target:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            _receive(folder / name, source)


def _send(path: Path, target: int) -> None:
    size_bytes = path.stat().st_size
    dist.send(torch.tensor([size_bytes]), target)
    with path.open("rb") as file:
        while block := file.read(_CHUNK_BYTES):
            dist.send(torch.frombuffer(bytearray(block), dtype=torch.uint8), target)


def _receive(path: Path, source: int) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    left = int(size)
    with explained(path, left), path.open("wb") as file:
        while left:
            block = torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8)
            dist.recv(block, source)
            file.write(block.numpy().tobytes())
            left -= block.numel()
