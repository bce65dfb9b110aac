"""A real cluster on one machine: hosts in network namespaces, each with its own OpenSSH server.

``up`` raises the lab of a project folder, ``status`` looks at it, ``down`` removes what ``up`` made and
nothing else. ``cut``, ``restore`` and ``limit`` make the link faults that tests and benchmarks need.
docs/lab.md shows the layout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.core.errors import HostError, UsageError, os_reason
from pipeline.core.locks import try_lock
from pipeline.core.tables import counted
from pipeline.lab import host as lab_host
from pipeline.lab import network, state
from pipeline.lab.network import cut, limit, missing, restore
from pipeline.lab.state import Lab, LabHost

__all__ = ["Lab", "LabHost", "cut", "down", "limit", "missing", "restore", "status", "up"]

_MAX_HOSTS = 64
_LOCK_S = 60.0
_LOCK_POLL_S = 0.02


def up(root: Path, hosts: int) -> Lab:
    """Return the running lab of ``root`` with that many hosts: found, repaired, or made (about a second).

    A host whose ssh server died is started again with its files kept; a lab that was left by a crash
    or by a restart of the computer is removed and made anew.

    Raises:
        HostError: this computer can't run a lab, or a part of it did not come up.
        UsageError: a wrong number of hosts, or a lab with another number runs here.
    """
    root = _checked_root(root)
    if not 1 <= hosts <= _MAX_HOSTS:
        raise UsageError(f"lab: hosts={hosts} is out of range; valid: 1 to {_MAX_HOSTS}", hint="doit lab --hosts 2")
    with _lock():
        lab = state.load(root)
        if lab is not None and _usable(lab, root):
            if len(lab.hosts) != hosts:
                raise UsageError(
                    f"lab: a lab of {counted(len(lab.hosts), 'host')} runs here already, and not one of {hosts}",
                    hint=f"doit lab --down && doit lab --hosts {hosts}",
                )
            return _repaired(lab)
        _remove(root)
        return _make(root, hosts)


def down(root: Path) -> tuple[str, ...]:
    """Remove all that is left of the lab of ``root``, and return the names of what was removed."""
    with _lock():
        return _remove(_checked_root(root))


def status(root: Path) -> Lab | None:
    """Return the lab of ``root`` as it is now (``lab.running``: every ssh server lives); None: there is none."""
    return state.load(root.resolve())


def _checked_root(root: Path) -> Path:
    """Return the folder, resolved. Raises HostError: no lab can run there, or on this computer."""
    if (reason := missing()) is not None:
        raise reason
    root = root.resolve()
    refused = [sign for sign in ('"', "\\", "${", "\n") if sign in str(root)]
    if refused:
        raise HostError(
            f"lab: the folder {str(root)!r} has {refused[0]!r} in its path, which ssh_config can't quote",
            hint="move the project to a folder without it",
        )
    return root


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock of all lab operations in this network namespace. The kernel releases it when a process dies."""
    with Path("/proc/self/ns/net").open("rb") as file:
        deadline = time.monotonic() + _LOCK_S
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise HostError(f"lab: another `doit lab` has been at work for {_LOCK_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield


def _usable(lab: Lab, root: Path) -> bool:
    """Whether the lab was made completely, in this folder, and its namespaces exist."""
    expected = {lab.switch, *(host.namespace for host in lab.hosts)}
    return lab.root == root and lab.ssh_config.exists() and expected == set(network.namespaces(lab.id))


def _repaired(lab: Lab) -> Lab:
    for host in lab.hosts:
        network.restore(lab, host.name)
        if host.sshd_pid is None:
            lab_host.start(host)
    return _ready(lab)


def _make(root: Path, hosts: int) -> Lab:
    id_ = state.lab_id(root)
    try:
        state.folder(root).mkdir(exist_ok=True)
    except OSError as error:
        raise HostError(
            f"lab: its hosts' files can't lie in this project: {os_reason(error)}", hint="a clone that you can write to"
        ) from error
    state.journal(root, id_, hosts, network.free_subnet(id_))
    lab = state.load(root)
    assert lab is not None
    try:
        network.connect(lab)
        lab_host.write_files(lab)
        for host in lab.hosts:
            lab_host.start(host)
        return _ready(lab)
    except BaseException:
        _remove(root)
        raise


def _ready(lab: Lab) -> Lab:
    lab_host.wait_ready(lab)
    ready = state.load(lab.root)
    assert ready is not None
    return ready


def _remove(root: Path) -> tuple[str, ...]:
    lab = state.load(root)
    removed: list[str] = []
    for id_ in sorted({state.lab_id(root), *([lab.id] if lab else [])}):
        while ended := network.disconnect(id_):  # again: a killed `up` may have left a command at work
            removed += ended
    lab_host.remove_files(root)
    return tuple(removed)
