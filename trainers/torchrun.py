"""The program that the agent starts on each node in place of torchrun: ``python trainers/torchrun.py OPTIONS…``. A fork
of the warm parent (``trainers.ranks``) calls ``main`` instead.

It differs from torchrun in the rendezvous store, to which anybody who reaches it can write without a login. torch's own
store listens on all interfaces; here it is opened at the run's address alone, and torchrun uses a store that its
process already has at the port (``multi_tenant``). The program is started by its path, so that no module of the working
directory can replace it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module

# The folder of a file that is run by its path comes first on the import path: torch must not be looked for there.
if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:  # noqa: PTH100, PTH120
    del sys.path[0]

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch

_BACKLOG = 4096
_AWAIT_S, _AWAIT_TRY_S, _AWAIT_AGAIN_S = 5.0, 1.0, 0.02  # limit in all, limit of one connection, pause between two
_JOIN = timedelta(minutes=10)  # torchrun's own limit for the other hosts to join
_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With 1, torch counts GPUs by NVML. Forks of a process that has initialised CUDA's runtime can't use a GPU (torch's
multiprocessing notes)."""


def main(*, show_as: Callable[[list[str]], None] | None = None) -> None:
    """Do the work of torchrun, as the command line says. ``show_as`` is given in a fork of the warm parent, which has
    imported torch: the ranks become forks, too, and ``show_as`` sets the command that ``ps`` shows for one. None:
    torchrun starts the ranks as programs.
    """
    options = torchrun.parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    if show_as is not None:
        nvml_before = os.environ.get(_COUNT_BY_NVML)
        os.environ[_COUNT_BY_NVML] = "1"  # torchrun counts GPUs, too
        if forks_lose_gpus():
            _restore_variable(nvml_before)
            # start again as a program: the ranks of an ordinary torchrun are no forks
            os.execv(sys.executable, [sys.executable, *sys.argv])
    # the first node opens the store, the others wait for it
    store = listen(options.master_addr, options.master_port) if options.node_rank == 0 else None
    if store is not None:
        options.master_port = store.port  # for port 0, the system has chosen one
    if options.node_rank > 0:
        await_listener(options.master_addr, options.master_port)
    if show_as is None:
        port = f"--master-port={options.master_port}"
        torchrun.main([port if word == "--master-port=0" else word for word in sys.argv[1:]])
        return
    config, _, _ = torchrun.config_from_args(options)
    config.start_method = "fork"
    torchrun_pid = os.getpid()

    def rank(module: str, arguments: Sequence[str]) -> None:
        _restore_variable(nvml_before)
        show_as([sys.executable, "-m", module, *arguments])
        run_rank(module, arguments)
        # When this function returns, torch makes the rank wait until torchrun has read its result: for ever, if
        # torchrun was killed. torch has asked the system for SIGINT when torchrun ends, so let SIGINT end the rank.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if os.getppid() != torchrun_pid:  # torchrun has ended already
            sys.stdout.flush()
            os._exit(0)

    @record  # as torchrun's own main
    def launch() -> None:
        elastic_launch(config, rank)(options.training_script, options.training_script_args)

    launch()


def forks_lose_gpus() -> bool:
    """Return True if there are GPUs that no fork could use, because something here has initialised CUDA's runtime."""
    if not torch.cuda.is_available():
        return False
    pid = os.fork()  # torch notices it only in a fork
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(pid, 0)[1] != 0


def _restore_variable(value: str | None) -> None:
    if value is None:
        del os.environ[_COUNT_BY_NVML]
    else:
        os.environ[_COUNT_BY_NVML] = value


def run_rank(module: str, arguments: Sequence[str]) -> None:
    """Do the work of ``python -m MODULE ARGUMENTS`` in a fork that is a rank."""
    for number in (signal.SIGTERM, signal.SIGQUIT):  # the fork has inherited torchrun's handlers, which end its ranks
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # the node agent starts every rank with these ignored
        signal.signal(number, signal.SIG_IGN)
    entry = import_module(module)
    sys.argv[:] = [str(entry.__file__), *arguments]
    sys.modules["__main__"] = entry  # spawned processes of data loaders import it
    entry.main()


def await_listener(address: str, port: int) -> None:
    """Wait up to ``_AWAIT_S`` until something listens there. If nothing does, torch's own attempts follow. It saves
    time: torch's next attempt comes only half a second after a failed one.
    """
    until = time.monotonic() + _AWAIT_S
    while time.monotonic() < until:
        try:
            socket.create_connection((address, port), _AWAIT_TRY_S).close()
        except OSError:  # also a name that can't be resolved, and a timeout: torch reports them later
            time.sleep(_AWAIT_AGAIN_S)
        else:
            return


def listen(address: str, port: int) -> TCPStore | None:
    """Return a store that listens at this address alone; None: the address isn't here. Raises OSError: port taken."""
    try:
        listener = bound_socket(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # torch would fail, too
            raise
        print(
            f"paceline: can't listen at {address} alone ({error.strerror}): the store in which the ranks meet listens "
            "on all interfaces of this host",
            file=sys.stderr,
            flush=True,
        )
        return None
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=_JOIN,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens at the address. A name means its first IPv4 address, else its first IPv6 one, as for
    gloo. Raises OSError.
    """
    candidates = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, socket_address = min(candidates, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    main()
