"""The settings of ``cluster`` that all launchers share, the list of launchers, and the container of the ranks.

Settings for times and limits are in ``core/specs.py`` (LaunchSettings). The container is started by a host's agent
(agent/host/container.py), but on Slurm by srun, and then the agent itself runs in it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster.agent.requests import RequestedContainer
from pipeline.core import places
from pipeline.core.cache import Cache
from pipeline.core.errors import UsageError, os_reason, suggestion
from pipeline.core.files import sha256_file
from pipeline.core.options import Options
from pipeline.core.redact import hide
from pipeline.core.specs import Cluster, LaunchSettings
from trainers.contract.host_facts import Container, HostFacts
from trainers.core.config import ConfigError

MISSING: Any = "???"  # OmegaConf's own mark; importing OmegaConf takes 0.1 s, which the command of a finished run saves

POLICIES = ("auto", "refuse", "wait", "share")
"""The values of ``cluster.when_busy``: what to do if others use a host."""
_AUTO, REFUSE, WAIT, SHARE = POLICIES
WHEN_BUSY_HINT = (
    "cluster.when_busy=wait waits until it is free, cluster.when_busy=share starts beside it; or other hosts"
)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """How a launcher differs from others, so that no code has to compare launchers' names."""

    shares_run_dir: bool = False  # nodes see the controller's run folder, so nothing is sent or collected
    # its only host is this computer: configured without hosts; GPUs, cores and interpreter are known before the probe
    is_this_computer: bool = False
    # a batch scheduler chooses the hosts when an attempt starts, so its settings have ``nnodes`` in place of ``hosts``
    hosts_are_granted: bool = False
    hostfile_of_mpi: bool = False  # in its hostfile ``host:4`` means four slots (ranks), a host may have several lines


@dataclass(kw_only=True)
class HostConfig:
    """One entry of ``cluster.hosts``; what is null is taken from the cluster.

    Attributes:
        name: as ssh knows it.
        port: of its SSH server.
        user: to log in as.
        address: under which the other nodes reach it; null: that of its interface.
        interface: its network interface for the ranks; the address follows from it.
        nproc_per_node: how many ranks it has.
        python: its interpreter.
        env: variables of its ranks, in addition to cluster.env.
    """

    name: str = MISSING
    port: int | None = None
    user: str | None = None
    address: str | None = None
    interface: str | None = None
    nproc_per_node: int | None = None
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


HOST_FIELDS = tuple(item.name for item in fields(HostConfig))


@dataclass(kw_only=True)
class ClusterConfig(LaunchSettings):
    """Which hosts, how many ranks on each, and how they are reached. Times in seconds.

    A launcher's module derives its own settings from this class.

    Attributes:
        launcher: how hosts are reached: local, pssh, mpi, slurm, kubernetes, or one of another package.
        hosts: the nodes, in the order of their ranks; rank 0 is on the first. A command line may give names alone:
            [node1,me@node2:2222]; a file has mappings: [{name: node1}].
        hostfile: replaces hosts: a file with one `user@host:port slots=N` a line.
        nnodes: how many of the hosts take part, the first ones; null: all of them. Of slurm and kubernetes: how many
            nodes a job has; default: 1.
        nproc_per_node: ranks of each host that has no number of its own; auto (local alone): its GPUs, or 2 CPU ranks.
        ssh_config: an ssh_config file besides your own ~/.ssh/config.
        interface: network interface for the ranks, on every host; null: InfiniBand if all have it, else that of ssh.
        python: interpreter on the hosts; null: the controller's where it exists, else python3.
        env: variables of the ranks; they count in the key.
        container: image that the ranks run in: a name that podman or docker has on the hosts, or a .sif file for
            apptainer (on Slurm also .sqsh for pyxis). Its digest counts in the key. null: none.
        container_mounts: further folders of the hosts that the ranks' container sees, under the same paths.
        secrets: names in env that are secret although they don't look like it.
        environment: versions of packages that differ on the hosts from those of the controller: {torch: 2.9.1}; hosts:
            the hosts are asked for their versions before the key is made.
        device: cpu, cuda, or auto (this computer's GPUs if it is the host, else the CPU).
        spares: further hosts, as in hosts; one takes the place of a lost host when the run is restarted.
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
        for name, options in (("device", ("auto", "cpu", "cuda")), ("when_busy", POLICIES)):
            value = getattr(self, name)
            if value not in options:
                meant = _DEVICE_SYNONYMS.get(value, value) if name == "device" else value
                raise ConfigError(f"cluster.{name}={value!r} is not an option; {suggestion(meant, options)}")
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
_DEVICE_SYNONYMS = dict.fromkeys(("gpu", "gpus", "cuda:0"), "cuda")  # in other tools


def _refuse_relative(path: str, shown: str) -> None:
    if not path.startswith(("/", "~/")):
        raise ConfigError(f"{shown} must be an absolute path on the hosts, or begin with ~/")


def _check_mirror(address: str) -> None:
    scheme, separator, rest = address.partition("://")
    if separator:  # http can't be written to, and memory is lost with the process
        is_fit = bool(rest.strip("/")) and scheme not in ("http", "https", "memory")
    else:
        is_fit = address.startswith("/")
    if not is_fit:
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
    """Return refuse, wait or share. By default CPUs are shared, and GPUs are not."""
    if cluster.settings.when_busy != _AUTO:
        return cluster.settings.when_busy
    return REFUSE if cluster.device == "cuda" else SHARE


# ------------------------------------------------------------------------------------------- the container of the ranks
_FILES = (".sif", ".sqsh")  # images of apptainer, of pyxis
_SEPARATORS = ",:"  # of srun's and apptainer's lists of folders


def checked_container(image: str, launcher: Capabilities) -> str:
    """Return ``cluster.container``. Raises UsageError: no container engine can run it with this launcher."""
    if image.startswith("-") or not image.isprintable() or " " in image or not image:
        raise UsageError(
            f"cluster.container={image!r} is no name of an image: it is empty, or holds a space or '-' first"
        )
    is_file = image.endswith(_FILES)
    if is_file and not image.startswith("/"):
        raise UsageError(f"cluster.container={image} is a file, and needs its absolute path on the hosts")
    if launcher.hosts_are_granted and not is_file:
        raise UsageError(
            f"cluster.container={image}: on Slurm an image is a file that this computer and the nodes share",
            hint=f"apptainer pull torch.sif docker://{image}, then cluster.container=/shared/images/torch.sif; "
            "for pyxis: enroot import -o torch.sqsh",
        )
    if image.endswith(".sqsh") and not launcher.hosts_are_granted:
        raise UsageError(
            f"cluster.container={image}: pyxis, which starts such an image, is a part of Slurm",
            hint="an image of podman or docker, or a .sif file of apptainer",
        )
    return image


def requested_container(cluster: Cluster) -> RequestedContainer | None:
    """Return the container that agents are to start; None: they start none."""
    # with a container asks_environment is False only on Slurm, where the agents already run in the container
    if cluster.container is None or not cluster.asks_environment:
        return None
    return RequestedContainer(cluster.container, tuple(_mounts(cluster)), gpus=cluster.device == "cuda")


def container_of_node(cluster: Cluster, fact: HostFacts) -> Container | None:
    """Return a node's container in a plan; None: its agent starts none."""
    requested = requested_container(cluster)
    if requested is None:
        return None
    # a plan that is only shown (`doit plan`) has no answer of the host
    on_host = fact.container or Container(f"<engine of {fact.host}>", requested.image, "", requested.gpus)
    return on_host._replace(gpus=requested.gpus, mounts=requested.mounts)


def _mounts(cluster: Cluster) -> list[str]:
    """Return the folders and files of the hosts that the ranks see besides those of their run."""
    folders = [path for path in cluster.python_path if path.startswith("/")]
    return list(dict.fromkeys([*cluster.container_mounts, *folders]))


def image_digest_here(cluster: Cluster) -> str | None:
    """Return the digest of the image if this computer can know it; None: only a host knows it, or there is no image.

    Slurm's image is a shared file; the name of a pod's image may contain the digest. Raises UsageError: no such file.
    """
    image_of_pods = getattr(cluster.settings, "image", None)  # only the settings of Kubernetes have it
    if isinstance(image_of_pods, str):
        return image_of_pods.partition("@")[2] or None
    if cluster.container is None or cluster.asks_environment:
        return None
    path = Path(cluster.container)
    try:
        status = path.stat()
        cache = Cache(places.ROOT, "images", most=64)  # hashing an image of 20 GB takes a minute
        name = f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        digest = cache.get(name) or f"sha256:{sha256_file(path)}"
    except OSError as error:
        raise UsageError(
            f"cluster.container={path} can't be read here: {os_reason(error)}",
            hint="put the image on a file system that this computer and all nodes share",
        ) from error
    cache.keep({name: digest})
    return str(digest)


def srun_in_container(cluster: Cluster, shared: Sequence[str]) -> tuple[str, str]:
    """Return (options of srun, beginning of its command) to run an agent in the cluster's image. Pure.

    pyxis (.sqsh) takes options of srun; apptainer (.sif) is a command before the agent's. ``shared``: the folders of
    the runs and of the data. Raises UsageError: a folder's name contains a separator of folder lists.
    """
    image = cluster.container
    if image is None:
        return "", ""
    folders = list(dict.fromkeys([*shared, *_mounts(cluster)]))
    for folder in folders:
        if any(mark in folder for mark in _SEPARATORS):
            raise UsageError(
                f"cluster.container: {folder} can't be seen there, as lists of folders are separated by , and :"
            )
    if image.endswith(".sqsh"):
        pairs = ",".join(f"{folder}:{folder}" for folder in folders)
        options = [f"--container-image={image}", f"--container-mounts={pairs}", "--no-container-mount-home"]
        return f"{shlex.join(options)} ", ""
    gpus = ["--nv"] if cluster.device == "cuda" else []
    return "", f"{shlex.join(['apptainer', 'exec', *gpus, '--no-home', '--bind', ','.join(folders), image])} "
