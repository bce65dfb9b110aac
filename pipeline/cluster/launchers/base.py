"""The interface of a launcher: a ``Transport`` to known hosts, or a ``Scheduler`` that grants hosts.

A launcher's module derives one class from one of the two. Everything else is shared: ``AgentLauncher`` runs attempts
over any transport, ``GrantedLauncher`` runs them in a job of any scheduler. On the hosts both use the node agent
(``cluster/agent``), whose code travels there with each request.
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
    """The data pack (the data as nodes read them) on the controller."""

    path: Path
    digest: str  # by which hosts name it
    inside: tuple[str, ...] = ()  # paths in it that a script gets as {data}, {data2}, …


@dataclass(frozen=True, kw_only=True)
class AttemptSpec:
    """What one attempt runs, before any host is probed."""

    run_dir: Path  # absolute; holds config.json and code/
    run_key: str  # names the run on the hosts
    attempt: int  # counts from 1
    # the module that each rank runs; for a script: the module that starts torchrun, or the script itself
    trainer: str
    pack: PackSource | None = None  # None: the attempt needs no data
    outputs: Outputs = TRAINING_OUTPUTS  # what rank 0 leaves
    # package → version in the key; hosts with other versions are refused
    versions: Mapping[str, str] = field(default_factory=dict)
    is_restart: bool = False  # the same command has used the hosts before, so if they are busy now it waits
    # If a host can't be reached, its ranks may run until ``lease_s`` after they last heard of the controller. True: a
    # spare host takes its place, so nobody waits for that.
    replaceable: bool = False
    script: str | None = None  # its path in the snapshot; "": another program; None: the built-in training
    project: str = ""  # the checkout that the script belongs to
    uses_torchrun: bool = True


def workdir_of(cluster: Cluster) -> str:
    """Return the folder for Paceline's files on a host that doesn't share the run folder (``~`` is the host's)."""
    return cluster.settings.workdir or "~/.cache/paceline"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launcher knows about a failed attempt in addition to how its nodes ended."""

    text: str = ""  # appended to what the nodes report
    hint: str | None = None  # what helps
    cause: str = ""  # as in TrainingError; "": it follows from how the nodes ended
    again: bool = False  # the scheduler took the hosts away and will grant others: the attempt is made once more


@dataclass(frozen=True, kw_only=True)
class LockFile:
    """A pip lock file from which hosts make their Python environment (``cluster.environment_from``)."""

    path: Path
    wheelhouse: Path | None  # a local folder with its wheels; None: hosts download them

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
    """The Python environment that one host has made, or will make, of a lock file."""

    host: str
    place: str  # its folder there
    python: str | None  # its interpreter; None until it is made
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
        self.access = Access(is_local=capabilities(cluster).is_this_computer)  # sent with every request
        self.lock_file: LockFile | None = None  # from which hosts get their Python environment
        self.pythons: dict[str, str] = {}  # host label → the interpreter of that environment
        self.outputs: dict[str, Path] = {}  # host label → the file that receives what its command prints
        # Set by the caller: how long further connections may take (None: no host has answered yet), and whether they
        # may share an open one; False after that broke or hangs.
        self.slow_s: float | None = None
        self.shares_connections = True

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec) -> str:
        """Return what plan.json and `doit plan` show of how hosts are reached. Pure."""
        return ""

    @abstractmethod
    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """Run the agent on ``hosts`` at once, each with the whole file ``stdin``. Returns host label → output."""

    @abstractmethod
    def stream_argv(self, host: Host) -> list[str]:
        """Return the command that starts the agent on one host, connected to the command's stdin and stdout."""

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
    """One job of a scheduler for one run. In it several attempts may be started, one after the other."""

    id: str
    title: str  # its name in messages
    show_command: str  # by which the user can look at it
    end_command: str  # by which the user can end it
    folder: JobFolder  # shared by its nodes and the controller
    nnodes: int
    restart: int = 0  # how often it had been requeued when the nodes reported on which the run was started
    is_started: bool = False  # an attempt was started in it
    printed_bytes: int = 0  # the length of its output before its newest start


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job by its scheduler. Each requeue gives the job other nodes, and ``restart`` counts the requeues.

    "The run's nodes" are the nodes on which the run was started, when ``restart`` was ``GrantedJob.restart``.
    """

    words: str = ""  # what the command waits for, as words that follow "still"
    phase: str = ""  # the scheduler's own word for it
    warning: str = ""  # what somebody has to do before the job can start
    is_unanswered: bool = False  # the scheduler doesn't answer now, so none of the following is known
    restart: int = 0  # how often the job has been requeued until now: the scheduler took its nodes and gave it others
    is_running: bool = False  # an attempt can be started on its nodes
    is_leaving: bool = False  # the scheduler is about to take these nodes away
    is_over: bool = False  # the job won't run any more
    is_idle: bool = False  # nothing runs any more on the run's nodes
    is_settled: bool = True  # the scheduler has decided whether the job ends or is requeued
    why_halted: str = ""  # why the ranks make no progress, such as a suspended job; "": they aren't halted
    why_gone: str = ""  # why the run no longer has its nodes; "": it has them
    remains: str = ""  # of a job that should have ended: the part that still runs, and the command that ends it
    outcome: Outcome = Outcome()  # what the scheduler did to the job
    error: HostError | TrainingError | None = None  # why it ended before anything was started in it
    nodes: Mapping[str, str] = field(default_factory=dict)  # a node's own name → what it runs on, if that differs


class Scheduler(ABC):
    """A batch system that grants hosts by jobs, one for a run; nodes and controller share the folder of runs."""

    name: ClassVar[str]  # in messages
    agent: ClassVar[str]  # the name in ``agent/schedulers.py`` of how an agent learns on which node of a job it runs
    folder: ClassVar[str]  # the folder in a run folder that holds a folder for each job
    script: ClassVar[str]  # the file in a job's folder with the text that the scheduler got
    node_prefix: ClassVar[str] = ""  # nodes with long names are called pod0, pod1, …; "": they keep their names
    # True: a job whose nodes are taken away is requeued, and ended jobs are removed. False: a job whose nodes are taken
    # away ends, and ended jobs stay until they are cancelled.
    requeues: ClassVar[bool] = True
    end_s: ClassVar[float] = 20.0  # how long the end of an attempt or of a job may take
    settle_s: ClassVar[float] = 20.0  # how long it may take to decide whether a job ends or is requeued

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @classmethod
    @abstractmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        """Return the script or manifest for the scheduler. Pure. Raises UsageError: its nodes can't run this.

        ``nonce``: the random end of the job's name, and the name of its folder.
        """

    @abstractmethod
    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: JobRequest) -> GrantedJob:
        """Make ``folder`` and submit a job whose agents begin with ``request``. Raises HostError: it is refused."""

    @abstractmethod
    def jobs(self, run_key: str, run_dir: Path) -> list[GrantedJob]:
        """Return the scheduler's jobs of a run folder, first the one to continue. Raises PacelineError."""

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
        """Ask, without a job, whether one would get its hosts; return lines for the user. Raises HostError: no."""
