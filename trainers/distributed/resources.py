"""CPU cores and memory of a rank. The ranks of a node divide its cores, unless something else has bound them to cores;
freed memory is kept for the next step."""

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
_LARGEST_BYTES = 1 << 30  # larger blocks are returned to the system at once
_NEVER_BYTES = (1 << 31) - 1  # the heap's free end is returned only from this size on: never


def take_cores(ranks: Ranks) -> int:
    """Set the number of this process's threads, and bind it to its share of the cores. Call it before the first thread
    starts. Returns how many cores of that share stay idle.
    """
    cores = _usable_cores()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads.isdecimal() and int(threads) not in (0, torch.get_num_threads()):
        # torch itself takes at most one thread per core, and the number of cores must not change the results
        torch.set_num_threads(int(threads))
    own_cores = share(cores, ranks.local_rank, ranks.local_world_size)
    # more threads than cores, as the user may have set, need the freedom to move
    if own_cores and _is_unbound() and torch.get_num_threads() <= len(own_cores):
        os.sched_setaffinity(0, own_cores)
    return max(0, len(cores) // ranks.local_world_size - torch.get_num_threads())


def share(cores: list[int], local_rank: int, local_world_size: int) -> list[int]:
    """Return one rank's block of ``cores``; empty if the node has one rank, or fewer cores than ranks."""
    if local_world_size == 1 or len(cores) < local_world_size:
        return []
    size = len(cores) // local_world_size
    return cores[local_rank * size : (local_rank + 1) * size]


def _usable_cores() -> list[int]:
    """Return the CPU numbers that this process may use, hyperthreads of a core side by side; empty if unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=_core_position)


def _core_position(cpu: int) -> tuple[int, int, int]:
    """Return (socket, core, CPU number) of a CPU number; if the system doesn't say, as if it were a core of its own."""
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
    """Turn garbage collection on again, which ``trainers.entry`` has paused, and exclude the objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def keep_freed_memory() -> bool:
    """Let glibc's malloc keep freed blocks below 1 GiB for the next step; return False without glibc. By default each
    step maps, zeroes and unmaps the memory of every activation: 1,400 page faults, and 6 % of the time of a small
    network.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    mallopt(_M_ARENA_MAX, 1)  # one arena: the checkpoint writer's thread reuses memory that the training has freed
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES))
