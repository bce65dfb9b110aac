"""CPU cores and memory of a rank: the ranks of a node divide its cores, unless something else binds them."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from trainers.distributed.ranks import Ranks

_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST_BYTES = 1 << 30
_NEVER_BYTES = (1 << 31) - 1


def take_cores(ranks: Ranks) -> int:
    """Set this process's threads, bind it to its cores before the first starts; return how many cores stay idle."""
    cores = _given()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads.isdecimal() and int(threads) not in (0, torch.get_num_threads()):
        # torch itself takes at most one thread per core, and the number of cores must not change the results
        torch.set_num_threads(int(threads))
    own_cores = share(cores, ranks.local_rank, ranks.local_world_size)
    if own_cores and _is_unbound() and torch.get_num_threads() <= len(own_cores):
        os.sched_setaffinity(0, own_cores)
    return max(0, len(cores) // ranks.local_world_size - torch.get_num_threads())


def share(cores: list[int], local_rank: int, local_world_size: int) -> list[int]:
    """Return one rank's block of ``cores``; empty if the node has one rank, or fewer cores than ranks."""
    if local_world_size == 1 or len(cores) < local_world_size:
        return []
    size = len(cores) // local_world_size
    return cores[local_rank * size : (local_rank + 1) * size]


def _given() -> list[int]:
    """Return the cores that this process may use, hyperthreads of a core next to each other; empty if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=_place)


def _place(cpu: int) -> tuple[int, int, int]:
    """Return (socket, core, cpu) of a CPU number, as far as the system knows."""
    topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), cpu
    except (OSError, ValueError):
        return 0, cpu, cpu


def _is_unbound() -> bool:
    """Return True if nothing bound this rank: no variable is set, and it may use the same cores as its launcher."""
    if any(name in os.environ for name in _BINDING):
        return False
    try:
        return os.sched_getaffinity(os.getppid()) == os.sched_getaffinity(0)
    except OSError:  # the parent is gone, or belongs to another user
        return False


def resume_garbage_collection() -> None:
    """Turn collection on again, which the start of a rank paused, and exclude the objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep blocks below 1 GiB; False without glibc.

    By default each step maps, zeroes and unmaps every activation: 1,400 page faults, 6 % of the time for a small
    network.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    mallopt(_M_ARENA_MAX, 1)  # one arena: the checkpoint writer's thread reuses memory that the training has freed
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES))
