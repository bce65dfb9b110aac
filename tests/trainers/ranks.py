"""Real ranks over gloo that each call one function of a test module: quicker than torchrun, and any topology."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.trainers.tiny_runs import ROOT


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


def call_on_ranks(target: str, folder: Path, *, nnodes: int = 1, nproc: int = 2, groups: int = 1) -> None:
    """``target`` is module:function, called with ``folder``. It may join a process group ``groups`` times, each
    time after ``next_port()``."""
    module, _, function = target.partition(":")
    code = f"from pathlib import Path; from {module} import {function}; {function}(Path({str(folder)!r}))"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_WORLD_SIZE": str(nnodes),
        "TEST_PORTS": " ".join(map(str, free_ports(groups))),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % nproc)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nnodes * nproc)
    ]
    try:
        outputs = [rank.communicate(timeout=150)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs


def next_port() -> None:
    """Let the next process group of this rank use a port of its own."""
    port, _, rest = os.environ["TEST_PORTS"].partition(" ")
    os.environ["MASTER_PORT"], os.environ["TEST_PORTS"] = port, rest
