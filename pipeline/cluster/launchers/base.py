"""The interface of a launcher: a ``Transport`` to known hosts, or a ``Scheduler`` that grants hosts.

Everything else is shared: ``AgentLauncher`` runs an attempt over a transport, ``GrantedLauncher`` runs one in a job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar

from pipeline.cluster.agent.requests import Access, JobRequest
from pipeline.cluster.launchers.settings import capabilities
from pipeline.cluster.launchers.transport.answers import LATE, Answer, Output
from pipeline.core.errors import HostError, PacelineError, TrainingError, UsageError
from pipeline.core.files import sha256_text
from pipeline.core.processes import process
from pipeline.core.specs import TRAINING_OUTPUTS, Cluster, Host, Outputs

if TYPE_CHECKING:
    from pipeline.cluster.launchers.job_folder import JobFolder

NOT_ENDED = "could not be ended there: "
"""The beginning of a host's answer to ``stop`` when something of the run still lives there."""


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """The data pack on the controller: its folder, and the digest that names it on every node.

    ``inside`` are the paths in it that a script gets as {data}, {data2}, …
    """

    path: Path
    digest: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """What one attempt runs, before any host is probed."""

    run_dir: Path  # absolute; holds config.json and code/
    run_key: str  # names the run on the hosts
    attempt: int  # counts from 1
    # the module of each rank; with a script the module that starts torchrun, or without torchrun the script
    trainer: str
    pack: PackSource | None = None  # None: the attempt needs no data
    outputs: Outputs = TRAINING_OUTPUTS  # what rank 0 leaves
    versions: Mapping[str, str] = field(default_factory=dict)  # of the run's key; a host with others is refused
    is_restart: bool = False  # the same command has had the hosts before, so if they are busy now it waits
    # another host would replace one that can't be reached, so nobody waits for the end of its ranks (``lease_s`` after
    # they last heard of the controller)
    replaceable: bool = False
    script: str | None = None  # its path in the snapshot; '' for another program
    project: str = ""  # the checkout that the script belongs to
    uses_torchrun: bool = True


def workdir_of(cluster: Cluster) -> str:
    """Return the folder on a host for the files of hosts that share no run folder (``~`` is the host's)."""
    return cluster.settings.workdir or "~/.cache/paceline"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launcher knows about a failed attempt beyond the ends of its nodes."""

    text: str = ""  # appended to the nodes' own words
    hint: str | None = None  # what helps
    cause: str = ""  # as TrainingError's; '': taken from the nodes' ends
    again: bool = False  # the scheduler took the hosts away and will grant others, so the attempt goes on


@dataclass(frozen=True, kw_only=True)
class LockFile:
    """A lock file for the hosts (``cluster.environment_from``)."""

    path: Path
    wheelhouse: Path | None  # a local folder of wheels for it; None: hosts have a network

    @property
    def sha256(self) -> str:
        """The digest that names its environments, together with a host's Python. Raises UsageError."""
        return sha256_text(self.text)

    @property
    def text(self) -> str:
        """Its content. Raises UsageError."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cluster.environment_from: {self.path} can't be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One host's environment of a lock file, in its folder ``place``. ``python`` is None until it is made."""

    host: str
    place: str
    python: str | None
    python_version: str


def refuse_missing_ssh_config(cluster: Cluster) -> None:
    """Raise UsageError if the file of ``cluster.ssh_config`` doesn't exist."""
    if cluster.ssh_config and not Path(cluster.ssh_config).is_file():
        of_lab = Path(cluster.ssh_config).parent.name == ".lab"
        raise UsageError(
            f"cluster.ssh_config={cluster.ssh_config} does not exist{': no lab is up here' if of_lab else ''}",
            hint="doit lab --hosts 2" if of_lab else "cluster.ssh_config=null, which takes your own ~/.ssh/config",
        )


class Transport(ABC):
    """The way to start the node agent on the hosts of a cluster: on all at once, or on one with a live stream."""

    silent_s: ClassVar[float] = 0.0  # how long a live agent may be silent; 0: until ssh notices a lost host
    starts_s: ClassVar[float] = 0.0  # the least time that a further connection takes

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        # how a host makes its identity, by its addresses or as this computer; it stands in every request
        self.access = Access(is_local=capabilities(cluster).is_this_computer)
        self.lock_file: LockFile | None = None  # from which hosts get their environment
        self.pythons: dict[str, str] = {}  # host label → the interpreter of its environment
        self.outputs: dict[str, Path] = {}  # host label → the file that receives what its command prints
        # set by the user of the transport: how long further connections may take (None: no host has answered yet), and
        # whether a connection broke or hangs, so that commands open connections of their own
        self.slow_s: float | None = None
        self.shares_connections = True

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec) -> str:
        """Return what plan.json and `doit plan` show of how hosts are reached. Pure."""
        return ""

    @abstractmethod
    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """Run the agent on ``hosts`` at once, each with the whole file ``stdin``. Returns host label → its output."""

    @abstractmethod
    def stream_argv(self, host: Host) -> list[str]:
        """Return the command of a live agent on one host."""

    def run_agent(self, host: Host, stdin: IO[bytes], timeout_s: float) -> Output:
        """Run the agent on one host to its end, with the whole file ``stdin``."""
        try:
            done = process.run_apart(self.stream_argv(host), stdin=stdin, timeout_s=timeout_s)
        except PacelineError as error:
            late = "still running" in error.what
            return Output(code=None, note=f"{LATE} {timeout_s:g} s" if late else error.what)
        return Output(stdout=done.stdout.encode(), stderr=done.stderr, code=done.code)

    @abstractmethod
    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        """Return why an answer failed, in plain words, and the command that fixes it (None: not known)."""

    def close(self) -> None:
        """Release connections and folders on this computer."""
        return


@dataclass(frozen=True, kw_only=True)
class GrantedJob:
    """One job of a scheduler for one run."""

    id: str
    title: str  # its name in messages
    show_command: str  # with which the user sees it
    end_command: str  # with which the user may end it
    folder: JobFolder  # shared by its nodes and the controller
    nnodes: int
    restart: int = 0  # how many times the scheduler had requeued it when all of its nodes had reported
    is_started: bool = False  # an attempt was started in it
    printed_bytes: int = 0  # the length of its output before its newest start


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job; its "own nodes" are those that it had in its restart ``GrantedJob.restart``."""

    words: str = ""  # what is waited for, as words that follow "still"
    phase: str = ""  # the scheduler's own word for it
    warning: str = ""  # what somebody has to do before the job can start
    is_unanswered: bool = False  # the scheduler doesn't answer now, so none of the following is known
    restart: int = 0  # how often the scheduler has taken its nodes away and granted it others
    is_running: bool = False  # its nodes may take a start
    is_leaving: bool = False  # the scheduler is about to take these nodes away
    is_over: bool = False  # the job won't run any more
    is_idle: bool = False  # nothing runs any more on its own nodes
    is_settled: bool = True  # the scheduler has decided what becomes of the job
    why_halted: str = ""  # why its ranks stand still
    why_gone: str = ""  # why its own nodes are no longer the run's
    remains: str = ""  # of a job that should have ended: the part that still runs, and the command that ends it
    outcome: Outcome = Outcome()  # what the scheduler did to it
    error: HostError | TrainingError | None = None  # why it ended before anything was started in it
    nodes: Mapping[str, str] = field(default_factory=dict)  # a node's own name → what it runs on, if that differs


class Scheduler(ABC):
    """A batch system that grants hosts by jobs, one a run; the nodes share the folder of runs with the controller."""

    name: ClassVar[str]  # in messages
    agent: ClassVar[str]  # the name in ``agent/schedulers.py`` by which an agent learns on which node of a job it runs
    folder: ClassVar[str]  # the folder below a run's that holds a folder for each job
    script: ClassVar[str]  # the file in a job's folder with what the scheduler got
    node_prefix: ClassVar[str] = ""  # pod0, pod1, … for Kubernetes' own long names; '': nodes keep their own names
    # it starts a job again whose nodes it has taken away, and removes an ended job by itself; else jobs of both kinds
    # stay until they are cancelled
    requeues: ClassVar[bool] = True
    end_s: ClassVar[float] = 20.0  # how long the end of a start or of a job may take
    settle_s: ClassVar[float] = 20.0  # how long it may take to decide what becomes of a job

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @classmethod
    @abstractmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        """Return the text that the scheduler gets. Pure. Raises UsageError: its nodes can't do this.

        ``nonce``: a job's own part of its name, and the name of its folder.
        """

    @abstractmethod
    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: JobRequest) -> GrantedJob:
        """Make ``folder`` and submit a job whose agents get ``request`` first. Raises HostError: it is refused."""

    @abstractmethod
    def jobs(self, run_key: str, run_dir: Path) -> list[GrantedJob]:
        """Return the scheduler's jobs of a run folder, the one to continue first. Raises PacelineError."""

    @abstractmethod
    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        """Return the state of a job. Raises HostError: the scheduler refuses to say.

        ``before``: an earlier state, which may hold what the scheduler has forgotten since.
        """

    @abstractmethod
    def cancel(self, job: GrantedJob) -> None:
        """End the job; one that is over is no error. Raises PacelineError."""

    @abstractmethod
    def rehearse(self) -> list[str]:
        """Describe the hosts that would be granted, a line each, without a job. Raises HostError: they are refused."""
