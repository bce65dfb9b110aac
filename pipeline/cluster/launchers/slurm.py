"""The launcher ``slurm``: hosts that Slurm grants to one batch job; they share the folder of runs with the controller.

This module has the settings, the script for sbatch, and the ``Scheduler``. ``slurm_job.py`` runs Slurm's commands.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from pipeline.cluster.agent.requests import JobRequest, Secrets
from pipeline.cluster.agent.schedulers import SLURM_SECRETS
from pipeline.cluster.launchers.base import AttemptSpec, GrantedJob, JobState, PackSource, Scheduler
from pipeline.cluster.launchers.job_folder import OUTPUT, REQUEST, JobFolder
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig, srun_in_container
from pipeline.cluster.launchers.slurm_job import Queue, state_of
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.errors import PacelineError
from pipeline.core.redact import rules, texts_to_mask
from pipeline.core.specs import Cluster
from pipeline.runs import journal
from trainers.contract.records import as_json
from trainers.core.config import ConfigError

NAME_PREFIX = "paceline-"
"""The beginning of the names of all jobs."""
FOLDERS = "slurm"
"""The folder in a run folder that holds a folder for each job."""

_FORBIDDEN = (
    (("-N", "--nodes"), "cluster.nnodes="),
    (("-n", "--ntasks", "--ntasks-per-node"), "cluster.nnodes= cluster.nproc_per_node="),
    (("-a", "--array"), "each trial of a sweep is a job already"),
    (("-J", "--job-name"), "by its name the job is found again"),
    (("-o", "--output", "--open-mode"), "what it prints lies in the run folder"),
    (("-D", "--chdir"), "it starts in the run folder"),
    (("-M", "--clusters"), "SLURM_CONF= names the cluster"),
    (("-W", "--wait", "--wrap", "--test-only", "-h", "--help", "-V", "--version"), "leave it out"),
    (("-Q", "--quiet"), "then it doesn't tell the number of the job"),
)
"""Options of sbatch that would break a run's job → what to use instead."""


@dataclass(kw_only=True)
class SlurmConfig(ClusterConfig):
    """Settings of sbatch.

    Attributes:
        nnodes: how many nodes a job has.
        partition: as sbatch takes it; null: Slurm's default. The same holds for the next three settings.
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
        ClusterConfig.__post_init__(self)
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Yield a message for each value that sbatch couldn't take."""
        for name in ("partition", "account", "qos", "constraint", "gres", "mem"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^\s'\"\\#]+", value):
                yield f"cluster.{name}={value!r} can't stand in a line of sbatch: no spaces, quotes or #"
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            yield f"cluster.cpus_per_task={self.cpus_per_task} must be null or a whole number from 1"
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem, re.IGNORECASE):
            yield f"cluster.mem={self.mem!r} must be a size that sbatch knows, such as 64G (0: all of a node)"
        if self.time_limit is not None and not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2}", self.time_limit):
            yield (
                f"cluster.time_limit={self.time_limit!r} must be minutes:seconds, hours:minutes:seconds or days-hours "
                "(in a file in quotes: YAML takes 1:00:00 for the number 3600)"
            )
        for option in self.sbatch:
            if why := self._why_refused(option):
                yield f"cluster.sbatch: {option!r} {why}"
        for line in self.setup:
            if line.startswith("#SBATCH"):
                yield f"cluster.setup: {line!r} is an option of sbatch; write it into cluster.sbatch"

    @staticmethod
    def _why_refused(option: str) -> str:
        """Return why an entry of ``cluster.sbatch`` is refused, as words that follow it; '': it isn't."""
        if not option.startswith("-") or not option.isprintable():
            return "is no option of sbatch; write [--exclusive]"
        try:
            words = shlex.split(option, comments=True)
        except ValueError as error:
            return f"is not quoted as a shell would read it: {error}"
        name, equals, _ = words[0].partition("=")
        # "-p gpu" is one option with its value; sbatch would take any other further word for the script to run
        if len(words) > 2 or (len(words) == 2 and (equals or words[1].startswith("-"))):
            return (
                "is more than one option; write [--exclusive,--comment=x], a value with spaces as [\"--comment='a b'\"]"
            )
        is_long = name.startswith("--")
        # getopt accepts shortened long names (--arr=0-3) and short ones with values (-N4)
        for names, instead in _FORBIDDEN:
            if any(forbidden.startswith(name) if is_long else forbidden == name[:2] for forbidden in names):
                return f"would make another job of it than the run needs; {instead}"
        return ""


# -------------------------------------------------------------------------------------------------- the script (pure)
def _settings(cluster: Cluster) -> SlurmConfig:
    return cast("SlurmConfig", cluster.settings)


def script(cluster: Cluster, name: str, folder: str, shared: Sequence[str] = ()) -> str:
    """Return the script for sbatch: it starts one agent on each node, which reads its request from the job's folder.

    ``name`` and ``folder`` are those of the job. ``shared``: the folders that a container must see.
    """
    settings, ranks = _settings(cluster), cluster.hosts[0].nproc_per_node
    srun_options, container_command = srun_in_container(cluster, shared)
    python = cluster.hosts[0].python or ("python3" if cluster.container else sys.executable)
    agent = f"{container_command}{shlex.join([python, '-E', '-c', BOOTSTRAP])} < {shlex.quote(f'{folder}/{REQUEST}')}"
    option_values: dict[str, object] = {
        "job-name": name,
        "nodes": cluster.nnodes,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus_per_task or ranks,
        "gpus-per-node": ranks if cluster.device == "cuda" and settings.gres is None else None,
        "gres": settings.gres,
        "mem": settings.mem,
        "time": settings.time_limit,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
    }
    options = [f"--{option}={value}" for option, value in option_values.items() if value is not None]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in [*options, "--requeue", "--open-mode=append", *settings.sbatch]),
        *settings.setup,
        # one task a node, with all of the job's cores there; a failing node ends the others
        f"exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 {srun_options}{agent}",
    ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------ the scheduler
class SlurmScheduler(Scheduler):
    """Submits batch jobs by sbatch."""

    name, agent, folder, script = "Slurm", "slurm", FOLDERS, "job.sh"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._queue = Queue()

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        return _script_of(cluster, spec.run_key, spec.run_dir, nonce, spec.pack)

    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: JobRequest) -> GrantedJob:
        """Submit a job. Secret variables, and the rules that mask them, go into its environment and so into no file."""
        hidden = frozenset[str]().union(*(texts_to_mask(host.env, host.secrets) for host in cluster.hosts))
        secrets = Secrets(dict(cluster.hosts[0].secrets), rules(hidden))
        text = _script_of(cluster, spec.run_key, spec.run_dir, folder.path.name, spec.pack)
        folder.make(text, request._replace(has_secrets=any(secrets)), cluster.nnodes)
        output = str(folder.path / OUTPUT).replace("%", "%%")  # sbatch takes % for the beginning of a placeholder
        environ = {SLURM_SECRETS: json.dumps(as_json(secrets))}
        id_ = self._queue.submit(text, folder=str(spec.run_dir), output=output, environ=environ)
        return self._granted(id_, folder)

    def _granted(self, id_: str, folder: JobFolder) -> GrantedJob:
        return GrantedJob(
            id=id_,
            title=f"job {id_}",
            show_command=f"squeue -j {id_}",
            end_command=f"scancel {id_}",
            folder=folder,
            nnodes=self.cluster.nnodes,
        )

    def jobs(self, run_key: str, run_dir: Path) -> list[GrantedJob]:
        prefix, folders = _name(run_key, run_dir), run_dir / FOLDERS
        return [
            self._granted(id_, JobFolder(folders / name.removeprefix(prefix), self.script))
            for id_, name in self._queue.own_jobs(prefix)
        ]

    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        try:
            now = self._queue.show(job.id)
        except PacelineError as error:
            words = f"asking Slurm, which doesn't tell how {job.title} stands: {error.what}"
            remains = f"it is in a state that Slurm doesn't tell; {job.end_command}"
            return JobState(is_unanswered=True, words=words, remains=remains)
        place = self._queue.place(now) if now.state == "PENDING" else ""
        return state_of(job, now, place, before)

    def cancel(self, job: GrantedJob) -> None:
        self._queue.cancel(job.id)

    def rehearse(self) -> list[str]:
        words = self._queue.rehearse(_script_of(self.cluster, "preflight", Path.cwd(), "rehearsal"))
        return [f"Slurm would take such a job: {words}"]


def _script_of(cluster: Cluster, run_key: str, run_dir: Path, nonce: str, pack: PackSource | None = None) -> str:
    shared = (str(run_dir.parent), *([str(pack.path)] if pack is not None else []))
    return script(cluster, f"{_name(run_key, run_dir)}{nonce}", str(run_dir / FOLDERS / nonce), shared)


def _name(run_key: str, run_dir: Path) -> str:
    """Return the beginning of the names of a run folder's jobs; each name ends with the job's nonce."""
    return f"{NAME_PREFIX}{journal.attempt_prefix(run_key, run_dir)}"
