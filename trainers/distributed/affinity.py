"""Which cores a rank computes on: the ranks of a node share those they were given, each taking its own.

Left as it is where somebody has decided: a launcher that bound each rank, a variable that binds threads, or more
threads than there are cores to a rank. macOS has no such call, and is left alone too.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainers.distributed.ranks import Ranks

_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def take_cores(ranks: Ranks) -> int:
    """Bind this process and choose its number of threads: OMP_NUM_THREADS, which the plan sets, else one. Call it
    before the first of them starts: only threads that begin later stay on these cores.

    Returns:
        How many cores of this rank's share its threads leave idle.
    """
    given = _given()
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if threads.isdecimal() and int(threads) not in (0, torch.get_num_threads()):
        torch.set_num_threads(int(threads))  # torch takes no more than there are cores, which must not decide
    mine = share(given, ranks.local_rank, ranks.local_world_size)
    if mine and _undecided() and torch.get_num_threads() <= len(mine):
        os.sched_setaffinity(0, mine)
    return max(0, len(given) // ranks.local_world_size - torch.get_num_threads())


def share(cores: list[int], local_rank: int, local_world_size: int) -> list[int]:
    """Neighbours out of ``cores`` for one rank; empty where there is nothing to share out, or not one for each."""
    if local_world_size == 1 or len(cores) < local_world_size:
        return []
    size = len(cores) // local_world_size
    return cores[local_rank * size : (local_rank + 1) * size]


def _given() -> list[int]:
    """The cores this process may use, threads of one core beside each other. Empty: the system doesn't say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=_place)


def _place(cpu: int) -> tuple[int, int, int]:
    """Socket and core of a CPU number, as far as the system tells."""
    topology = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), cpu
    except (OSError, ValueError):
        return 0, cpu, cpu


def _undecided() -> bool:
    """Whether nobody bound this rank: no variable says so, and it may use what its launcher may."""
    if any(name in os.environ for name in _BINDING):
        return False
    try:
        return os.sched_getaffinity(os.getppid()) == os.sched_getaffinity(0)
    except OSError:  # the parent is gone, or belongs to somebody else
        return False
