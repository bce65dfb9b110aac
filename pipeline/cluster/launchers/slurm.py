"""Hosts that Slurm grants: one batch job, whose nodes share the folder of runs with the controller."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster import launchers
from pipeline.cluster.launchers.agent_launcher import ENV_NAMES
from pipeline.cluster.launchers.base import AttemptSpec, Launcher, Outcome, PackSource, Place
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.slurm_folder import FOLDERS
from pipeline.cluster.launchers.slurm_follow import JobFollower
from pipeline.cluster.launchers.slurm_job import BatchJob, cancel_all
from pipeline.cluster.launchers.slurm_queue import Queue
from pipeline.cluster.launchers.slurm_script import Job, script
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster, Event, Host, LaunchPlan, NodeFacts
from pipeline.keys import rank_environment
from pipeline.runs import attempts
from trainers.core.config import ConfigError


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """What sbatch is told.

    Attributes:
        nnodes: how many nodes a job has.
        partition: as sbatch takes it; null: Slurm's default. So are the following.
        account: whose budget is charged.
        qos: quality of service.
        constraint: features that the nodes must have.
        gres: generic resources of each node; null: a GPU for each rank where cluster.device=cuda.
        cpus_per_task: cores of each node; null: as many as ranks.
        mem: memory of each node, such as 64G.
        time_limit: such as '4:00:00' or '2-00:00:00' (in quotes); null: the partition's.
        sbatch: further options of sbatch, such as [--exclusive].
        setup: shell lines before the agent starts, such as [module load cuda].
    """

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, hosts_are_granted=True)

    launcher: str = "slurm"
    nnodes: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time_limit: str | None = None
    sbatch: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "constraint", "gres", "mem"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^\s'\"\\#]+", value):
                raise ConfigError(f"cluster.{name}={value!r} can't stand in a line of sbatch: no spaces, quotes or #")
        if self.time_limit is not None and not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}", self.time_limit):
            raise ConfigError(
                f"cluster.time_limit={self.time_limit!r} must be minutes:seconds, hours:minutes:seconds or days-hours "
                "(in a file in quotes: YAML takes 1:00:00 for the number 3600)"
            )
        for option in self.sbatch:
            if not option.startswith("-"):
                raise ConfigError(f"cluster.sbatch: {option!r} is no option of sbatch; write [--exclusive]")


class SlurmLauncher(Launcher):
    """Submits one job for an attempt, or finds the one that an earlier command has submitted for the same run.

    On each node an agent waits for starts, which it is told through ``JobFolder``. After a bad end it waits for another
    one for half a minute, so that a further attempt needn't queue again.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._queue = Queue()
        self._job: BatchJob | None = None

    @property
    def capabilities(self) -> Capabilities:
        return launchers.capabilities(self.cluster)

    @property
    def job(self) -> BatchJob:
        """The job that ``grant`` has waited for."""
        if self._job is None:
            raise RuntimeError("no hosts were granted")
        return self._job

    # -------------------------------------------------------------------------------- the job
    def submission(self, spec: AttemptSpec) -> str:
        return self._script(spec.run_key, spec.run_dir, "<random>")

    def _script(self, run_key: str, run_dir: Path, nonce: str) -> str:
        host = self.cluster.hosts[0]
        return script(
            Job(
                name=f"{_name(run_key, run_dir)}{nonce}",
                folder=str(run_dir / FOLDERS / nonce),
                python=host.python or sys.executable,
                nnodes=self.cluster.nnodes,
                nproc_per_node=host.nproc_per_node,
                gpus=host.nproc_per_node if self.cluster.device == "cuda" else 0,
                settings=self.cluster.settings,
            )
        )

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> Cluster:
        write = partial(self._script, spec.run_key, spec.run_dir)
        name, nnodes = _name(spec.run_key, spec.run_dir), self.cluster.nnodes
        job = self._job = BatchJob(self._queue, write, name=name, run_dir=spec.run_dir, nnodes=nnodes)
        found = job.find(say)
        try:
            if not found:
                job.submit(self._request(spec, modules), self._told(), say)
            job.wait(say, check)
        except HostError:
            if not found:
                raise
            job.submit(self._request(spec, modules), self._told(), say)  # the one that was found has just ended
            job.wait(say, check)
        named = zip(self.cluster.hosts, job.facts(), strict=True)
        hosts = tuple(dataclasses.replace(host, name=fact["host"]) for host, fact in named)
        self.cluster = dataclasses.replace(self.cluster, hosts=hosts)
        return self.cluster

    def starting(self) -> str:
        return self._job.doing if self._job is not None else "asking Slurm"

    def _request(self, spec: AttemptSpec, modules: Sequence[str]) -> dict[str, Any]:
        """What every node of the job is asked first."""
        return {
            "do": "job",
            "lease_s": self.cluster.lease_s,
            "interface": self.cluster.hosts[0].interface,
            "env_passed": rank_environment.PASSED,
            "probe": {
                "workdir": str(spec.run_dir),
                "env_names": ENV_NAMES,
                "env_families": rank_environment.FAMILIES,
                "env_passed": rank_environment.PASSED,
                "modules": modules,
                "python_path": self.cluster.python_path,
                "pack_digest": spec.pack.digest if spec.pack else "",
                "pack_places": [str(spec.pack.path)] if spec.pack else [],
            },
        }

    def _told(self) -> dict[str, Any]:
        """The ranks' secret variables, and what hides these in their output."""
        hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in self.cluster.hosts))
        return {"env": dict(self.cluster.hosts[0].secrets), "hide": rules(hidden)}

    # ---------------------------------------------------------------------------- an attempt in it
    def probe(self, pack: PackSource | None, modules: Sequence[str] = ()) -> list[NodeFacts]:
        if self._job is None:
            raise self._nobody_to_ask()
        facts = [_facts(host, value) for host, value in zip(self.cluster.hosts, self._job.facts(), strict=True)]
        blind = [fact.host for fact in facts if pack is not None and fact.pack_path is None]
        if pack is not None and blind:
            raise HostError(
                f"{', '.join(blind)}: the data pack {pack.path} isn't there; all nodes must share the folder of data",
                hint="paths.data=<a folder on a file system that this computer and all nodes share>",
            )
        return facts

    def _nobody_to_ask(self) -> HostError:
        """For preflight: what can be told without a job. Raises HostError: Slurm would refuse it."""
        words = self._queue.rehearse(self._script("preflight", Path.cwd(), "rehearsal"))
        return HostError(
            f"Slurm names the nodes only when a job runs, so none can be asked now; it would take this one: {words}",
            hint="doit train asks each node before it starts anything there",
        )

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        number = self.cluster.hosts.index(host)
        state_dir = spec.run_dir / "attempts" / str(spec.attempt) / f"agent-{run_id}" / f"node{number}"
        data_dir = str(spec.pack.path) if spec.pack else ""
        return Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[NodeFacts], run_dir: Path) -> None:
        """The folders are made here, where one process makes them for all nodes."""
        if pack is not None and not (run_dir / "data").is_symlink():
            (run_dir / "data").symlink_to(pack.path)
        for node in plan.nodes:
            state_dir = Path(node.state_dir)
            state_dir.mkdir(mode=0o700, parents=True)
            for name in ("log", "lease", "attached"):
                (state_dir / name).touch()
        start = {
            "run_key": plan.run_key,
            "run_id": plan.run_id,
            "attempts": attempts.prefix_of(plan.run_id),
            "lease_s": plan.lease_s,
            "registry": str(run_dir.parent / ".agents"),
            "nodes": [{**dataclasses.asdict(node), "peers": [], "remove": [node.state_dir]} for node in plan.nodes],
        }
        self.job.start(start)

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> JobFollower:
        restart = self.job.state.restarts
        return JobFollower(plan, self.job.folder, restart, partial(self.job.gone, restart), emit)

    def outcome(self, plan: LaunchPlan) -> Outcome:
        return self.job.outcome()

    def stop(self, run_key: str, run_dir: Path, *, bar: str = "") -> dict[str, str]:
        if bar:  # one start, after which the job may be wanted for another
            return self.job.end_start()
        try:
            return cancel_all(self._queue, _name(run_key, run_dir), run_dir)
        except PacelineError as error:
            return {"Slurm": error.what}

    def clean(self, plan: LaunchPlan) -> None:
        for node in plan.nodes:
            shutil.rmtree(Path(node.state_dir).parent, ignore_errors=True)

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """The outputs lie in the run folder already."""
        return True

    def close(self) -> None:
        """Nothing is held: a job ends by itself, or is found again."""


def _facts(host: Host, value: dict[str, Any]) -> NodeFacts:
    """A node's answer with what the configuration says on top."""
    interface = host.interface or value["extra"]["interfaces"].get(value["address"])
    return NodeFacts(**{**value, "host": host.label, "interface": interface})


def _name(run_key: str, run_dir: Path) -> str:
    """How the names of all jobs of one run folder begin."""
    return f"paceline-{attempts.prefix(run_key, run_dir)}"
