"""Files of a sharded checkpoint: their names, and their way between hosts that share no folder."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.core.files import explained
from trainers.distributed.process_group import Node

_CHUNK_BYTES = 64 << 20


def folder_name(step: int) -> str:
    """The folder of the shards of a step, beside its step-*.pt."""
    return f"shards-{step:08d}"


def rank_files(folder: Path, rank: int) -> list[str]:
    """Names of the files in ``folder`` that this rank has written; rank 0 also what the shards hold."""
    own = sorted(path.name for path in folder.glob(f"__{rank}_*.distcp"))
    return [".metadata", *own] if rank == 0 else own


def of_all_ranks(value: Any, node: Node) -> list[Any]:
    """What every rank passes, by rank. As JSON: torch's exchange of objects unpickles what comes, and so runs what
    somebody on the network puts into it."""
    data = bytearray(json.dumps(value).encode())
    sizes = node.all_gather(torch.tensor([len(data)])).flatten().tolist()
    row = torch.zeros(max(sizes), dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    rows = node.all_gather(row)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def missing_files(folder: Path, node: Node) -> tuple[list[int], list[int]]:
    """The ranks whose ``folder`` isn't rank 0's, and the first of them on each host. Every rank calls it."""
    path = folder / of_all_ranks(f".seen-{secrets.token_hex(8)}", node)[0]
    if node.is_rank_zero:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    dist.barrier()
    found = of_all_ranks((path.exists(), node.ranks.local_rank), node)
    if node.is_rank_zero:
        path.unlink()
    far = [(rank, local_rank) for rank, (near, local_rank) in enumerate(found) if not near]
    return [rank for rank, _ in far], [rank for rank, local_rank in far if local_rank == 0]


def exchange(folder: Path, names: list[str], *, source: int, target: int, node: Node) -> None:
    """Copy files of ``folder`` from rank ``source`` to rank ``target`` in chunks; the others do nothing."""
    if node.ranks.rank == source:
        for name in names:
            _send(folder / name, target)
    elif node.ranks.rank == target:
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
