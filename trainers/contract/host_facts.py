"""The facts of a host that its agent's probe reports, for launches and `doit preflight`; None: a fact is unknown."""

# No ``from __future__ import annotations``: ``from_json`` needs the types. Python 3.9 has no ``X | None``.
# ruff: noqa: UP045
from collections.abc import Mapping
from typing import NamedTuple, Optional

OLDEST_PYTHON = (3, 11)
"""The oldest Python of a host that can run trainers/ (the agent itself needs only 3.9)."""


class Limit(NamedTuple):
    """A resource limit (``ulimit``) of the login's processes; None: no limit."""

    soft: Optional[int]
    hard: Optional[int]


class Limits(NamedTuple):
    """Limits of the login, which ranks inherit."""

    open_files: Limit
    locked_memory_bytes: Limit


class ControlGroup(NamedTuple):
    """The tightest limits of the login's control groups; None: no limit."""

    cpus: Optional[float] = None
    memory_bytes: Optional[int] = None
    memory_used_bytes: Optional[int] = None  # of memory_bytes, without cached files


class OwnName(NamedTuple):
    """How programs on the host resolve its own name."""

    addresses: tuple[str, ...] = ()  # empty: the name doesn't resolve
    slow_s: Optional[float] = None  # the name wasn't resolved within this time


class NetworkLink(NamedTuple):
    """One network interface."""

    state: str  # up, down, unknown, or another word of Linux
    mtu: Optional[int] = None
    speed_mbit: Optional[int] = None  # per second


class InfinibandPort(NamedTuple):
    """One port of an RDMA device, in the words of ``ibstatus``."""

    device: str
    port: Optional[int]
    state: str  # such as ACTIVE
    link_layer: str  # InfiniBand, or Ethernet for RoCE
    phys_state: str = ""  # such as LinkUp
    rate: str = ""
    netdev: Optional[str] = None  # its network interface


class NvidiaSmi(NamedTuple):
    """The output of nvidia-smi: lines of CSV, or error messages (``preflight/hardware.py`` parses it)."""

    devices: Optional[str] = None  # index, uuid, name, MiB, uncorrected errors; None: no answer in time
    throttling: str = ""  # index, bits
    processes: str = ""  # uuid of the GPU, pid, MiB, program
    owners: str = ""  # pid, user, unix seconds of its start, PACELINE_NODE


class Hardware(NamedTuple):
    """What decides how arithmetic rounds: models of processor and GPUs. A run's folder stores it for each attempt."""

    cpu_model: Optional[str] = None
    cpu_id: Optional[str] = None  # AuthenticAMD 25/1/1: vendor, family, model and stepping
    cpu_flags: Optional[str] = None  # instructions that round in their own way, separated by spaces
    gpu_models: tuple[str, ...] = ()
    gpu_driver: Optional[str] = None


class Container(NamedTuple):
    """The ranks' container, as an engine of this host runs it."""

    engine: str  # path of podman, docker, apptainer or singularity
    image: str  # as the engine takes it
    digest: str
    gpus: bool  # whether ranks use the GPUs
    mounts: tuple[str, ...] = ()  # configured folders and files of the host that ranks see under the same paths
    name: str = ""  # of a run's container; '' for an engine whose containers are plain processes


class HeldClaim(NamedTuple):
    """A run's claim on devices of this host, while its process lives."""

    resources: tuple[str, ...]  # gpu:0, gpu:1, …, or cpu
    attempt_prefix: str  # of the ids of all attempts of the run folder
    group: str  # equal for all runs of one controller, which may share devices
    title: str  # of the run: run 5a0c12ab34cd (resnet18)
    since: float  # unix seconds
    user: str
    description: str = ""  # alice's run 5a0c… (resnet18) has GPU 0 and 1 since 09:12


class LeftFolder(NamedTuple):
    """A folder that an attempt left on the host, and that no process there uses any more."""

    name: str  # RUN ID/node0
    idle_s: float  # since its last write or its controller's last heartbeat
    holds_outputs: bool  # a controller may want to fetch something
    bytes: int

    @property
    def run_id(self) -> str:
        return self.name.partition("/")[0]


class ProbeTimes(NamedTuple):
    """Unix seconds of a probe by the clocks of host and controller, to compare them; None: not recorded."""

    host_began: float
    host_ended: float
    controller_asked: Optional[float] = None  # when the controller sent the request
    controller_answered: Optional[float] = None  # when the controller had the answer


class HostFacts(NamedTuple):
    """What the probe found on one host."""

    host: str  # label in the cluster
    identity: str  # host name, ssh server's address and port, user id: equal for two names of one host
    hostname: str
    address: str  # where other hosts reach it
    home: str

    # software of the login's interpreter, or of the container image
    python: str  # path of the interpreter
    python_version: str
    torch_version: Optional[str] = None
    torch_cuda: Optional[str] = None  # version of CUDA that torch was built with
    packages: Mapping[str, str] = {}  # name → version
    modules: Optional[Mapping[str, str]] = None  # requested module that no package is named after → version
    container: Optional[Container] = None

    # devices and memory
    cpus: int = 1
    gpus: int = 0
    hardware: Hardware = Hardware()
    can_bind_numa: bool = False  # torchrun can bind each rank to the cores near its GPU
    nvidia_smi: Optional[NvidiaSmi] = None  # None: not asked, or not on the PATH
    memory_bytes: int = 0
    memory_available_bytes: Optional[int] = None
    shared_memory_free_bytes: Optional[int] = None
    disk_free_bytes: int = 0  # on the disk of cluster.workdir
    control_group: ControlGroup = ControlGroup()
    limits: Optional[Limits] = None

    # network
    interface: Optional[str] = None  # the network interface that has ``address``
    ssh_address: Optional[str] = None  # where ssh reached the host
    interfaces: Mapping[str, str] = {}  # address → interface
    links: Mapping[str, NetworkLink] = {}  # by interface
    infiniband: tuple[InfinibandPort, ...] = ()
    own_name: Optional[OwnName] = None
    free_ports: tuple[int, ...] = ()

    # the login, and who else is there
    machine: Optional[str] = None  # equal for all logins that lead to one computer
    network_variables: Mapping[str, str] = {}  # variables of the login that choose the ranks' network
    not_passed: Mapping[str, str] = {}  # variables that change results and don't reach the ranks
    claims: tuple[HeldClaim, ...] = ()
    left_folders: tuple[LeftFolder, ...] = ()
    pack_path: Optional[str] = None  # folder of the requested data pack, if it is there
    times: Optional[ProbeTimes] = None
