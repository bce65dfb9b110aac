"""Who this rank is, its device, and what it does together with the others. RANK is read here only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from trainers.errors import TrainerError

_TIMEOUT = timedelta(minutes=10)  # for one collective; a peer that dies is noticed at once
_RENDEZVOUS_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of this process among all of them, as torchrun says (one rank without torchrun)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    nnodes: int = 1
    node_rank: int = 0


def read_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Read what torchrun put into the environment."""

    def number(name: str, default: int) -> int:
        return int(environment.get(name, default))

    world_size = number("WORLD_SIZE", 1)
    return Ranks(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        nnodes=number("GROUP_WORLD_SIZE", 1),
        node_rank=number("GROUP_RANK", 0),
    )


def choose_device(wanted: str, ranks: Ranks, *, gpus: int, host: str) -> tuple[torch.device, str]:
    """Device and backend of a rank on a host with ``gpus`` GPUs; ``wanted`` is auto, gloo or nccl.

    Raises:
        TrainerError: nccl without a GPU for every rank of the host.
    """
    if gpus == 0:
        if wanted == "nccl":
            raise TrainerError(f"strategy.backend=nccl, but host {host} has no GPU; use strategy.backend=auto")
        return torch.device("cpu"), "gloo"
    if wanted != "gloo" and ranks.local_world_size > gpus:
        raise TrainerError(
            f"nproc {ranks.local_world_size} > {gpus} GPUs on host {host}, and nccl takes one rank a GPU; "
            f"set cluster.nproc_per_node={gpus}, or strategy.backend=gloo to share GPUs"
        )
    backend = "gloo" if wanted == "gloo" else "nccl"
    return torch.device("cuda", ranks.local_rank % gpus), backend


@dataclass(frozen=True, kw_only=True)
class Node:
    """This rank, connected. With one rank there is no process group and every collective is the identity."""

    ranks: Ranks
    device: torch.device
    backend: str

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.ranks.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all ranks, in place."""
        if self.ranks.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of all ranks with those of rank 0."""
        self._together(list(tensors), average=False)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace the floating-point tensors of all ranks by their mean."""
        self._together([item for item in tensors if item.is_floating_point()], average=True)

    def gather(self, row: Tensor) -> Tensor:
        """The rows [n] of all ranks, as a table [world_size, n] on every rank."""
        if self.ranks.world_size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.ranks.world_size)]
        if row.numel():
            dist.all_gather(rows, row)
        return torch.stack(rows)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @torch.no_grad()
    def _together(self, tensors: list[Tensor], *, average: bool) -> None:
        """One collective for each dtype: a network has hundreds of small tensors."""
        if self.ranks.world_size == 1:
            return
        for dtype in sorted({item.dtype for item in tensors}, key=str):
            members = [item for item in tensors if item.dtype == dtype]
            flat = torch.cat([item.reshape(-1) for item in members])
            if average:
                dist.all_reduce(flat)
                flat /= self.ranks.world_size
            else:
                dist.broadcast(flat, src=0)
            offset = 0
            for item in members:
                item.copy_(flat[offset : offset + item.numel()].view(item.shape))
                offset += item.numel()


def connect(wanted_backend: str) -> Node:
    """Choose the device, join the process group (with more than one rank) and return this rank.

    Raises:
        TrainerError: the backend cannot work here, or the hosts have different kinds of devices.
    """
    ranks, host = read_ranks(), socket.gethostname()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device, backend = choose_device(wanted_backend, ranks, gpus=gpus, host=host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = True  # the same key must give the same weights
    if ranks.world_size > 1:
        _join(ranks, device, backend, host)
    return Node(ranks=ranks, device=device, backend=backend)


def _join(ranks: Ranks, device: torch.device, backend: str, host: str) -> None:
    store, _, _ = next(rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT))
    if ranks.rank == 0:
        store.set("paceline/device", device.type)
    first = store.get("paceline/device").decode()
    if first != device.type:  # ranks that wait for each other over different backends would hang
        raise TrainerError(
            f"rank {ranks.rank} on host {host} has device {device.type}, rank 0 has {first}: hosts with and "
            "without GPUs cannot train together; hide them with CUDA_VISIBLE_DEVICES='' in the cluster's env"
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=_TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
