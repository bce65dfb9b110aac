"""Hosts that Slurm grants: one batch job, whose nodes share the folder of runs with the controller."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from pipeline.cluster.agent.schedulers import SLURM_SECRETS
from pipeline.cluster.launchers import containers
from pipeline.cluster.launchers.base import AttemptSpec, GrantedJob, JobState, PackSource, Scheduler
from pipeline.cluster.launchers.job_folder import OUTPUT, REQUEST, JobFolder
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.launchers.slurm_job import Queue, RefusedError, state_of, unanswered
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core import cache
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.files import write_atomic
from pipeline.core.redact import hidden_by, rules
from pipeline.core.specs import Cluster
from pipeline.runs import journal
from trainers.core.config import ConfigError

NAME_PREFIX = "paceline-"
"""The beginning of the names of all jobs."""
FOLDERS = "slurm"
"""The folder below a run's for those of its jobs."""
ELEMENT = "array"
"""The file in a job's folder that says which element of which array it is: ``NAME NUMBER``."""

_DECIDED = (
    (("-N", "--nodes"), "cluster.nnodes="),
    (("-n", "--ntasks", "--ntasks-per-node"), "cluster.nnodes= cluster.nproc_per_node="),
    (("-a", "--array"), "the trials of a sweep that start together are one array already"),
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
        ClusterConfig.__post_init__(self)
        if problems := list(self._problems()):
            raise ConfigError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        """Yield the errors in the settings."""
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
            if why := self._unfit(option):
                yield f"cluster.sbatch: {option!r} {why}"
        for line in self.setup:
            if line.startswith("#SBATCH"):
                yield f"cluster.setup: {line!r} is an option of sbatch; write it into cluster.sbatch"

    @staticmethod
    def _unfit(option: str) -> str:
        """Return why an option can't stand in the script; '' where it can."""
        if not option.startswith("-") or not option.isprintable():
            return "is no option of sbatch; write [--exclusive]"
        try:
            words = shlex.split(option, comments=True)
        except ValueError as error:
            return f"is not quoted as a shell would read it: {error}"
        name, equals, _ = words[0].partition("=")
        if len(words) > 2 or (len(words) == 2 and (equals or words[1].startswith("-"))):  # sbatch runs the last word
            return (
                "is more than one option; write [--exclusive,--comment=x], a value with spaces as [\"--comment='a b'\"]"
            )
        is_long = name.startswith("--")
        # getopt accepts shortened long names (--arr=0-3) and short ones with values (-N4)
        for names, instead in _DECIDED:
            if any(known.startswith(name) if is_long else known == name[:2] for known in names):
                return f"would make another job of it than the run needs; {instead}"
        return ""


# -------------------------------------------------------------------------------------------------- the script (pure)
class Job(NamedTuple):
    """One job before it is submitted. ``folder`` and, for a container, ``seen`` are folders shared with its nodes."""

    name: str
    folder: str
    cluster: Cluster
    seen: tuple[str, ...] = ()


def _settings(cluster: Cluster) -> SlurmConfig:
    return cast("SlurmConfig", cluster.settings)


def script(job: Job) -> str:
    """Return the input of sbatch: one agent on each node, with its request in a file that all of them see."""
    return _text(job, request=shlex.quote(f"{job.folder}/{REQUEST}"))


def array_script(jobs: Sequence[Job], name: str) -> str:
    """Return the input of sbatch for an array of that name, whose elements differ only in their folders."""
    folders = (f"{number}) folder={shlex.quote(job.folder)};;" for number, job in enumerate(jobs))
    choose = ["case $SLURM_ARRAY_TASK_ID in", *folders, "esac", 'cd "$folder/../.."']  # the run folder
    array = jobs[0]._replace(name=name)
    return _text(array, f"--array=0-{len(jobs) - 1}", before=choose, request=f'"$folder/{REQUEST}"')


def _text(job: Job, *more: str, request: str, before: Sequence[str] = ()) -> str:
    options, into = containers.srun(job.cluster, job.seen)
    python = job.cluster.hosts[0].python or ("python3" if job.cluster.container else sys.executable)
    agent = f"{into}{shlex.join([python, '-E', '-c', BOOTSTRAP])} < {request}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*_options(job), *more)),
        *before,
        *_settings(job.cluster).setup,
        # one task a node, with all of the job's cores there; a failing node ends the others
        f"exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 {options}{agent}",
    ]
    return "\n".join(lines) + "\n"


def _options(job: Job) -> list[str]:
    """Return the options of sbatch, without those that the configuration leaves open."""
    cluster, settings, ranks = job.cluster, _settings(job.cluster), job.cluster.hosts[0].nproc_per_node
    chosen: dict[str, object] = {
        "job-name": job.name,
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
    options = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    return [*options, "--requeue", "--open-mode=append", *settings.sbatch]


# ------------------------------------------------------------------------------------------- trials as one job array
_QUIET_S = 0.5  # an array is submitted when no other job has come for so long
_LONGEST_S = 3.0


@dataclass
class _Batch:
    """Jobs to be submitted together, each with its id to come."""

    environ: Mapping[str, str]
    jobs: list[Job] = field(default_factory=list)
    ids: list[Future[str]] = field(default_factory=list)
    newest: float = 0.0

    def takes(self, job: Job, environ: Mapping[str, str]) -> bool:
        """True if the job can be an element of the array, which has one script and one environment."""
        first = self.jobs[0]
        return environ == self.environ and script(job._replace(name=first.name, folder=first.folder)) == script(first)


class Arrays:
    """Submits jobs; those of concurrent trials become one array, one entry in Slurm's queue. Thread-safe."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._batch: _Batch | None = None

    def submit(self, job: Job, environ: Mapping[str, str], side_by_side: int = 1) -> str:
        """Return the id of the submitted job, ``ARRAY_NUMBER`` for an element. Raises HostError: Slurm refuses it.

        Args:
            environ: further variables of the job's environment.
            side_by_side: how many trials run at a time; 1: the job waits for no others.
        """
        if side_by_side == 1:
            return self._alone(job, environ)
        with self._lock:
            if self._batch is None or not self._batch.takes(job, environ):
                self._batch = _Batch(environ=environ)
            batch, id_ = self._batch, Future[str]()
            batch.jobs.append(job)
            batch.ids.append(id_)
            batch.newest = time.monotonic()
        if id_ is batch.ids[0]:
            self._lead(batch, side_by_side)
        return id_.result()

    def _lead(self, batch: _Batch, most: int) -> None:
        """Wait for further jobs, at most ``most``, then submit all of them. Runs in the thread of the first job."""
        until = time.monotonic() + _LONGEST_S
        try:
            while len(batch.jobs) < most and time.monotonic() < min(until, batch.newest + _QUIET_S):
                time.sleep(0.02)
            with self._lock:
                if self._batch is batch:
                    self._batch = None
            self._submit(batch)
        except BaseException as error:
            own = error if isinstance(error, PacelineError) else HostError(f"the job could not be submitted: {error}")
            for id_ in batch.ids:
                id_.set_exception(HostError(own.what, hint=own.hint))
            if own is not error:
                raise

    def _submit(self, batch: _Batch) -> None:
        if len(batch.jobs) > 1:
            try:
                for id_, of_element in zip(batch.ids, self._together(batch), strict=True):
                    id_.set_result(of_element)
                return
            except RefusedError:  # a site may allow no array, or fewer jobs than this one has elements
                for job in batch.jobs:
                    (Path(job.folder) / ELEMENT).unlink(missing_ok=True)
        for job, id_ in zip(batch.jobs, batch.ids, strict=True):
            try:
                id_.set_result(self._alone(job, batch.environ))
            except PacelineError as error:
                id_.set_exception(error)

    def _alone(self, job: Job, environ: Mapping[str, str]) -> str:
        folder = Path(job.folder)
        output = str(folder / OUTPUT).replace("%", "%%")
        return self._queue.submit(script(job), folder=str(folder.parents[1]), output=output, environ=environ)

    def _together(self, batch: _Batch) -> list[str]:
        name = f"{NAME_PREFIX}array-{secrets.token_hex(4)}"
        runs = Path(batch.jobs[0].folder).parents[2]
        outputs = runs / cache.FOLDER / "arrays" / name
        _remove_dangling(outputs.parent)
        outputs.mkdir(parents=True)  # sbatch takes one pattern for the outputs of all elements
        for number, job in enumerate(batch.jobs):
            (outputs / str(number)).symlink_to(Path(job.folder) / OUTPUT)
            write_atomic(Path(job.folder) / ELEMENT, f"{name} {number}")
        pattern = f"{outputs}/".replace("%", "%%") + "%a"
        text = array_script(batch.jobs, name)
        array = self._queue.submit(text, folder=str(runs), output=pattern, environ=batch.environ)
        return [f"{array}_{number}" for number in range(len(batch.jobs))]


def _remove_dangling(arrays: Path) -> None:
    """Remove the folders of arrays whose runs are all removed."""
    for folder in arrays.glob("*/"):
        with suppress(OSError):  # another command removes it, too
            if not any(link.exists() for link in folder.iterdir()):
                shutil.rmtree(folder)


# ------------------------------------------------------------------------------------------------------ the scheduler
class SlurmScheduler(Scheduler):
    """Submits batch jobs by sbatch."""

    name, agent, folder, script = "Slurm", "slurm", FOLDERS, "job.sh"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._queue = Queue()
        self._arrays = Arrays(self._queue)

    @classmethod
    def render(cls, cluster: Cluster, spec: AttemptSpec, nonce: str = "<random>") -> str:
        return script(_job_of(cluster, spec.run_key, spec.run_dir, nonce, spec.pack))

    def submit(self, cluster: Cluster, spec: AttemptSpec, folder: JobFolder, request: dict[str, Any]) -> GrantedJob:
        """Submit a job, with the ranks' secret variables and the rules to hide them in its environment, in no file."""
        hidden = frozenset[str]().union(*(hidden_by(host.env, host.secrets) for host in cluster.hosts))
        kept = {"env": dict(cluster.hosts[0].secrets), "hide": rules(hidden)}
        job = _job_of(cluster, spec.run_key, spec.run_dir, folder.path.name, spec.pack)
        folder.make(script(job), {**request, "has_secrets": any(kept.values())}, cluster.nnodes)
        id_ = self._arrays.submit(job, {SLURM_SECRETS: json.dumps(kept)}, self.side_by_side)
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
        """Return the jobs, recognised by their names or as elements of an array."""
        prefix, folders = _name(run_key, run_dir), run_dir / FOLDERS
        elements = {path.read_text(encoding="utf-8"): path.parent for path in folders.glob(f"*/{ELEMENT}")}
        jobs = []
        for id_, name in self._queue.mine(NAME_PREFIX):
            own = folders / name.removeprefix(prefix) if name.startswith(prefix) else None
            path = own or elements.get(f"{name} {id_.rpartition('_')[2]}")
            if path is not None:
                jobs.append(self._granted(id_, JobFolder(path, self.script)))
        return jobs

    def poll(self, job: GrantedJob, before: JobState | None = None) -> JobState:
        try:
            now = self._queue.show(job.id)
        except PacelineError as error:
            return unanswered(job, error.what)
        place = self._queue.place(now) if now.state == "PENDING" else ""
        return state_of(job, now, place, before)

    def cancel(self, job: GrantedJob) -> None:
        self._queue.cancel(job.id)

    def rehearse(self) -> list[str]:
        words = self._queue.rehearse(script(_job_of(self.cluster, "preflight", Path.cwd(), "rehearsal")))
        return [f"Slurm would take such a job: {words}"]


def _job_of(cluster: Cluster, run_key: str, run_dir: Path, nonce: str, pack: PackSource | None = None) -> Job:
    name, folder = f"{_name(run_key, run_dir)}{nonce}", str(run_dir / FOLDERS / nonce)
    seen = (str(run_dir.parent), *([str(pack.path)] if pack is not None else []))
    return Job(name, folder, cluster, seen if cluster.container else ())


def _name(run_key: str, run_dir: Path) -> str:
    """Return the beginning of the names of all jobs of one run folder."""
    return f"{NAME_PREFIX}{journal.attempt_prefix(run_key, run_dir)}"
