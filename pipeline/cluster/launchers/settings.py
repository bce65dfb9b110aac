"""What the section ``cluster`` holds, whichever launcher it names (standard library only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

MISSING: Any = "???"  # OmegaConf's own mark; importing it from there takes 0.1 s, which a finished run has no use for


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What is asked of a launcher, so that nobody has to ask which one it is.

    ``shares_run_dir``: nodes see the controller's run folder, so nothing is sent or collected. ``is_this_computer``:
    its only host is this computer, so it is configured without hosts, and what this process knows (GPUs, cores, the
    interpreter) is known of the host before it is asked.
    """

    shares_run_dir: bool = False
    is_this_computer: bool = False


@dataclass(kw_only=True)
class HostConfig:
    """One entry of ``cluster.hosts``; what is None is taken from the cluster."""

    name: str = MISSING
    port: int | None = None
    user: str | None = None
    address: str | None = None
    interface: str | None = None
    nproc_per_node: int | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ClusterConfig:
    """Which hosts, how many ranks on each, and how they are reached. Times in seconds.

    A launcher's module derives its settings from this class, and adds what it alone can be told.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    launcher: str = "local"
    hosts: list[HostConfig] = field(default_factory=list)
    hostfile: str | None = None  # replaces `hosts`: one `user@host:port slots=N` a line
    nproc_per_node: Any = "auto"  # int or auto (local only: GPUs, or 2 CPU ranks); OmegaConf 2.3 fails on int | str
    ssh_config: str | None = None  # an ssh_config file besides your own ~/.ssh/config
    interface: str | None = None  # network interface for the collectives, on every host
    python: str | None = None  # interpreter on the hosts; None: the controller's where it exists, else python3
    workdir: str | None = None  # scratch folder on the hosts; None: ~/.cache/paceline
    env: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)  # names in `env` that are secret though they don't sound so
    environment: dict[str, str] = field(default_factory=dict)  # versions on the hosts, where not the controller's
    device: str = "auto"  # cpu, cuda, or auto: this computer's GPUs where it is the host, else the CPU
    rendezvous: str = "static"  # how ranks find each other: static, c10d, or file (a folder that all hosts share)
    rendezvous_dir: str | None = None  # that folder
    connect_timeout_s: float = 5.0
    lease_s: float = 600.0  # a host ends its part of a run when the controller is gone for this long
    max_restarts: int = 0  # further attempts, from the last checkpoint, when a run fails
