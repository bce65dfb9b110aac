"""The records that controller and node agents exchange: requests, orders to the nodes of a job, and reports.

An agent process answers one request and ends. Only in a scheduler's job an agent stays, and takes orders from a file.
A request lists all nodes, and each agent finds its own one by the identity. "~/" in paths is the home of the login.
"""

# No ``from __future__ import annotations``: ``from_json`` needs the types. Python 3.9 has no ``X | None``.
# ruff: noqa: UP045
import json
from typing import Any, NamedTuple, Optional

from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import Container, HeldClaim
from trainers.contract.records import as_json, from_json

# ------------------------------------------------------------------------------------------------ parts of requests


class Access(NamedTuple):
    """How the controller reaches a host. The host computes its identity from that (``node.identity``)."""

    is_local: bool = False  # no ssh server is involved: the host is the controller's computer, or a node of a job
    host_names: tuple[str, ...] = ()  # of all hosts, so that a host without ssh finds its address towards the others
    identity: str = ""  # the identity itself, if the host is a node of a job and has computed it before


class RequestedContainer(NamedTuple):
    """The container that the ranks are to run in, before a host has looked for its image."""

    image: str  # as configured: a name of podman or docker, or the file of apptainer
    mounts: tuple[str, ...]  # folders and files of the host that the ranks see, under the same paths
    gpus: bool  # whether the ranks use GPUs


class WarmEnvironment(NamedTuple):
    """The environment for a warm parent: a process that imports torch during the probe, and forks the ranks later."""

    env: dict[str, str]  # variables of the ranks that are known before the probe
    ranks_per_host: int  # they share the host's cores, which decides their number of threads; 0: one thread each


class ClaimRequest(NamedTuple):
    """A claim to make: which devices of one host a run will compute on (docs/sharing-hosts.md)."""

    resources: tuple[str, ...]  # gpu:0, gpu:1, …, or cpu
    attempt_prefix: str  # of the ids of all attempts of the run folder, which never refuse each other
    group: str  # equal for all runs of one controller, which schedules them itself
    title: str  # of the run, for other users of the host
    refuses_others: bool  # whether claims of others on the same devices make the start fail

    def collides_with(self, held: HeldClaim) -> bool:
        """Return whether another run, of another controller, holds one of the requested devices."""
        is_other = held.attempt_prefix != self.attempt_prefix and held.group != self.group
        return is_other and not set(held.resources).isdisjoint(self.resources)


class NodeStart(NamedTuple):
    """One node's part of a start. Requests that start nothing leave the fields with defaults out."""

    host: str  # its label in the configuration
    identity: str
    node_rank: int
    first_rank: int  # the global rank of its local rank 0
    run_dir: str
    state_dir: str  # the agent's own files
    own_folders: tuple[str, ...]  # folders that exist for this start alone, and are removed after the run
    nproc_per_node: int = 1
    argv: tuple[str, ...] = ()  # the command, which runs in ``run_dir``
    env: dict[str, str] = {}  # noqa: RUF012 - added to the host's variables that reach the ranks
    data_dir: str = ""  # the data pack; "": the run needs none
    container: Optional[Container] = None
    claim: Optional[ClaimRequest] = None


class Secrets(NamedTuple):
    """The secret variables of a job's ranks. They travel in the job's environment, so that no file holds them."""

    env: dict[str, str] = {}  # noqa: RUF012
    masking_rules: tuple[tuple[str, str], ...] = ()  # (pattern, replacement), to hide the values in the ranks' output


# --------------------------------------------------------------------------------------------------------- requests


class ProbeRequest(NamedTuple):
    """Return the facts of this host (``HostFacts``)."""

    workdir: str  # cluster.workdir: where files of runs are sent to
    registry: str = ""  # folder in which supervisors register (``running/registry.py``)
    tests_writing: bool = False  # files will be sent: try to write, and report what earlier attempts have left
    env_names: tuple[str, ...] = ()  # patterns of variables to report, because they choose network interfaces
    env_families: tuple[str, ...] = ()  # the same, because they change arithmetic and don't reach the ranks
    env_passed: tuple[str, ...] = ()  # patterns of variables that reach the ranks
    modules: tuple[str, ...] = ()  # distributions and modules whose versions to report
    python_path: tuple[str, ...] = ()  # folders besides those of the interpreter in which to look for modules
    pack_digest: str = ""  # of the data pack to look for; "": none
    pack_folders: tuple[str, ...] = ()  # where else the data pack may be
    gpu_s: float = 0.0  # how long nvidia-smi may take; 0: it isn't run
    container: Optional[RequestedContainer] = None
    warm: Optional[WarmEnvironment] = None
    access: Access = Access()


class ListeningNode(NamedTuple):
    """The ports at which one node listens while the hosts try to reach each other."""

    identity: str
    address: str
    ports: tuple[int, ...]


class ReachRequest(NamedTuple):
    """Listen, connect to the ports of all other nodes, and return what failed."""

    nodes: tuple[ListeningNode, ...]
    hello: str  # the greeting of a node
    answer: str  # the reply, which only nodes of this check know
    slow_s: float = 0.0  # how much longer than usual a login may take
    access: Access = Access()


class FindEnvironmentRequest(NamedTuple):
    """Return where the Python environment made from a lock file is, and whether it exists."""

    workdir: str
    lock_sha256: str
    access: Access = Access()


class MakeEnvironmentRequest(NamedTuple):
    """Install a lock file into a new environment."""

    workdir: str
    lock_sha256: str
    lock: str  # its text
    wheelhouse: Optional[str] = None  # folder of wheels; None: the host has a network
    access: Access = Access()


class PutPackRequest(NamedTuple):
    """Unpack the data pack from the tar that follows."""

    workdir: str
    pack_digest: str
    access: Access = Access()


class PutWheelsRequest(NamedTuple):
    """Unpack a folder of wheels from the tar that follows."""

    folder: str
    access: Access = Access()


class StartRequest(NamedTuple):
    """Start a run's processes here, and leave a supervisor behind (``running/``). Files may follow, as a tar."""

    run_key: str
    run_id: str  # of this start
    attempt_prefix: str  # of the ids of all attempts of the run folder
    registry: str  # folder in which supervisors register
    lease_s: float  # how long ranks go on without a controller
    nodes: tuple[NodeStart, ...]
    env_passed: tuple[str, ...] = ()  # patterns of the host's variables that reach the ranks
    masking_rules: tuple[tuple[str, str], ...] = ()  # (pattern, replacement), to hide secrets in the ranks' output
    rendezvous: Optional[tuple[str, int]] = None  # address and port of the first node; None: a single node
    pack_digest: str = ""
    sends_files: bool = False  # code, configuration and checkpoints follow
    uses_warm_parent: bool = False
    slow_s: float = 0.0  # how much longer than usual a login may take
    access: Access = Access()


class FollowRequest(NamedTuple):
    """Stream the log, rank 0's metrics and the end of a start. Heartbeats and orders follow on standard input."""

    run_id: str
    nodes: tuple[NodeStart, ...]
    log_offset_bytes: int = 0  # where the part of the log begins that the controller doesn't have yet
    metrics_offset_bytes: int = 0  # the same for metrics.jsonl
    sends_metrics: bool = False  # False: the controller shares the folder, and reads metrics.jsonl itself
    is_script: bool = False  # the names of checkpoints are the script's own
    access: Access = Access()


class CollectRequest(NamedTuple):
    """Send files of the run folder as a tar."""

    nodes: tuple[NodeStart, ...]
    patterns: tuple[str, ...]  # of files and folders, relative to the run folder
    work_patterns: tuple[str, ...] = ()  # the same for working directories of scripts
    limit_bytes: Optional[int] = None  # larger working directories stay on the node
    # unix time of the node: files written later are left out, as they may be incomplete
    until_s: Optional[float] = None
    settled_s: Optional[float] = None  # in place of ``until_s``: files written in the last seconds are left out
    stamps_file: str = ""  # in the run folder: path → size and modification time of files to leave out if unchanged
    access: Access = Access()


class CleanRequest(NamedTuple):
    """Remove this node's folders of a run."""

    nodes: tuple[NodeStart, ...]
    access: Access = Access()


class StandingRequest(NamedTuple):
    """Return whether this node's part of a start still runs, or how it ended."""

    nodes: tuple[NodeStart, ...]
    access: Access = Access()


class StopRequest(NamedTuple):
    """End everything of one run folder on this node."""

    attempt_prefix: str  # of the ids of all attempts of the run folder
    registry: str
    refused_run_id: str = ""  # of a start that may still be on its way and is refused from now on
    access: Access = Access()


class RemoveFoldersRequest(NamedTuple):
    """Remove folders of attempts that are over, unless they are in use."""

    workdir: str
    registry: str
    folders: dict[str, tuple[str, ...]]  # identity of a node → its folders: ``RUN ID/node0``, …
    access: Access = Access()


class JobRequest(NamedTuple):
    """Serve as a node of a scheduler's job (``running/job``): report facts, then execute one start after another."""

    scheduler: str  # a key of ``schedulers.SCHEDULERS``
    folder: str  # for orders and reports, shared by the job's nodes and the controller
    lease_s: float  # how long the node waits for its first start
    probe: ProbeRequest
    interface: Optional[str] = None  # the network interface of the ranks
    env_passed: tuple[str, ...] = ()  # as in a ``StartRequest``
    has_secrets: bool = False  # the ranks have secret variables, which travel in the job's environment
    env_from: tuple[str, ...] = ()  # variables of the pod that come from Secrets
    masking_rules: tuple[tuple[str, str], ...] = ()
    access: Access = Access()


HANDLERS: dict[type, str] = {
    ProbeRequest: "host.probe:probe",
    ReachRequest: "host.reach:reach",
    FindEnvironmentRequest: "host.environments:find_environment",
    MakeEnvironmentRequest: "host.environments:make_environment",
    PutPackRequest: "files.folders:put_pack",
    PutWheelsRequest: "files.folders:put_wheels",
    StartRequest: "running.start:start",
    FollowRequest: "running.follow:follow",
    CollectRequest: "files.results:collect",
    CleanRequest: "files.folders:clean",
    StandingRequest: "running.registry:standing",
    StopRequest: "running.registry:stop",
    RemoveFoldersRequest: "files.leftovers:remove_folders",
    JobRequest: "running.job:job",
}
"""Request → module and function of the agent that answer it; the module is imported on use."""


Request = NamedTuple
"""A record of one of these types."""


def encode(request: Request, token: str) -> bytes:
    """Return a request as JSON. ``token``: a random text that will stand in front of each answer (``wire.say``)."""
    return json.dumps({"request": type(request).__name__, "token": token, "fields": as_json(request)}).encode()


def decode(data: bytes) -> tuple[Any, str]:
    """Return a request and its token. Raises ValueError: it is none of these requests."""
    value = json.loads(data)
    kind = next((kind for kind in HANDLERS if kind.__name__ == value["request"]), None)
    if kind is None:
        raise ValueError(f"{value['request']} is no request")
    if unknown := value["fields"].keys() - kind.__annotations__.keys():
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    return from_json(kind, value["fields"]), value["token"]


# ------------------------------------------------------------------------------ orders to the nodes of a job, in a file


class ExamineOrder(NamedTuple):
    """Examine the ranks of this node, or try to reach the ssh servers of other nodes (``examination.examine``)."""

    peers: tuple[tuple[str, int], ...] = ()  # (address, port) of ssh servers to reach; empty: examine the ranks
    with_stacks: bool = True  # also have ranks write their stacks and collectives, which interrupts them


class JobOrder(NamedTuple):
    """An order to all nodes of a job: exactly one of the fields below ``restart`` is set."""

    restart: Optional[int] = None  # for the job after the scheduler has requeued it so often; None: for any
    start: Optional[StartRequest] = None
    examine: Optional[ExamineOrder] = None
    end_start: bool = False
    leave: bool = False  # end everything, and let the job end


# --------------------------------------------------------- reports: records in answers and in files of a run's node


class RankFailure(NamedTuple):
    """The error of one rank, from its own files or from torchrun; ``rank`` is global."""

    rank: int
    unix_time: float  # by the node's clock
    message: str
    traceback: str = ""


class NodeEnd(NamedTuple):
    """How a node's part of a start ended: ``exit.json`` in its state folder."""

    code: int  # torchrun's exit code; negative: the signal that ended it
    reason: str = ""
    errors: tuple[RankFailure, ...] = ()  # the earliest first
    tail: tuple[str, ...] = ()  # torchrun's last lines
    gone: bool = True  # False: some processes could not be ended
    lost: bool = False  # the supervisor was killed or frozen, and another process wrote this
    outlived: str = ""  # commands of processes that went on after a script's end, until the agent ended them


class Standing(NamedTuple):
    """Whether a node's part of a start still runs."""

    identity: str  # of the node
    alive: bool
    code: Optional[int] = None  # None: it still runs, nothing of it is there, or its supervisor was killed
    reason: str = ""
    errors: tuple[RankFailure, ...] = ()


class Lines(NamedTuple):
    """Whole lines of a node's log or of metrics.jsonl, with their byte range in that file."""

    file: str  # log or metrics
    texts: tuple[str, ...]
    start_bytes: int
    end_bytes: int


class TarHead(NamedTuple):
    """The answer to a ``CollectRequest`` in front of the tar."""

    too_large_bytes: Optional[int] = None  # size of working directories that stay on the node; None: they are sent


class TarTrailer(NamedTuple):
    """The answer to a ``CollectRequest`` behind the tar."""

    unsent: dict[str, str]  # file that could not be sent → why; only the first ones
    unsent_count: int  # number of all files that could not be sent


class RegistryEntry(NamedTuple):
    """A registered supervisor: a file in the registry, and ``agent.json`` in its state folder."""

    identity: str  # of its node
    run_key: str
    run_id: str
    mark: str  # ``RUN_ID:NODE_RANK``, in the environment of all processes of the start
    pid: int
    born: Optional[str]  # when process ``pid`` started: another process may have that number later
    state_dir: str
    run_dir: str = ""
    remove: tuple[str, ...] = ()  # folders of the attempt
    container: Optional[Container] = None


class JobReport(NamedTuple):
    """A line of a job's node: its facts, the end of a start, or an examination of the ranks."""

    restart: int  # how often the scheduler had requeued the job; 0 at first
    now: float  # unix time of the node
    facts: Optional[dict[str, Any]] = None  # ``HostFacts`` as JSON; the controller reports each wrong field
    run_id: str = ""  # of the start that the following fields belong to
    end: Optional[NodeEnd] = None
    was_terminated: bool = False  # the scheduler has ended the start with SIGTERM
    examination: Optional[NodeExamination] = None


class JobBeat(NamedTuple):
    """The newest states of the ranks on a job's node."""

    run_id: str
    unix_time: float
    beat: NodeBeat
