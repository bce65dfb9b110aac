"""The hosts that a run is configured for: the part of ``core.specs`` that a no-op needs (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node as the cluster configuration describes it; nothing of it was looked up yet.

    ``name`` is what ssh is called with, so aliases of ssh_config work. ``address`` is where the other
    nodes reach it (None: the address on which ssh reached it). ``interface`` names the network
    interface for the collectives (None: the one that holds ``address``). ``placement`` is environment that
    only says which part of the node is meant (its GPUs), so unlike ``env`` it is no part of a run's key;
    ``shared_by`` is how many runs share the node's cores. ``env`` has a placeholder for what is secret, ``secrets``
    those variables as the ranks get them: no file and no message may hold them.
    """

    name: str
    nproc_per_node: int = 1
    port: int | None = None
    user: str | None = None
    address: str | None = None
    interface: str | None = None
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, str] = field(default_factory=dict)
    shared_by: int = 1
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def label(self) -> str:
        """``user@name:port`` as far as it is set: unique in a cluster and good in messages."""
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{user}{self.name}{port}"


_OF_SHELLS = frozenset("'\"`;&<>|(){}")  # ssh refuses them too: a ProxyCommand gets the names through a shell
_OF_LISTS = frozenset("@/#[]")  # where pssh's host file splits, and what separates folders


def unfit_name(host: Host) -> str | None:
    """Why ssh and pssh can't be given the host's name or user, as words behind the value; None: they can."""
    for kind, text, also, longest in (("host", host.name, "$\\,", 253), ("user", host.user or "user", "", 64)):
        unfit = _OF_SHELLS | _OF_LISTS | {" ", *also}
        bad = [mark for mark in text if mark in unfit or not mark.isprintable()]
        if bad or not text or text.startswith("-"):
            why = f"it holds {bad[0]!r}" if bad else "it begins with '-'" if text else "it is empty"
            return f"is not a {kind} name that ssh can be given: {why}"
        if len(text) > longest:
            return f"is not a {kind} name that ssh can be given: it has {len(text)} characters, of at most {longest}"
    return None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Topology plus the few numbers that the launch depends on. Times in seconds.

    ``workdir`` is the scratch folder on the nodes (None: ``~/.cache/paceline``); ``ssh_config`` an
    extra ssh client configuration (None: the user's own). ``rendezvous`` is static or file (in
    ``rendezvous_dir``, absolute and the same folder on every host). ``environment`` are versions of Python
    and libraries that the hosts have where they aren't the controller's. ``device`` is cpu, cuda, or auto: the
    CPU, and a host with GPUs is refused, since the key couldn't know of them. ``tls_certificate``, ``tls_key`` and
    ``tls_ca`` are files on the hosts with which gloo encrypts (None: it doesn't). ``settings`` is the whole section,
    as the launcher's own settings class. ``spares`` take the places of hosts that
    are gone; where none is left, ``min_nodes`` of the others may be enough (0: they aren't).
    With ``warm`` ranks are forks of a process that has imported torch.
    ``when_busy`` is refuse, wait, share, or auto: refuse on GPUs, else share.
    ``checkpoint_mirror`` is an address to which checkpoints are copied (None: to none).
    """

    launcher: str
    hosts: tuple[Host, ...]
    ssh_config: str | None = None
    workdir: str | None = None
    connect_timeout_s: float = 20.0
    lease_s: float = 600.0
    collective_timeout_s: float = 600.0
    stall_s: float = 300.0
    max_restarts: int = 0
    restart_wait_s: float = 300.0
    rendezvous: str = "static"
    rendezvous_dir: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    settings: Any = None
    spares: tuple[Host, ...] = ()
    min_nodes: int = 0
    checkpoint_fetch_s: float = 60.0
    when_busy: str = "auto"
    warm: bool = True
    checkpoint_mirror: str | None = None

    @property
    def nnodes(self) -> int:
        return len(self.hosts)

    @property
    def with_spares(self) -> Cluster:
        """The same with the spares behind its hosts, for what is asked of all of them or brought to all of them."""
        return replace(self, hosts=(*self.hosts, *self.spares), spares=())

    @property
    def world_size(self) -> int:
        return sum(host.nproc_per_node for host in self.hosts)

    @property
    def python_path(self) -> tuple[str, ...]:
        """The folders that ``env`` of the hosts puts on PYTHONPATH; relative ones are of the project."""
        entries = [entry for host in self.hosts for entry in host.env.get("PYTHONPATH", "").split(":")]
        return tuple(dict.fromkeys(entry for entry in entries if entry))
