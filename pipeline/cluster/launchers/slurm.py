"""Hosts that Slurm grants: one batch job, whose nodes share the folder of runs with the controller."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster.launchers.base import AttemptSpec, Launcher
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.slurm_array import Arrays
from pipeline.cluster.launchers.slurm_job import BatchJob, cancel_all
from pipeline.cluster.launchers.slurm_queue import Queue
from pipeline.cluster.launchers.slurm_script import FOLDERS, NAME_PREFIX, Job, script
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster
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
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ConfigError(f"cluster.cpus_per_task={self.cpus_per_task} must be null or a whole number from 1")
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem, re.IGNORECASE):
            raise ConfigError(
                f"cluster.mem={self.mem!r} must be a size that sbatch knows, such as 64G (0: all of a node)"
            )
        if self.time_limit is not None and not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}", self.time_limit):
            raise ConfigError(
                f"cluster.time_limit={self.time_limit!r} must be minutes:seconds, hours:minutes:seconds or days-hours "
                "(in a file in quotes: YAML takes 1:00:00 for the number 3600)"
            )
        from pipeline.cluster.launchers.slurm_script import unfit  # settings are read without their module

        for option in self.sbatch:
            if why := unfit(option):
                raise ConfigError(f"cluster.sbatch: {option!r} {why}")
        for line in self.setup:
            if line.startswith("#SBATCH"):
                raise ConfigError(f"cluster.setup: {line!r} is an option of sbatch; write it into cluster.sbatch")


class SlurmLauncher(GrantedLauncher):
    """Submits one job for an attempt, or finds the one that an earlier command has submitted for the same run."""

    scheduler = "slurm_node"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._queue = Queue()
        self._arrays = Arrays(self._queue)

    def beside(self, first: Launcher, count: int) -> None:
        assert isinstance(first, SlurmLauncher)
        self._arrays = Arrays(self._queue, count) if self is first else first._arrays

    def submission(self, spec: AttemptSpec) -> str:
        return script(self._job_of(spec.run_key, spec.run_dir, "<random>"))

    def _job_of(self, run_key: str, run_dir: Path, nonce: str) -> Job:
        host = self.cluster.hosts[0]
        return Job(
            name=f"{_name(run_key, run_dir)}{nonce}",
            folder=str(run_dir / FOLDERS / nonce),
            python=host.python or sys.executable,
            nnodes=self.cluster.nnodes,
            nproc_per_node=host.nproc_per_node,
            gpus=host.nproc_per_node if self.cluster.device == "cuda" else 0,
            settings=self.cluster.settings,
        )

    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> Cluster:
        make = partial(self._job_of, spec.run_key, spec.run_dir)
        name, nnodes = _name(spec.run_key, spec.run_dir), self.cluster.nnodes
        job = self._job = BatchJob(self._arrays, make, name=name, run_dir=spec.run_dir, nnodes=nnodes)
        found = job.find(say)
        try:
            if not found:
                job.submit(self.request(spec, modules), self._told(), say)
            job.wait(say, check)
        except HostError:
            if not found:
                raise
            job.submit(self.request(spec, modules), self._told(), say)  # the one that was found has just ended
            job.wait(say, check)
        return self.named([fact["host"] for fact in job.facts()])

    def _told(self) -> dict[str, Any]:
        """The ranks' secret variables, and what hides these in their output."""
        hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in self.cluster.hosts))
        return {"env": dict(self.cluster.hosts[0].secrets), "hide": rules(hidden)}

    def rehearse(self) -> list[str]:
        words = self._queue.rehearse(script(self._job_of("preflight", Path.cwd(), "rehearsal")))
        return [f"Slurm would take such a job: {words}"]

    def cancel_all(self, run_key: str, run_dir: Path) -> dict[str, str]:
        try:
            return cancel_all(self._queue, _name(run_key, run_dir), run_dir)
        except PacelineError as error:
            return {"Slurm": f"{error.what}; its nodes were told through the run folder and end by themselves"}


def _name(run_key: str, run_dir: Path) -> str:
    """How the names of all jobs of one run folder begin."""
    return f"{NAME_PREFIX}{attempts.prefix(run_key, run_dir)}"
