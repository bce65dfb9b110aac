"""Real ranks over gloo that each call one function of a test module: quicker than torchrun, and any topology.

They are forked from a process that has imported torch, and what DistributedDataParallel imports, once for all workers:
importing them costs each rank 4 s.
"""

from __future__ import annotations

import importlib
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.integration.light import forking_python
from tests.stand_ins.forked_ranks import ForkedRank, address
from tests.trainers.tiny_runs import ROOT
from tests.waiting import wait_until

_IMPORTED = (
    "pytest", "trainers.training.session", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint",
)  # fmt: skip
_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


_PORTS = range(12000, 30000)  # below those that systems give to connections: nobody gets one before a rank binds it


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port, item = random.choice(_PORTS), stack.enter_context(socket.socket())
            with suppress(OSError):
                item.bind(("127.0.0.1", port))
                found.append(port)
    return found


def call_on_ranks(
    target: str, folder: Path, *, nnodes: int = 1, nproc: int = 2, groups: int = 1, fails: bool = False
) -> list[str]:
    """``target`` is module:function, called with ``folder``. It may join a process group ``groups`` times, each
    time after ``next_port()``. Returns what each rank printed, stdout and stderr together.

    Every rank must end well; with ``fails`` none may.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_WORLD_SIZE": str(nnodes),
        "TEST_PORTS": " ".join(map(str, free_ports(groups))),
    }
    python = Path(forking_python(*_IMPORTED))
    prefix = str(python.parents[1])
    wait_until(Path(address(prefix)).exists)
    outputs = [str(folder / f"output of rank {rank}") for rank in range(nnodes * nproc)]
    ranks: list[ForkedRank] = []
    try:
        for rank, output in enumerate(outputs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % nproc), "GROUP_RANK": str(rank // nproc)}
            env = {**os.environ, **environment, **_ENVIRONMENT, **place}
            ranks.append(ForkedRank(["-m", __name__, target, str(folder)], env, output, output, prefix))
        wait_until(lambda: _have_ended(ranks, fails))
    finally:
        for started in ranks:
            started.kill()
    printed = [Path(output).read_text() for output in outputs]
    assert [rank.returncode != 0 for rank in ranks] == [fails] * len(ranks), printed
    return printed


def _have_ended(ranks: Sequence[ForkedRank], fails: bool) -> bool:
    """All of them, or one badly where none may: the others would wait for it in vain."""
    codes = [rank.poll() for rank in ranks]
    return None not in codes or (not fails and any(codes))


def next_port() -> None:
    """Let the next process group of this rank use a port of its own; one that an error left behind is gone then."""
    import torch.distributed as dist  # here: only ranks need it

    if dist.is_initialized():
        time.sleep(0.1)  # until gloo's threads hold the group no more: the last one to hold it would abort
        dist.destroy_process_group()
    port, _, rest = os.environ["TEST_PORTS"].partition(" ")
    os.environ["MASTER_PORT"], os.environ["TEST_PORTS"] = port, rest


def _on_this_rank(target: str, folder: Path) -> None:
    """The function, and the exit code that it deserves. Never returns."""
    code = 1
    try:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(folder)
        code = 0
    except BaseException:  # a SystemExit too: the test is shown where it came from
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # unloading torch takes half a second


if __name__ == "__main__":
    _on_this_rank(sys.argv[1], Path(sys.argv[2]))
