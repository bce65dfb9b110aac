"""What one launcher has to bring: a ``Transport`` to hosts that are known, or the ``Scheduler`` that grants hosts.

All else is the same for all of them: ``AgentLauncher`` runs an attempt over a transport, ``GrantedLauncher`` in a job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from pipeline.cluster.launchers.settings import capabilities
from pipeline.cluster.launchers.transport.answers import Answer, Output
from pipeline.core.errors import HostError, TrainingError
from pipeline.core.specs import TRAINING_OUTPUTS, Cluster, Host, NodeFacts, Outputs
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.cluster.launchers.job_folder import JobFolder
    from pipeline.cluster.launchers.transport.environments import LockFile

NOT_ENDED = "could not be ended there: "
"""How a host's answer to ``stop`` begins when it was reached and something of the run lives all the same."""


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """The data pack as the controller holds it: where, and the digest that names it on every node.

    ``inside`` is what of it a script is given as {data}, {data2}, …
    """

    path: Path
    digest: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """What one attempt runs, before a host was asked.

    ``run_dir`` is absolute and holds config.json and code/; ``run_key`` names the run on the hosts, ``attempt`` counts
    from 1. ``trainer`` is the module that each rank runs, or, where there is a ``script`` (its path in the snapshot, ''
    for another program), the one that starts torchrun with it on each node, or without ``uses_torchrun`` the script
    alone; ``project`` is the checkout that it is of.
    ``pack`` is None for what needs no data. ``outputs`` are what rank 0 leaves.
    ``versions`` are those of the run's key (empty: it has none); a host that has others is refused. ``is_restart``: the
    same command has had the hosts before, so where they are busy now it waits. ``replaceable``: another host
    would take the place of one that can't be reached, so its ranks' lease isn't waited for.
    """

    run_dir: Path
    run_key: str
    attempt: int
    trainer: str
    pack: PackSource | None = None
    outputs: Outputs = TRAINING_OUTPUTS
    versions: Mapping[str, str] = field(default_factory=dict)
    is_restart: bool = False
    replaceable: bool = False
    script: str | None = None
    project: str = ""
    uses_torchrun: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Absolute paths on one node: the run folder, the data pack, and the agent's own files."""

    run_dir: str
    data_dir: str
    state_dir: str


def place(cluster: Cluster, number: int, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
    """Where node ``number`` keeps the run. Without a pack (a diagnosis without data) ``data_dir`` is empty.

    Hosts that don't share the run folder have one for each run id and node: homes are often shared over NFS.
    """
    able = capabilities(cluster)
    if able.shares_run_dir:
        state_dir = spec.run_dir / run_folder.ATTEMPTS / str(spec.attempt) / f"agent-{run_id}"
        state_dir = state_dir / f"node{number}" if able.hosts_are_granted else state_dir
        data_dir = str(spec.pack.path) if spec.pack else ""
        return Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))
    workdir = workdir_of(cluster)
    if workdir == "~" or workdir.startswith("~/"):
        workdir = facts.home + workdir[1:]
    node_dir = f"{workdir}/runs/{run_id}/node{number}"
    data_dir = facts.pack_path or (f"{workdir}/data/{spec.pack.digest}" if spec.pack else "")
    return Place(run_dir=node_dir, data_dir=data_dir, state_dir=f"{node_dir}/agent")


def workdir_of(cluster: Cluster) -> str:
    """The folder on a host in which hosts that share no run folder keep their files (``~`` is the host's)."""
    return cluster.workdir or "~/.cache/paceline"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launcher knows of an attempt's bad end that its nodes could not tell.

    ``text`` is put behind the nodes' own words, ``hint`` says what helps. ``cause`` is a TrainingError's ('': as the
    nodes' ends tell). ``again``: the scheduler took the hosts away and will grant others, so the attempt goes on.
    """

    text: str = ""
    hint: str | None = None
    cause: str = ""
    again: bool = False


class Transport(ABC):
    """How the node agent is started on the hosts of a cluster, all of them at once or one with a live stream.

    ``silent_s``: how long a live agent may say nothing before it counts as lost; 0: as long as ssh takes to notice a
    lost host. ``starts_s``: how long a further connection takes at least. ``in_requests``: goes into every request.
    ``environment``: what hosts get their environment from, with ``pythons``, host label → the interpreter of it.
    ``outputs``: host label → the file in which what its command says stands meanwhile, where there is one.

    Who uses the transport sets ``slow_s`` (how long further connections may take until they answer; None: no host has
    answered yet) and ``shares_connections`` (False: one broke or hangs, so commands open connections of their own).
    """

    silent_s: ClassVar[float] = 0.0
    starts_s: ClassVar[float] = 0.0

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.in_requests: dict[str, Any] = {"local": capabilities(cluster).is_this_computer}
        self.environment: LockFile | None = None
        self.pythons: dict[str, str] = {}
        self.outputs: dict[str, Path] = {}
        self.slow_s: float | None = None
        self.shares_connections = True

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec) -> str:
        """What plan.json and `doit plan` show of how hosts are reached; pure."""
        return ""

    @abstractmethod
    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """Run the agent on ``hosts`` at once with the file ``stdin`` from its beginning; host label → what it wrote."""

    @abstractmethod
    def stream_argv(self, host: Host) -> list[str]:
        """The command of a live agent on one host."""

    def remote_shell(self, host: Host) -> list[str]:
        """The command that reaches the host, up to its name, for programs that bring their own remote command (rsync);
        empty: there is none."""
        return []

    @abstractmethod
    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        """An answer that failed in plain words, and the command that fixes it (None: not known)."""

    def close(self) -> None:
        """Give back what is held here (connections, folders)."""
        return


@dataclass(frozen=True, kw_only=True)
class GrantedJob:
    """One job of a scheduler for one run.

    Args:
        id: as the scheduler knows it.
        title: how messages name it.
        show_command: the command with which the user sees it.
        end_command: the command with which the user may end it.
        folder: what its nodes and the controller share.
        life: how often the scheduler had taken its nodes away when they had all reported.
        is_started: it has had a start.
        printed_bytes: what it had printed before its newest start.
    """

    id: str
    title: str
    show_command: str
    end_command: str
    folder: JobFolder
    nnodes: int
    life: int = 0
    is_started: bool = False
    printed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class JobState:
    """How a job stands. Texts are empty where there is nothing to say.

    Args:
        words: what is waited for, as words that follow "still".
        phase: the scheduler's own word for it.
        warning: what somebody has to do before the job can start.
        is_unanswered: the scheduler doesn't answer now, so nothing of what follows is known.
        life: how often the scheduler has taken its nodes away and granted it others.
        is_running: its nodes may take a start.
        is_leaving: the scheduler is about to take these nodes away.
        is_over: nothing more becomes of it.
        is_idle: nothing runs in ``GrantedJob.life`` any more.
        is_settled: it is decided what becomes of it.
        standing: why its ranks stand still.
        gone: why the nodes of ``GrantedJob.life`` are no longer the run's.
        remains: what of a job that was ended goes on, and the command that ends that.
        outcome: what the scheduler did to it.
        error: why it ended before anything was started in it.
        nodes: a node's own name → the name of what it runs on, where that is another one.
    """

    words: str = ""
    phase: str = ""
    warning: str = ""
    is_unanswered: bool = False
    life: int = 0
    is_running: bool = False
    is_leaving: bool = False
    is_over: bool = False
    is_idle: bool = False
    is_settled: bool = True
    standing: str = ""
    gone: str = ""
    remains: str = ""
    outcome: Outcome = Outcome()
    error: HostError | TrainingError | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)


class Scheduler(ABC):
    """Grants hosts by jobs, each for one run, whose nodes share the folder of runs with the controller.

    ``name``: how messages call it. ``agent``: the agent's module that knows on which node of a job it is.
    ``folder``, ``script``: the folder below a run's for those of its jobs, and the file in such a folder with what the
    scheduler was given. ``node_name``: nodes are called by it and their number; '': by their own names. ``requeues``:
    a job whose nodes are taken away waits for others, and one that ended is forgotten; else both stay until they are
    cancelled. ``end_s``: how long the end of a start or of a job may take; ``settle_s``: how long the scheduler may
    take to decide what becomes of a job. ``side_by_side``: how many trials of a sweep submit jobs at a time.
    """

    name: ClassVar[str]
    agent: ClassVar[str]
    folder: ClassVar[str]
    script: ClassVar[str]
    node_name: ClassVar[str] = ""
    requeues: ClassVar[bool] = True
    end_s: ClassVar[float] = 20.0
    settle_s: ClassVar[float] = 20.0

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.side_by_side = 1

    @classmethod
    @abstractmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        """What the scheduler is given, as text; pure. Raises UsageError: its nodes can't do this.

        Args:
            nonce: a job's own part of its name, and the name of its folder.
        """

    @abstractmethod
    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: dict[str, Any]) -> GrantedJob:
        """Make ``folder``, and ask for a job whose agents get ``request`` first. Raises HostError: it is refused."""

    @abstractmethod
    def jobs(self, run_key: str, run_dir: Path) -> list[GrantedJob]:
        """The jobs of a run folder that the scheduler knows, the one to be taken up first. Raises PacelineError."""

    @abstractmethod
    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        """How a job stands. Raises HostError: the scheduler refuses to say.

        Args:
            before: what an earlier poll said, of which something may be known that the scheduler has forgotten.
        """

    @abstractmethod
    def cancel(self, job: GrantedJob) -> None:
        """Let the scheduler end the job; one that is over is no error. Raises PacelineError."""

    @abstractmethod
    def rehearse(self) -> list[str]:
        """What can be said of hosts that would be granted, a line each, without asking for any.

        Raises HostError: they would be refused.
        """
