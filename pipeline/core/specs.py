"""The plain data types that all modules of the controller half share: hosts, cluster, plan, run states.

``pipeline.config`` makes a ``Cluster`` of the configuration, ``pipeline.cluster.plan`` a ``LaunchPlan`` of the cluster.
A run's *key* is a digest of all that the run is made of. An *attempt* is one try to finish the run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainers.contract import run_folder
from trainers.contract.host_facts import Container


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node as configured; neither its address nor its GPUs have been looked up yet."""

    name: str  # as ssh takes it, so aliases of ssh_config work
    nproc_per_node: int = 1
    port: int | None = None
    user: str | None = None
    address: str | None = None  # where other nodes reach the host; None: the address that ssh used
    interface: str | None = None  # the network interface for collectives; None: the one with the address
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # variables of the ranks; a secret's value is a placeholder
    placement: Mapping[str, str] = field(default_factory=dict)  # variables that select GPUs of the node: in no key
    shared_by: int = 1  # how many runs share the node's cores
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # sent to ranks, in no file and no message

    @property
    def label(self) -> str:
        """``user@name:port`` as far as set: unique in a cluster, used in messages."""
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{user}{self.name}{port}"


_SHELL_CHARACTERS = frozenset("'\"`;&<>|(){}")  # ssh refuses them too: a ProxyCommand passes names through a shell
_SEPARATORS = frozenset("@/#[]")  # of pssh's host file and of paths


def unfit_name(host: Host) -> str | None:
    """Explain why ssh and pssh can't use the host's name or user, as words that follow the value; None if they can."""
    # each row: what is checked, its value, characters refused there alone, the most characters
    for kind, name, refused_here, longest in (("host", host.name, "$\\,", 253), ("user", host.user or "user", "", 64)):
        refused = _SHELL_CHARACTERS | _SEPARATORS | {" ", *refused_here}
        bad = [char for char in name if char in refused or not char.isprintable()]
        if bad or not name or name.startswith("-"):
            why = f"it holds {bad[0]!r}" if bad else "it begins with '-'" if name else "it is empty"
            return f"is not a {kind} name that ssh can be given: {why}"
        if len(name) > longest:
            return f"is not a {kind} name that ssh can be given: it has {len(name)} characters, of at most {longest}"
    return None


@dataclass(kw_only=True)
class LaunchSettings:
    """The fields of the section ``cluster`` that a launch uses exactly as configured. Times in seconds.

    ``ClusterConfig`` derives from it: it checks them and adds fields that must be resolved first (hosts, devices).

    Attributes:
        workdir: scratch folder on the hosts; null: ~/.cache/paceline.
        connect_timeout_s: how long ssh may take to reach a host the first time; a refusal is reported at once.
        lease_s: a host ends its part of a run when the controller is gone for this long.
        collective_timeout_s: ranks that wait longer for each other in one collective operation give up.
        stall_s: when no rank has made progress for this long (or for ten times what steps have taken), the rank for
            which the others wait is named and the run is ended.
        min_nodes: with trainer.shards, the fewest nodes on which a run continues after it lost hosts and has no spare
            left; 0: it needs all of them.
        checkpoint_fetch_s: the shortest time between two fetches of new checkpoints during a run; 0: only at its end.
        when_busy: what happens if others use a host: refuse, wait (until it is free), share, or auto (refuse on GPUs,
            share on CPUs).
        warm: ranks are forks of a process that imports torch while the hosts are probed, and that serves restarts and
            further trials; false: exactly the torchrun command of plan.json. Linux; not for scripts and containers.
        checkpoint_mirror: address for copies of the checkpoints, such as s3://bucket/folder or an absolute path; a run
            whose folder has lost its checkpoints continues from these copies; null: none.
        max_restarts: how many further attempts, each from the last checkpoint, are made when a run fails.
        restart_wait_s: how long a further attempt waits for a host of the previous attempt that doesn't answer, because
            it reboots for example.
    """

    workdir: str | None = None
    connect_timeout_s: float = 20.0
    lease_s: float = 600.0
    collective_timeout_s: float = 600.0
    stall_s: float = 300.0
    min_nodes: int = 0
    checkpoint_fetch_s: float = 60.0
    when_busy: str = "auto"
    warm: bool = True
    checkpoint_mirror: str | None = None
    max_restarts: int = 0
    restart_wait_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The topology that the launch depends on, and its settings."""

    launcher: str
    hosts: tuple[Host, ...]
    ssh_config: str | None = None  # additional ssh client configuration, an absolute path; None: the user's own
    environment: Mapping[str, str] = field(default_factory=dict)  # package → version, where hosts have other versions
    asks_environment: bool = False  # True: the hosts are asked for their package versions before the key is made
    container: str | None = None  # image of the ranks' container; None: no container
    container_mounts: tuple[str, ...] = ()  # folders of the hosts that the container sees
    device: str = "auto"  # cpu, cuda; auto: CPU; hosts with GPUs are then refused, as the key couldn't record these
    spares: tuple[Host, ...] = ()  # hosts that replace lost ones
    settings: LaunchSettings = field(default_factory=LaunchSettings)  # an instance of the launcher's settings class

    @property
    def nnodes(self) -> int:
        return len(self.hosts)

    def with_settings(self, **changes: Any) -> Cluster:
        """The cluster with other settings. Raises ConfigError: a value isn't possible."""
        return replace(self, settings=replace(self.settings, **changes))

    @property
    def with_spares(self) -> Cluster:
        """The cluster with its spares among the hosts, for operations on all of them."""
        return replace(self, hosts=(*self.hosts, *self.spares), spares=())

    @property
    def world_size(self) -> int:
        return sum(host.nproc_per_node for host in self.hosts)

    @property
    def python_path(self) -> tuple[str, ...]:
        """PYTHONPATH folders from the hosts' ``env``; relative ones start from the project."""
        entries = [entry for host in self.hosts for entry in host.env.get("PYTHONPATH", "").split(":")]
        return tuple(dict.fromkeys(entry for entry in entries if entry))


LAST = "last"
"""The word that users type instead of the key of the newest run."""


class State(enum.StrEnum):
    """The states of a run, as stored in journal.jsonl and result.json."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    PRUNED = "PRUNED"  # a search ended it early; `doit train` of the same configuration continues it
    FAILED = "FAILED"
    KILLED = "KILLED"


UNDER_WAY = (State.PLANNED, State.RUNNING)
"""States of a run that hasn't ended; a run whose command was killed by SIGKILL stays in one of them."""


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The exact command of one node: ``argv`` with ``env`` added, run in ``run_dir`` on that node."""

    node_rank: int
    host: str  # Host.label
    identity: str  # of host, user and address together: equal for two labels of one host
    address: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    run_dir: str
    data_dir: str
    state_dir: str  # the agent's own files on that node
    first_rank: int  # the global rank of its local rank 0
    nproc_per_node: int
    machine: str = ""  # id of the host alone: equal for all its names, addresses and users; "" if unknown
    container: Container | None = None  # in which ``argv`` is run; None: directly on the host


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The files of rank 0's run folder that the controller fetches, as glob patterns relative to that folder."""

    resume: tuple[str, ...] = ()  # what a later attempt needs to continue
    final: tuple[str, ...]  # fetched after a successful end
    needed: tuple[str, ...]  # all must exist after a success; the last one is written last, so implies the others
    pruned: str | None = None  # needed instead if the controller ended the run early; None: it can't do that
    whole: tuple[str, ...] = ()  # folders made equal to the node's: a file deleted there is deleted here (scripts)
    until_s: float | None = None  # one fetch skips files modified after this time (unix seconds of the node)
    others: tuple[str, ...] = ()  # fetched from every further node, into nodes/<its node rank>
    work: tuple[str, ...] = ()  # parts of a script's working directory, with {rank}, for a further attempt only
    limit_bytes: int | None = None  # one fetch leaves all of ``work`` on the node if that is larger


_RESUME = (
    "checkpoints/step-*.pt",
    "checkpoints/step-*.json",
    "checkpoints/best.*",
    run_folder.METRICS,
    run_folder.DIGESTS,
)
TRAINING_OUTPUTS = Outputs(
    resume=_RESUME,
    final=(
        *_RESUME,
        run_folder.FINAL_WEIGHTS,
        run_folder.FINAL_WEIGHTS_NOTES,
        run_folder.PREDICTIONS,
        run_folder.SUMMARY,
        run_folder.DEPENDENCIES,
        run_folder.PRUNED,
    ),
    needed=(run_folder.FINAL_WEIGHTS, run_folder.SUMMARY),
    pruned=run_folder.PRUNED,
)
"""The outputs of a training."""
_OF_SCRIPT = ("checkpoints", run_folder.METRICS, run_folder.DIGESTS, "attempts/*/before/metrics.jsonl", "outputs")
_WORK0 = f"{run_folder.WORK}/node0"
_NOT_RECORDED = (f"{_WORK0}/{run_folder.LOGGED}", f"{_WORK0}-{run_folder.LOGGED}", f"{_WORK0}/{run_folder.EARLIER}")
"""Files that hold rows of metrics which metrics.jsonl lacks after a killed attempt, or say where such rows begin."""
SCRIPT_OUTPUTS = Outputs(
    resume=(*_OF_SCRIPT, *_NOT_RECORDED),
    final=(*_OF_SCRIPT, run_folder.OUTPUT_DIGESTS, run_folder.SUMMARY, run_folder.DEPENDENCIES, run_folder.PRUNED),
    needed=(run_folder.SUMMARY,),
    pruned=run_folder.PRUNED,
    whole=("checkpoints", "outputs", "work"),
    others=("checkpoints", "outputs", run_folder.DEPENDENCIES),
    work=(f"{run_folder.WORK}/node{{rank}}/{run_folder.ABOVE}",),
)
"""The outputs of a script; folders are fetched with all their files. A successful attempt leaves nothing in work/."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that one attempt will do, as data: the content of plan.json."""

    run_key: str
    run_id: str  # TORCHELASTIC_RUN_ID: new for each attempt, begins with the key
    attempt: int
    launcher: str
    master_addr: str
    master_port: int
    world_size: int
    lease_s: float
    nodes: tuple[NodePlan, ...]
    outputs: Outputs = TRAINING_OUTPUTS
    submission: str = ""  # the script for the batch scheduler; "" for launchers without one
    stall_s: float = 300.0
    collective_timeout_s: float = 600.0
    checkpoint_fetch_s: float = 0.0
    warm: bool = False  # ranks are forks of a process that has imported torch; else ``argv`` is run as it is

    @property
    def nnodes(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait to show to the user: ``what`` are words that follow "still", such as "probing 2 hosts"."""

    what: str
    for_s: float = 0.0
