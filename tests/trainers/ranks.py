"""Real ranks over gloo that each call one function of a test module: quicker than torchrun, and any topology.

They are forked from a server process that has imported torch, and what DistributedDataParallel imports, once a test
process: importing them costs each rank 4 s.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from tests.trainers.tiny_runs import ROOT
from tests.waiting import HANG_S

_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["pytest", "trainers.training.session", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
)
_FOR_SERVER = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # read while it imports


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


def call_on_ranks(
    target: str,
    folder: Path,
    *,
    nnodes: int = 1,
    nproc: int = 2,
    groups: int = 1,
    fails: bool = False,
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
    _start_server()
    outputs = [folder / f"output of rank {rank}" for rank in range(nnodes * nproc)]
    ranks = []
    try:
        for rank, output in enumerate(outputs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % nproc), "GROUP_RANK": str(rank // nproc)}
            ranks.append(_SERVER.Process(target=_on_rank, args=(target, folder, {**environment, **place}, output)))
            ranks[-1].start()
        for process in ranks:
            process.join(HANG_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    printed = [output.read_text() for output in outputs]
    assert [process.exitcode != 0 for process in ranks] == [fails] * len(ranks), printed
    return printed


def next_port() -> None:
    """Let the next process group of this rank use a port of its own; one that an error left behind is gone then."""
    import torch.distributed as dist  # here: only ranks need it

    if dist.is_initialized():
        dist.destroy_process_group()
    port, _, rest = os.environ["TEST_PORTS"].partition(" ")
    os.environ["MASTER_PORT"], os.environ["TEST_PORTS"] = port, rest


def _start_server() -> None:
    """Where it doesn't run yet. It keeps the environment that it was started with."""
    from multiprocessing.forkserver import ensure_running

    before = {name: os.environ.get(name) for name in _FOR_SERVER}
    os.environ.update(_FOR_SERVER)
    try:
        ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _on_rank(target: str, folder: Path, environment: Mapping[str, str], output: Path) -> None:
    """In the rank: its place among the others, its output into a file, then the function. Never returns."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update({**environment, **_FOR_SERVER})
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
