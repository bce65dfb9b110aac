"""Plain data types shared by all modules of the controller half (standard library only)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainers.contract import run_folder
from trainers.contract.host_facts import Container


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node as configured; nothing has been looked up yet."""

    name: str  # for ssh, so aliases of ssh_config work
    nproc_per_node: int = 1
    port: int | None = None
    user: str | None = None
    address: str | None = None  # where other nodes reach the host; None: the address that ssh used
    interface: str | None = None  # the network interface for collectives; None: the one with the address
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # with placeholders for secrets
    placement: Mapping[str, str] = field(default_factory=dict)  # env that selects a part of the node (GPUs): in no key
    shared_by: int = 1  # runs that share the node's cores
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # for ranks alone: no file or message has them

    @property
    def label(self) -> str:
        """``user@name:port`` as far as set: unique in a cluster, used in messages."""
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        return f"{user}{self.name}{port}"


_OF_SHELLS = frozenset("'\"`;&<>|(){}")  # ssh refuses them too, because a ProxyCommand passes names through a shell
_OF_LISTS = frozenset("@/#[]")  # separators of pssh's host file and of paths


def unfit_name(host: Host) -> str | None:
    """Explain why ssh and pssh can't use the host's name or user, as words that follow the value; None if they can."""
    for kind, text, also, longest in (("host", host.name, "$\\,", 253), ("user", host.user or "user", "", 64)):
        unfit = _OF_SHELLS | _OF_LISTS | {" ", *also}
        bad = [mark for mark in text if mark in unfit or not mark.isprintable()]
        if bad or not text or text.startswith("-"):
            why = f"it holds {bad[0]!r}" if bad else "it begins with '-'" if text else "it is empty"
            return f"is not a {kind} name that ssh can be given: {why}"
        if len(text) > longest:
            return f"is not a {kind} name that ssh can be given: it has {len(text)} characters, of at most {longest}"
    return None


@dataclass(kw_only=True)
class LaunchSettings:
    """The fields of the section ``cluster`` that a launch reads as they were written. Times in seconds.

    ``ClusterConfig`` derives from it, checks the values, and has the fields that are resolved first (hosts, devices).

    Attributes:
        workdir: scratch folder on the hosts; null: ~/.cache/paceline.
        connect_timeout_s: how long ssh may take to reach a host the first time; a refusal is reported at once.
        lease_s: a host ends its part of a run when the controller is gone for this long.
        collective_timeout_s: ranks that wait longer for each other in one collective give up.
        stall_s: when no rank has moved for this long (or for ten times what steps have taken), the rank that holds the
            others up is named and the run ended.
        min_nodes: with trainer.shards, the fewest nodes with which a run goes on that has lost hosts and has no spare
            left; 0: only with all of them.
        checkpoint_fetch_s: the shortest time between two fetches of new checkpoints during a run; 0: only at its end.
        when_busy: what happens if others use a host: refuse, wait (until it is free), share, or auto: refuse on GPUs,
            share on processors.
        warm: ranks are forks of a process that imports torch while the hosts are probed, and that serves restarts and
            further trials; false: exactly the torchrun command of plan.json. Linux; not for scripts and containers.
        checkpoint_mirror: address for copies of the checkpoints, such as s3://bucket/folder or an absolute path; a run
            whose folder has lost its own goes on from there; null: none.
        max_restarts: further attempts, from the last checkpoint, when a run fails.
        restart_wait_s: how long a further attempt waits for hosts of the one before that don't answer, such as one that
            reboots.
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
    environment: Mapping[str, str] = field(default_factory=dict)  # versions on the hosts that aren't the controller's
    asks_environment: bool = False  # the hosts are asked for them before the key is made
    container: str | None = None  # image of the ranks' container; None: none
    container_mounts: tuple[str, ...] = ()  # what it sees of the hosts
    device: str = "auto"  # cpu, cuda; auto: CPU, and hosts with GPUs, which the key couldn't record, are refused
    spares: tuple[Host, ...] = ()  # replace lost hosts
    settings: LaunchSettings = field(default_factory=LaunchSettings)  # the section as the launcher's settings class

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
"""Stands for the key of the newest run."""


class State(enum.StrEnum):
    """The states of a run, as stored in journal.jsonl and result.json."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    PRUNED = "PRUNED"  # a search ended it early; `doit train` of the same configuration continues it
    FAILED = "FAILED"
    KILLED = "KILLED"


UNDER_WAY = (State.PLANNED, State.RUNNING)
"""States of a run that hasn't ended, or whose command was killed."""


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The exact command of one node: ``argv`` with ``env`` added, run in ``run_dir`` on that node."""

    node_rank: int
    host: str  # Host.label
    identity: str  # of the host, the user and the address
    address: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    run_dir: str
    data_dir: str
    state_dir: str  # the agent's own files on that node
    first_rank: int
    nproc_per_node: int
    machine: str = ""  # of the host alone: equal for all its names, addresses and users; "" if unknown
    container: Container | None = None  # ``argv`` is run in it


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The files of rank 0's run folder that the controller fetches, as glob patterns relative to that folder."""

    resume: tuple[str, ...] = ()  # input of a later attempt
    final: tuple[str, ...]  # fetched after a successful end
    needed: tuple[str, ...]  # without them an end isn't successful; the last one is written last, so implies the others
    pruned: str | None = None  # takes the place of needed if the controller ended the run early; None: not possible
    whole: tuple[str, ...] = ()  # folders made equal to the node's, for scripts, whose checkpoints nobody understands
    until_s: float | None = None  # of one fetch: nothing that was modified later (unix seconds of the node)
    others: tuple[str, ...] = ()  # fetched from every further node, into nodes/<its rank>
    work: tuple[str, ...] = ()  # of a script's working directory, with {rank}, for a further attempt only
    limit_bytes: int | None = None  # of one fetch: above it all of work stays on the node


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
_NOT_RECORDED = tuple(
    f"{run_folder.WORK}/node0{name}"
    for name in (f"/{run_folder.LOGGED}", f"-{run_folder.LOGGED}", f"/{run_folder.EARLIER}")
)
"""Rank 0's log and the offsets of its own files: after a killed attempt metrics.jsonl may lack some of it."""
SCRIPT_OUTPUTS = Outputs(
    resume=(*_OF_SCRIPT, *_NOT_RECORDED),
    final=(*_OF_SCRIPT, run_folder.OUTPUT_DIGESTS, run_folder.SUMMARY, run_folder.DEPENDENCIES, run_folder.PRUNED),
    needed=(run_folder.SUMMARY,),
    pruned=run_folder.PRUNED,
    whole=("checkpoints", "outputs", "work"),
    others=("checkpoints", "outputs", run_folder.DEPENDENCIES),
    work=(f"{run_folder.WORK}/node{{rank}}/{run_folder.ABOVE}",),
)
"""The outputs of a script; folders are fetched with all files in them. ``work`` is empty after a successful attempt."""


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
    submission: str = ""  # the script given to a batch scheduler
    stall_s: float = 300.0
    collective_timeout_s: float = 600.0
    checkpoint_fetch_s: float = 0.0
    warm: bool = False  # ranks are forks of a process that has imported torch; else ``argv`` is run as it is

    @property
    def nnodes(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a command waits for (words that follow "still"), and for how long."""

    what: str
    for_s: float = 0.0
