"""The controller's vocabulary: plain data that every other module speaks (standard library only)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, NodeLook


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


LAST = "last"
"""In place of a run's key: the newest run."""


class State(enum.StrEnum):
    """The states of a run, as they stand in journal.jsonl and result.json."""

    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    PRUNED = "PRUNED"  # a search ended it early; `doit train` of the same configuration goes on from there
    FAILED = "FAILED"
    KILLED = "KILLED"


UNDER_WAY = (State.PLANNED, State.RUNNING)
"""Of a run that hasn't ended, or whose command was killed."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What the agent's probe saw on one node. ``identity`` is equal for two names of one node."""

    host: str
    identity: str
    hostname: str
    address: str
    interface: str | None
    python: str
    python_version: str
    torch_version: str | None
    gpus: int
    cpus: int
    memory_bytes: int
    disk_free_bytes: int
    free_port: int
    home: str
    unix_time: float
    pack_path: str | None = None  # where the wanted data pack lies on that node, if it does
    peers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """The exact command of one node: ``argv`` run with ``env`` added, in ``run_dir`` on that node."""

    node_rank: int
    host: str  # Host.label
    identity: str
    address: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    run_dir: str
    data_dir: str
    state_dir: str  # the agent's own files on that node
    first_rank: int
    nproc_per_node: int
    machine: str = ""  # equal for all addresses of the host; "" where its system doesn't tell


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What rank 0 leaves in its run folder for the controller: glob patterns relative to it.

    ``resume`` is what a later attempt goes on from, ``final`` what comes after a good end. Without every file of
    ``needed`` an end isn't good; the last of them is put in place last, so whoever sees it may rely on the rest.
    ``pruned`` is what stands for ``needed`` where the controller ended the run early (None: it can't be). A name of
    ``whole`` is a folder of which nothing stays here that the node no longer has; such checkpoints are a script's, of
    which nobody knows whether they are whole. What was written to after ``until_s`` (unix seconds of the node) isn't
    brought. ``others`` are what every further node leaves, which lies in ``nodes/RANK`` here; ``work`` is what a script
    wrote in its working directory. {rank} in a pattern is the node's. Of ``work`` nothing is brought where it is larger
    than ``limit_bytes`` (None: any size): it stays on the node.
    """

    resume: tuple[str, ...] = ()
    final: tuple[str, ...]
    needed: tuple[str, ...]
    pruned: str | None = None
    whole: tuple[str, ...] = ()
    until_s: float | None = None
    others: tuple[str, ...] = ()
    work: tuple[str, ...] = ()
    limit_bytes: int | None = None


_RESUME = (
    "checkpoints/step-*.pt",
    "checkpoints/step-*.json",
    "checkpoints/shards-*/rank-*.pt",
    "checkpoints/best.*",
    run_folder.METRICS,
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
_OF_SCRIPT = ("checkpoints", run_folder.METRICS, "attempts/*/before/metrics.jsonl", "outputs")
_NOT_RECORDED = tuple(
    f"{run_folder.WORK}/node0{name}"
    for name in (f"/{run_folder.LOGGED}", f"-{run_folder.LOGGED}", f"/{run_folder.EARLIER}")
)
"""What rank 0 has logged, and where its own files begin: of a killed attempt some isn't in metrics.jsonl yet."""
SCRIPT_OUTPUTS = Outputs(
    resume=(*_OF_SCRIPT, *_NOT_RECORDED),
    final=(*_OF_SCRIPT, run_folder.OUTPUT_DIGESTS, run_folder.SUMMARY, run_folder.DEPENDENCIES, run_folder.PRUNED),
    needed=(run_folder.SUMMARY,),
    pruned=run_folder.PRUNED,
    whole=("checkpoints", "outputs", "work"),
    others=("checkpoints", "outputs", run_folder.DEPENDENCIES),
    work=(f"{run_folder.WORK}/node{{rank}}/{run_folder.ABOVE}",),
)
"""Those of a script; the folders come with all that lies in them. ``work`` ends empty where an attempt ends well."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that one attempt will do, as data: what plan.json holds."""

    run_key: str
    run_id: str  # TORCHELASTIC_RUN_ID: fresh for each attempt, begins with the key
    attempt: int
    launcher: str
    master_addr: str
    master_port: int
    world_size: int
    lease_s: float
    nodes: tuple[NodePlan, ...]
    outputs: Outputs = TRAINING_OUTPUTS
    submission: str = ""  # what a batch scheduler was given
    stall_s: float = 300.0
    collective_timeout_s: float = 600.0
    checkpoint_fetch_s: float = 0.0
    warm: bool = False  # ranks are forks of a process that has imported torch; else exactly ``argv`` is run

    @property
    def nnodes(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a command waits for: words that follow "still", and for how long already."""

    what: str
    for_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The first thing that went wrong in one rank, as torch's error file tells it."""

    rank: int
    unix_time: float
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a node's output. ``rank`` is None for what torchrun itself says."""

    host: str
    rank: int | None
    text: str


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """One raw line of rank 0's metrics.jsonl, newline stripped."""

    text: str


@dataclass(frozen=True, kw_only=True)
class NodeExit:
    """torchrun on a node has ended and its whole process tree is gone. ``outlived`` names what a script had started and
    had to be ended after it."""

    host: str
    code: int
    reason: str = ""
    errors: tuple[RankError, ...] = ()
    outlived: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """The node no longer answers, or its agent died without leaving an exit code (``answers``: the host told so)."""

    host: str
    reason: str
    answers: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeSilent:
    """Nothing has come from the node for some seconds; its ranks may train on, and the stream is tried again."""

    host: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeAnswers:
    """A node that was silent for ``silent_s`` answers again; nothing of what it had to say is lost."""

    host: str
    silent_s: float


Event = LogLine | MetricsLine | NodeBeat | NodeLook | NodeSilent | NodeAnswers | NodeExit | NodeLost
