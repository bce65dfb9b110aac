"""The process group: ``connect`` chooses this rank's device and backend and joins it, and ``RankContext`` has the
collectives. The functions on NCCL's log at the end tell whether it uses InfiniBand."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from trainers.contract import variables
from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE
from trainers.core.errors import TrainerError
from trainers.distributed.heartbeat import HEARTBEAT
from trainers.distributed.ranks import Ranks, read_ranks

_POLL_S = 0.01
_CHUNK_ELEMENTS = 1 << 20  # elements of one message to or from rank 0
_TIMEOUT_S = 600.0  # of one collective, unless the cluster sets another; a peer that dies is noticed at once
_RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
_NETWORK = re.compile(r"NCCL INFO .*?Using network (\S+)")
_SOCKETS = re.compile(r"NET/Socket : Using (.+)")
_REASON = re.compile(r"NET/IB ?: (No device found|No IP interface found|Unable to [^\n]*)|NCCL WARN (.*ibv_[^\n]*)")
_VARIABLES = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": FLIGHT_PIPE, "TORCH_FR_DUMP_TEMP_FILE": FLIGHT_DUMP}
"""Variables of torch's flight recorder → start of the file name; torch appends the rank, and .pipe to the first."""


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """This rank, connected to the others. With one rank there is no process group, and collectives change nothing.
    ``HEARTBEAT.collective()`` shows the node agent that this rank waits for others.
    """

    ranks: Ranks
    device: torch.device
    backend: str
    store: Store | None = field(default=None, compare=False)  # the rendezvous store; None with one rank

    @property
    def is_rank_zero(self) -> bool:
        """True for rank 0, which writes the files."""
        return self.ranks.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all ranks, in place."""
        if self.ranks.world_size > 1:
            with HEARTBEAT.collective():
                dist.all_reduce(tensor)
        return tensor

    def read(self, tensor: Tensor) -> Any:
        """Return a collective's result as Python numbers; on a GPU, this is where the rank waits for the collective."""
        if self.ranks.world_size == 1:
            return tensor.tolist()
        with HEARTBEAT.collective():
            return tensor.tolist()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace the tensors by rank 0's, in place."""
        self._broadcast_or_average(list(tensors), average=False)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace the floating-point tensors by their mean over all ranks, in place."""
        self._broadcast_or_average([item for item in tensors if item.is_floating_point()], average=True)

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest of all ranks' values, on every rank."""
        least = torch.tensor(value, dtype=torch.int64, device=self.device)
        if self.ranks.world_size > 1:
            with HEARTBEAT.collective():
                dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(self.read(least))

    def gather(self, row: Tensor) -> Tensor | None:
        """Return the rows [n] of all ranks as a table [world_size, n] on the CPU of rank 0, None elsewhere."""
        if self.ranks.world_size == 1 or not row.numel():
            return row.cpu().expand(self.ranks.world_size, -1).clone() if self.is_rank_zero else None
        table = torch.empty(self.ranks.world_size, row.numel(), dtype=row.dtype) if self.is_rank_zero else None
        for start in range(0, row.numel(), _CHUNK_ELEMENTS):
            chunk = row[start : start + _CHUNK_ELEMENTS]
            received = [torch.empty_like(chunk) for _ in range(self.ranks.world_size)] if self.is_rank_zero else None
            with HEARTBEAT.collective():
                dist.gather(chunk, received, dst=0)
            if table is not None and received is not None:
                table[:, start : start + chunk.numel()] = torch.stack(received).cpu()
        return table

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Return the bytes of each rank, without trailing zeros, on rank 0; None elsewhere."""
        # rows of equal length: the longest of all ranks, as −min(−length)
        row = torch.zeros(-self.all_reduce_min(-len(data)), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else row[:0]
        table = self.gather(row.to(self.device))
        return None if table is None else [bytes(item.tolist()).rstrip(b"\0") for item in table]

    def all_gather(self, row: Tensor) -> Tensor:
        """Return the rows [n] of all ranks as a table [world_size, n], on every rank."""
        if self.ranks.world_size == 1:
            return row.unsqueeze(0)
        table = row.new_empty(self.ranks.world_size, row.numel())
        dist.all_gather([*table.unbind()], row)
        return table

    def share(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank. They travel as JSON: all_gather_object would unpickle code."""
        data = bytearray(json.dumps(value).encode())
        sizes = self.all_gather(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        row = torch.zeros(max(sizes), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        rows = self.all_gather(row.to(self.device)).tolist()
        return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]

    def scatter(self, table: Tensor | None, row: Tensor) -> Tensor:
        """Copy each rank's row of rank 0's table [world_size, n] into ``row`` [n]; the inverse of ``gather``."""
        if self.ranks.world_size == 1 or not row.numel():
            return row if table is None else row.copy_(table[0])
        for start in range(0, row.numel(), _CHUNK_ELEMENTS):
            chunk = row[start : start + _CHUNK_ELEMENTS]
            stop = start + chunk.numel()
            sent = None if table is None else [part.contiguous() for part in table[:, start:stop].to(self.device)]
            with HEARTBEAT.collective():
                dist.scatter(chunk, sent, src=0)
        return row

    def wait_for_all(self, what: str) -> None:
        """Wait until every rank has called this with ``what``, a name for one use. No collective, so no timeout."""
        if self.store is None:
            return
        self.store.set(f"paceline/{what}/{self.ranks.rank}", "")
        with HEARTBEAT.collective():
            while not self.store.check([f"paceline/{what}/{rank}" for rank in range(self.ranks.world_size)]):
                time.sleep(_POLL_S)

    def __enter__(self) -> RankContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the process group, unless an error ends the process."""
        # After an error, tearing the group down could block for ever, as the other ranks may never join a collective
        # that this rank has begun. They notice the error when this process ends.
        if error is None:
            self.close()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @torch.no_grad()
    def _broadcast_or_average(self, tensors: list[Tensor], *, average: bool) -> None:
        """Broadcast or average in batches: one by one is slow, and all at once needs a second copy of the network."""
        if self.ranks.world_size == 1:
            return
        for members in _batches(tensors):
            flat = torch.cat([item.reshape(-1) for item in members])
            with HEARTBEAT.collective():
                if average:
                    dist.all_reduce(flat)
                    flat /= self.ranks.world_size
                else:
                    dist.broadcast(flat, src=0)
            offset = 0
            for item in members:
                item.copy_(flat[offset : offset + item.numel()].view(item.shape))
                offset += item.numel()


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device into batches of at most _CHUNK_ELEMENTS, or one larger tensor."""
    kinds: dict[tuple[str, str], list[Tensor]] = {}
    for item in tensors:
        kinds.setdefault((str(item.dtype), item.device.type), []).append(item)
    for kind in sorted(kinds):
        batch: list[Tensor] = []
        for item in kinds[kind]:
            if batch and sum(one.numel() for one in batch) + item.numel() > _CHUNK_ELEMENTS:
                yield batch
                batch = []
            batch.append(item)
        yield batch


def choose_device(wanted: str, ranks: Ranks, *, gpus: int, host: str) -> tuple[torch.device, str]:
    """Choose device and backend of a rank. Raises TrainerError: nccl without a GPU for each rank."""
    if gpus == 0:
        if wanted == "nccl":
            raise TrainerError(f"strategy.backend=nccl, but host {host} has no GPU; use strategy.backend=auto")
        return torch.device("cpu"), "gloo"
    if wanted in ("auto", "nccl") and ranks.local_world_size > gpus:
        raise TrainerError(
            f"nproc {ranks.local_world_size} > {gpus} GPUs on host {host}, and nccl takes one rank a GPU; "
            f"set cluster.nproc_per_node={gpus}, or strategy.backend=gloo to share GPUs"
        )
    backend = "nccl" if wanted == "auto" else wanted
    return torch.device("cuda", ranks.local_rank % gpus), backend


def connect(wanted_backend: str) -> RankContext:
    """Choose the device, join the process group and return this rank. Raises TrainerError."""
    ranks, host = read_ranks(), socket.gethostname()
    gpus = usable_gpus(os.environ.get(variables.DEVICE), host)
    device, backend = choose_device(wanted_backend, ranks, gpus=gpus, host=host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _join(ranks, device, backend, host) if ranks.world_size > 1 else None
    return RankContext(ranks=ranks, device=device, backend=backend, store=store)


def usable_gpus(kind: str | None, host: str) -> int:
    """Return the number of GPUs to choose from. Raises TrainerError: none, and the key's ``kind`` is cuda."""
    gpus = torch.cuda.device_count() if kind != "cpu" and torch.cuda.is_available() else 0
    if kind == "cuda" and gpus == 0:
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
        raise TrainerError(
            f"the run's key says cuda, but torch {torch.__version__} on host {host} sees no GPU; it {built}: fix the "
            "driver or torch there, or take cluster.device=cpu"
        )
    return gpus


def _join(ranks: Ranks, device: torch.device, backend: str, host: str) -> Store:
    store: Store
    store, _, _ = next(rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT))
    if ranks.rank == 0:
        store.set("paceline/device", device.type)
    first = store.get("paceline/device").decode()
    if first != device.type:  # ranks with different backends would wait for each other for ever
        raise TrainerError(
            f"rank {ranks.rank} on host {host} has device {device.type}, rank 0 has {first}: hosts with and "
            "without GPUs cannot train together; hide them with CUDA_VISIBLE_DEVICES='' in the cluster's env"
        )
    record_flights()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=float(os.environ.get(variables.COLLECTIVE_TIMEOUT_S, _TIMEOUT_S))),
        device_id=device if backend == "nccl" else None,
    )
    return store


def record_flights(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's flight recorder keep collectives, and write them if the agent asks; a user's settings stay."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or any(name in environment for name in (*_VARIABLES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        return
    for variable, name in _VARIABLES.items():
        environment[variable] = str(Path(error_file).with_name(name))


def nccl_fallback(text: str) -> str | None:
    """Describe that NCCL uses sockets, and why; None if it doesn't. ``text``: NCCL's log at level INFO."""
    networks = _NETWORK.findall(text)
    if not networks or networks[-1] != "Socket":
        return None
    interfaces = _SOCKETS.findall(text)
    reason = _REASON.search(text)
    where = f" ({interfaces[-1].strip()})" if interfaces else ""
    why = f": {reason[0].strip()}" if reason else ""
    return f"NCCL sends over sockets{where}{why}"


def nccl_warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if NCCL was given InfiniBand ports but uses sockets. Call it after NCCL's first collective."""
    ports, log = environment.get("NCCL_IB_HCA"), environment.get("NCCL_DEBUG_FILE")
    if ports is None or log is None or environment.get("NCCL_IB_DISABLE") == "1":
        return None
    path = log.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    text = ""
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    reason = nccl_fallback(text)
    if reason is None:
        return None
    return (
        f"warning: {reason}, though this host has InfiniBand ({ports.lstrip('=')}), so gradients travel slowly; see "
        "that /dev/infiniband is there and readable, and `ulimit -l` says unlimited (in a container too), or say that "
        "it is meant so: cluster.env.NCCL_IB_DISABLE=1"
    )
