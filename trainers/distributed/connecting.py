"""Choose this rank's device and backend, and join the process group; NCCL's log and torch's record of collectives."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from trainers.contract import variables
from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks, read_ranks

_TIMEOUT_S = 600.0  # of one collective, unless the cluster sets another; a peer that dies is noticed at once
_RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
_NETWORK = re.compile(r"NCCL INFO .*?Using network (\S+)")
_SOCKETS = re.compile(r"NET/Socket : Using (.+)")
_REASON = re.compile(r"NET/IB ?: (No device found|No IP interface found|Unable to [^\n]*)|NCCL WARN (.*ibv_[^\n]*)")
_VARIABLES = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": FLIGHT_PIPE, "TORCH_FR_DUMP_TEMP_FILE": FLIGHT_DUMP}
"""Variable → start of the file name; torch appends the rank, and .pipe to the first."""


def choose_device(wanted: str, ranks: Ranks, *, gpus: int, host: str) -> tuple[torch.device, str]:
    """Choose device and backend of a rank on a host with ``gpus`` GPUs; ``wanted`` is auto, gloo or nccl.

    Raises:
        TrainerError: nccl without a GPU for every rank of the host.
    """
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
    """Choose the device, join the process group (with more than one rank) and return this rank.

    Raises:
        TrainerError: the backend cannot work here, or the hosts have different kinds of devices.
    """
    ranks, host = read_ranks(), socket.gethostname()
    gpus = usable_gpus(os.environ.get(variables.DEVICE), host)
    device, backend = choose_device(wanted_backend, ranks, gpus=gpus, host=host)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _join(ranks, device, backend, host) if ranks.world_size > 1 else None
    return RankContext(ranks=ranks, device=device, backend=backend, store=store)


def usable_gpus(kind: str | None, host: str) -> int:
    """Return the number of GPUs to choose from; ``kind`` is the device that the run key names, or None.

    Raises:
        TrainerError: the key says cuda, and torch can't use a GPU here.
    """
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
    """Configure torch's flight recorder before the process group is created. A user's own settings are kept.

    It keeps the newest collectives in memory, and writes them to a file when the node agent writes a line into a named
    pipe (torch's "Flight Recorder for Debugging Stuck Jobs").
    """
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or any(name in environment for name in (*_VARIABLES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        return
    for variable, name in _VARIABLES.items():
        environment[variable] = str(Path(error_file).with_name(name))


def nccl_fallback(text: str) -> str | None:
    """Describe that NCCL uses sockets, which ones and why, as far as known; None if it uses another network.

    Args:
        text: NCCL's log at NCCL_DEBUG=INFO with the subsystem NET or INIT.
    """
    networks = _NETWORK.findall(text)
    if not networks or networks[-1] != "Socket":
        return None
    over = _SOCKETS.findall(text)
    reason = _REASON.search(text)
    where = f" ({over[-1].strip()})" if over else ""
    why = f": {reason[0].strip()}" if reason else ""
    return f"NCCL sends over sockets{where}{why}"


def nccl_warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if NCCL was given InfiniBand ports and uses sockets. Call it when the process group is up."""
    ports, place = environment.get("NCCL_IB_HCA"), environment.get("NCCL_DEBUG_FILE")
    if ports is None or place is None or environment.get("NCCL_IB_DISABLE") == "1":
        return None
    path = place.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
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
