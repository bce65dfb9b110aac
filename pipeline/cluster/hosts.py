"""The hosts of a cluster as a command uses them: their facts, what `doit sync` sends, and checks before any probe."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import lab
from pipeline.cluster import launchers, preflight, starts
from pipeline.cluster.agent.host.hardware import count_cpus
from pipeline.cluster.agent.requests import MakeEnvironmentRequest, PutWheelsRequest, WarmEnvironment
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec, Environment, LockFile, PackSource
from pipeline.cluster.launchers.transport.agent_client import Payload
from pipeline.cluster.launchers.transport.answers import Answer, ssh_command
from pipeline.cluster.launchers.transport.payload import append
from pipeline.cluster.validation import visible_gpus
from pipeline.core import places
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.threads import WaitReports
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from pipeline.keys import rank_environment
from trainers.contract.host_facts import HostFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

_MAX_RANKS_PER_CORE = 2  # more than this is worth a warning


class Hosts:
    """The hosts of a cluster with a launcher that reaches them, and their facts, kept from one attempt to the next."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._launcher: Launcher | None = None
        self._facts: list[HostFacts] = []
        self._pack: PackSource | None = None  # for which the hosts were probed
        self._modules: frozenset[str] = frozenset()  # whose versions were asked for
        self._ports: list[int] = []  # free on node 0
        self._connected = False  # whether all hosts have connected to each other
        self._network_note = ""
        self._reported: set[str] = set()  # remarks that ``notes`` has returned
        self._checks: list[preflight.Check] | None = None

    @property
    def launcher(self) -> Launcher:
        """The launcher, created on first use. Raises HostError."""
        if self._launcher is None:
            self._launcher = launchers.create(self.cluster)
        return self._launcher

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        """Wait until the scheduler, if the cluster has one, grants the hosts of an attempt. Raises HostError."""
        if not isinstance(self.launcher, AgentLauncher):
            self.cluster = self.launcher.grant(spec, modules, say, check)
            self.forget_facts()

    def give_back(self, spec: AttemptSpec) -> None:
        """Return granted hosts to the scheduler."""
        if self._launcher is not None and not isinstance(self._launcher, AgentLauncher):
            self._launcher.stop(spec.run_key, spec.run_dir)

    def facts(
        self, pack: PackSource | None, modules: Collection[str] = (), warm: WarmEnvironment | None = None
    ) -> list[HostFacts]:
        """Return the facts of each host, by a probe unless the last one asked for the same. Raises HostError.

        ``modules``: whose installed versions to report. ``warm``: environment for warm parents to start now.
        """
        lacks_pack = pack is not None and any(not fact.pack_path for fact in self._facts)  # a start may have sent it
        if not self._facts or self._pack != pack or lacks_pack or not self._modules.issuperset(modules):
            self._modules |= frozenset(modules)
            self._facts, self._pack = self.launcher.probe(pack, sorted(self._modules), warm), pack
            self._checks = None
            self._ports = [*self._facts[0].free_ports]
            self._connected = False
        return self._facts

    def clear_leftovers(self, runs_dir: Path) -> list[str]:
        """Remove folders of old attempts that no run in ``runs_dir`` needs; return lines about what was removed."""
        lines = starts.clear_leftovers(self.launcher, self._facts, runs_dir)
        self._facts = [fact._replace(left_folders=()) for fact in self._facts]  # once after each probe
        return lines

    def connect(self) -> list[HostFacts]:
        """Find, once, a network over which all hosts reach each other; return the facts with their addresses in it.
        Raises HostError: there is none."""
        if not self._connected:
            self._facts, self._network_note = self.launcher.connect(self._facts)
            self._connected = True
        return self._facts

    def checks(self) -> list[preflight.Check]:
        """Return the results of the quick preflight checks, which precede every training, by the last facts."""
        if self._checks is None:
            # a single node needs none: its start shows what it lacks
            self._checks = preflight.judge(self.cluster, self._facts) if self.cluster.nnodes > 1 else []
        return self._checks

    def ports(self) -> list[int]:
        """Return ports that were free on node 0; each call starts with another one."""
        self._ports = [*self._ports[1:], *self._ports[:1]]
        return self._ports

    def notes(self, facts: Sequence[HostFacts]) -> list[str]:
        """Return remarks about the hosts' shells, checks and network that were not returned before."""
        shell = "this shell" if self.launcher.capabilities.shares_run_dir else "the login shell there"
        not_passed = {fact.host: _without_own_paths(fact.not_passed) for fact in facts}
        lines = [
            *filter(None, [self._network_note]),
            *rank_environment.dropped_lines(not_passed, whose=shell),
            *preflight.warnings(self.checks()),
        ]
        new = [line for line in lines if line not in self._reported]
        self._reported.update(new)
        return new

    def forget_facts(self) -> None:
        """Drop the facts, which may be outdated after a failure or a wait."""
        self._facts = []

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()


def _without_own_paths(variables: Mapping[str, str]) -> dict[str, str]:
    """Drop a PYTHONPATH that only makes Paceline or the project importable, because a run has copies of both."""
    ours = {("PYTHONPATH", str(folder)) for folder in (places.HOME, places.ROOT)}
    return dict(variables.items() - ours)


# ----------------------------------------------------------------------------------- data and environments (doit sync)
# messages of pip and uv on a host without a network
_NO_NETWORK = re.compile(r"NewConnectionError|from versions: none|name resolution|dns error|[Nn]etwork is unreach")
_INSTALL_TIMEOUT_S = 7200.0


def remote_launcher(cluster: Cluster) -> AgentLauncher:
    """Return a launcher of hosts with files of their own, to be closed by the caller. Raises UsageError, HostError."""
    if launchers.capabilities(cluster).shares_run_dir:
        raise UsageError(
            f"doit sync brings files to other hosts, and cluster.launcher={cluster.launcher} lets ranks read files of "
            "this computer or a shared folder",
            hint="cluster=pssh cluster.hostfile=FILE, or cluster=two_node after doit lab --hosts 2",
        )
    launcher = launchers.create(cluster)
    assert isinstance(launcher, AgentLauncher)  # granted hosts share the folder of runs
    return launcher


def send_pack(launcher: AgentLauncher, pack: PackSource, reports: WaitReports) -> list[HostFacts]:
    """Send the data pack to the hosts that lack it, and return the facts of all. Raises HostError."""
    reports.doing("asking the hosts")
    facts = launcher.probe(pack)
    if all(fact.pack_path for fact in facts):
        return facts
    reports.doing(launcher.starting)
    launcher.send_pack(pack, facts)
    return launcher.probe(pack)


def ensure_environments(launcher: AgentLauncher, lock: LockFile, reports: WaitReports) -> list[Environment]:
    """Make the Python environments that are missing, and return those of all hosts. Raises HostError."""
    reports.doing("looking for the environment")
    environments = launcher.environments(lock)
    pairs = zip(launcher.cluster.hosts, environments, strict=True)
    lacking = [host for host, environment in pairs if environment.python is None]
    if not lacking:
        return environments
    if (wheels := lock.wheelhouse) is not None:
        reports.doing(launcher.starting)
        request = PutWheelsRequest(folder=f"{launcher.workdir}/wheelhouse")
        payload = Payload(name="the wheelhouse", append=lambda stdin: append(stdin, wheels, "."))
        launcher.client.demand("sending the wheelhouse", request, hosts=lacking, payload=payload)
    _make(launcher, lock, lacking, reports)
    return launcher.environments(lock)


def _make(launcher: AgentLauncher, lock: LockFile, hosts: Sequence[Host], reports: WaitReports) -> None:
    """Make the environment on these hosts, all at once. Raises HostError."""
    count = len(re.findall(r"^[A-Za-z0-9]", lock.text, re.MULTILINE))  # includes packages for other systems
    labels = [host.label for host in hosts]

    def progress() -> str:
        installed = launcher.client.reported_counts(labels)
        each = ", ".join(f"{label} {installed.get(label, 0)}" for label in labels)
        return f"making the environment, of at most {count} packages: {each}"

    def explained(host: Host, answer: Answer) -> tuple[str, str | None]:
        """Return (error, hint) of a host; where the installer failed, the hint is the command that repeats it."""
        if answer.value is None or "repeat" not in answer.value:
            return launcher.transport.explain(host, answer)
        repeat = str(answer.value["repeat"]).replace("'", "'\\''")
        error, hint = str(answer.reported_error), f"{ssh_command(host, launcher.cluster.ssh_config)} '{repeat}'"
        if lock.wheelhouse is None and _NO_NETWORK.search(error):
            download = f"python -m pip download --no-deps --require-hashes -r {shlex.quote(str(lock.path))} -d wheels"
            hint = f"{download}, then the same command with cluster.wheelhouse=wheels; or once it has a network {hint}"
        return error, hint

    reports.doing(progress)
    wheelhouse = None if lock.wheelhouse is None else f"{launcher.workdir}/wheelhouse"
    request = MakeEnvironmentRequest(launcher.workdir, lock.sha256, lock.text, wheelhouse)
    answers = launcher.client.ask(request, hosts=hosts, timeout_s=_INSTALL_TIMEOUT_S)
    rows, hints = launcher.client.failures(answers, explained)
    if rows:
        what = f"the environment could not be made on {len(rows)} of {launcher.cluster.nnodes} hosts"
        raise HostError("\n".join([what, *rows]), hint=hints[0] if hints else None)


# ------------------------------------------------------------------------- what is known before any host is asked
def check_cluster(cluster: Cluster, *, root: Path, local_gpus: int) -> str:
    """Check a cluster before any host is asked; return a warning, or ''. Raises UsageError: no GPU, or no lab is up."""
    if not launchers.capabilities(cluster).is_this_computer:
        refuse_without_lab(cluster, root)
        return ""
    (host,) = cluster.hosts
    gpus = visible_gpus(local_gpus, host.env)
    if cluster.device == "cuda" and not gpus:
        raise UsageError(
            "cluster.device=cuda: this computer has no GPU that CUDA may see",
            hint="cluster.device=cpu, or a cluster that has GPUs: cluster=pssh cluster.hosts=[HOST]",
        )
    ranks, cores = host.nproc_per_node, count_cpus()
    if cluster.device == "cuda" or ranks <= _MAX_RANKS_PER_CORE * cores:  # ranks on GPUs need few cores
        return ""
    return (
        f"WARNING: {ranks} ranks on {counted(cores, 'core')}: they wait for each other; "
        f"cluster.nproc_per_node={cores} is faster"
    )


def refuse_without_lab(cluster: Cluster, root: Path) -> None:
    """Raise UsageError if the hosts are those of this project's lab (`doit lab`), and the lab isn't up."""
    config = cluster.ssh_config
    if config is None or Path(config).resolve() != (root / ".lab" / "ssh_config").resolve():
        return
    lab_status = lab.status(root)
    if lab_status is None or not lab_status.running:
        state, hosts = ("isn't up", cluster.hosts) if lab_status is None else ("is down", lab_status.hosts)
        raise UsageError(
            f"the lab of this project {state}, and {config} names its hosts",
            hint=f"doit lab --hosts {len(hosts)}; or hosts of your own: cluster=pssh cluster.hosts=[HOST1,HOST2]",
        )
