"""The settings of ``cluster`` that all launchers share (times and limits: core.specs), and the list of launchers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.core.errors import suggestion
from pipeline.core.options import Options
from pipeline.core.redact import hide
from pipeline.core.specs import Cluster, LaunchSettings
from trainers.core.config import ConfigError

MISSING: Any = "???"  # OmegaConf's own mark; importing OmegaConf takes 0.1 s, which the command of a finished run saves

POLICIES = ("auto", "refuse", "wait", "share")
"""The values of ``cluster.when_busy``."""
_AUTO, REFUSE, WAIT, SHARE = POLICIES
WHEN_BUSY_HINT = (
    "cluster.when_busy=wait waits until it is free, cluster.when_busy=share starts beside it; or other hosts"
)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """How a launcher differs from others, so that no code has to compare launchers' names.

    Attributes:
        shares_run_dir: nodes see the controller's run folder, so nothing is sent or collected.
        is_this_computer: its only host is this computer. It is configured without hosts, and this process knows the
            host's GPUs, cores and interpreter before the probe.
        hosts_are_granted: a batch scheduler chooses the hosts when an attempt starts, so its settings have ``nnodes``
            in place of ``hosts``.
        hostfile_of_mpi: in its hostfile ``host:4`` are slots, and a host may stand on several lines.
    """

    shares_run_dir: bool = False
    is_this_computer: bool = False
    hosts_are_granted: bool = False
    hostfile_of_mpi: bool = False


@dataclass(kw_only=True)
class HostConfig:
    """One entry of ``cluster.hosts``; what is null is taken from the cluster.

    Attributes:
        name: as ssh knows it.
        port: of its SSH server.
        user: to log in as.
        address: under which the other nodes reach it; null: that of its interface.
        interface: its network interface for the ranks; the address follows from it.
        nproc_per_node: its ranks.
        python: its interpreter.
        env: variables of its ranks, on top of cluster.env.
    """

    name: str = MISSING
    port: int | None = None
    user: str | None = None
    address: str | None = None
    interface: str | None = None
    nproc_per_node: int | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class ClusterConfig(LaunchSettings):
    """Which hosts, how many ranks on each, and how they are reached. Times in seconds.

    A launcher's module derives its own settings from this class.

    Attributes:
        launcher: how hosts are reached: local, pssh, mpi, slurm or kubernetes.
        hosts: the nodes, in the order of their ranks; rank 0 is on the first. A command line may give names alone:
            [node1,me@node2:2222]; a file has mappings: [{name: node1}].
        hostfile: replaces hosts: a file with one `user@host:port slots=N` a line.
        nnodes: how many of the hosts take part, the first ones; null: all of them. Of slurm and kubernetes: how many
            nodes a job has; default: 1.
        nproc_per_node: ranks of each host that names no number itself; auto (local alone): its GPUs, or 2 CPU ranks.
        ssh_config: an ssh_config file besides your own ~/.ssh/config.
        interface: network interface for the ranks, on every host; null: InfiniBand if all have it, else that of ssh.
        python: interpreter on the hosts; null: the controller's where it exists, else python3.
        env: variables of the ranks; they count in the key.
        container: image that the ranks run in: a name that podman or docker has on the hosts, or a .sif file for
            apptainer (on Slurm also .sqsh for pyxis). Its digest counts in the key. null: none.
        container_mounts: further folders of the hosts that the ranks' container sees, under the same paths.
        secrets: names in env that are secret although they don't look like it.
        environment: versions of distributions on the hosts, where they aren't the controller's: {torch: 2.9.1}; hosts:
            the hosts' own versions, which are probed before the key is made.
        device: cpu, cuda, or auto: this computer's GPUs where it is the host, else the CPU.
        spares: further hosts, as in hosts: one takes the place of a lost host when the run is restarted.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    launcher: str = "local"
    hosts: list[HostConfig] = field(default_factory=list)
    hostfile: str | None = None
    nnodes: int | None = None
    nproc_per_node: Any = "auto"  # OmegaConf 2.3 fails on int | str
    ssh_config: str | None = None
    interface: str | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    container: str | None = None
    container_mounts: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    environment: Any = field(default_factory=dict)  # OmegaConf 2.3 has no union of a mapping and a text
    device: str = "auto"
    spares: list[HostConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not least <= value < math.inf:  # an endless lease would keep a lost host busy
                raise ConfigError(f"cluster.{name}={value:g} must be a finite number from {least:g}")
        _check_option("device", self.device, ("auto", "cpu", "cuda"))
        _check_option("when_busy", self.when_busy, POLICIES)
        if self.workdir not in (None, "~"):
            _refuse_relative(self.workdir, f"cluster.workdir={self.workdir}")
        for path in self.container_mounts:
            _refuse_relative(path if path.isprintable() else "", f"cluster.container_mounts: {path!r}")
        if self.checkpoint_mirror is not None:
            _check_mirror(self.checkpoint_mirror)


_LEAST = {  # fields of LaunchSettings → their smallest values
    "connect_timeout_s": 0.1,
    "lease_s": 5.0,
    "collective_timeout_s": 1.0,
    "stall_s": 5.0,
    "checkpoint_fetch_s": 0.0,
    "max_restarts": 0,
    "restart_wait_s": 0.0,
    "min_nodes": 0,
}
_OTHERS_DEVICES = dict.fromkeys(("gpu", "gpus", "cuda:0"), "cuda")  # as other tools call them


def _check_option(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        meant = _OTHERS_DEVICES.get(value, value) if name == "device" else value
        raise ConfigError(f"cluster.{name}={value!r} is not an option; {suggestion(meant, options)}")


def _refuse_relative(path: str, shown: str) -> None:
    if not path.startswith(("/", "~/")):
        raise ConfigError(f"{shown} must be an absolute path on the hosts, or begin with ~/")


def _check_mirror(address: str) -> None:
    """Raise ConfigError for an address where no checkpoint lasts."""
    scheme, has_scheme, place = address.partition("://")
    lasts = bool(place.strip("/")) and scheme not in ("http", "https", "memory")
    if not (lasts if has_scheme else address.startswith("/")):
        raise ConfigError(
            f"cluster.checkpoint_mirror={hide(address)} must be an address that can be written to, such as "
            "s3://bucket/folder, or an absolute path"
        )


LAUNCHERS = Options("cluster.launcher", "pipeline.cluster.launchers", ClusterConfig)


def capabilities(cluster: Cluster) -> Capabilities:
    """Return the capabilities of the cluster's launcher without importing its module. Raises UsageError."""
    settings: type[ClusterConfig] = LAUNCHERS.settings(cluster.launcher)
    return settings.capabilities


def busy_policy(cluster: Cluster) -> str:
    """Return refuse, wait or share. By default GPUs aren't shared and processors are."""
    if cluster.settings.when_busy != _AUTO:
        return cluster.settings.when_busy
    return REFUSE if cluster.device == "cuda" else SHARE
