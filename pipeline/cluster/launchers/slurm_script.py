"""The script of a batch job, as data. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.cluster.launchers.job_folder import REQUEST
from pipeline.cluster.launchers.payload import BOOTSTRAP

if TYPE_CHECKING:
    from pipeline.cluster.launchers.slurm import SlurmConfig

NAME_PREFIX = "paceline-"
"""How the names of all jobs begin."""
FOLDERS, SCRIPT = "slurm", "job.sh"
"""Where in a run folder those of its jobs lie, and what holds the script there."""


_DECIDED = {
    **dict.fromkeys(("-N", "--nodes"), "cluster.nnodes="),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node"), "cluster.nnodes= cluster.nproc_per_node="),
    **dict.fromkeys(("-a", "--array"), "the trials of a sweep that start together are one array already"),
    **dict.fromkeys(("-J", "--job-name"), "by its name the job is found again"),
    **dict.fromkeys(("-o", "--output", "--open-mode"), "what it prints lies in the run folder"),
    **dict.fromkeys(("-D", "--chdir"), "it starts in the run folder"),
    **dict.fromkeys(("-M", "--clusters"), "SLURM_CONF= names the cluster"),
    **dict.fromkeys(("-W", "--wait", "--wrap", "--test-only", "-h", "--help", "-V", "--version"), "leave it out"),
    **dict.fromkeys(("-Q", "--quiet"), "then it doesn't tell the number of the job"),
}
"""Options of sbatch that would make something else of a run's job → what is said of it."""


def unfit(option: str) -> str:
    """Why an option of ``cluster.sbatch`` can't stand in the script; '' where it can."""
    if not option.startswith("-") or not option.isprintable():
        return "is no option of sbatch; write [--exclusive]"
    try:
        words = shlex.split(option, comments=True)
    except ValueError as error:
        return f"is not quoted as a shell would read it: {error}"
    name, equals, _ = words[0].partition("=")
    if len(words) > 2 or (len(words) == 2 and (equals or words[1].startswith("-"))):  # sbatch would run the last word
        return "is more than one option; write [--exclusive,--comment=x], a value with spaces as [\"--comment='a b'\"]"
    instead = _decided(name)
    return "" if instead is None else f"would make another job of it than the run needs; {instead}"


def _decided(name: str) -> str | None:
    """What is said of an option that the run decides, also where it is shortened as getopt takes it (--arr=0-3)."""
    if not name.startswith("--"):
        return _DECIDED.get(name[:2])
    return next((said for known, said in _DECIDED.items() if known.startswith(name)), None)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job before it is submitted. ``folder`` is the one that it shares with the controller, ``gpus`` a node's."""

    name: str
    folder: str
    python: str
    nnodes: int
    nproc_per_node: int
    gpus: int
    settings: SlurmConfig


def script(job: Job) -> str:
    """What sbatch is given: one agent on each node, whose request comes from a file that all of them see."""
    return _text(job, request=shlex.quote(f"{job.folder}/{REQUEST}"))


def array_script(jobs: Sequence[Job], name: str) -> str:
    """The same for an array of that name, whose elements differ in their folders alone."""
    folders = (f"{number}) folder={shlex.quote(job.folder)};;" for number, job in enumerate(jobs))
    whose = ["case $SLURM_ARRAY_TASK_ID in", *folders, "esac", 'cd "$folder/../.."']  # that of the run
    array = replace(jobs[0], name=name)
    return _text(array, f"--array=0-{len(jobs) - 1}", before=whose, request=f'"$folder/{REQUEST}"')


def _text(job: Job, *more: str, request: str, before: Sequence[str] = ()) -> str:
    agent = shlex.join([job.python, "-E", "-c", BOOTSTRAP])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in (*options(job), *more)),
        *before,
        *job.settings.setup,
        # 1 task a node has all of the job's cores there; a node that fails takes the others with it
        f"exec srun --ntasks-per-node=1 --cpu-bind=none --mpi=none --kill-on-bad-exit=1 {agent} < {request}",
    ]
    return "\n".join(lines) + "\n"


def options(job: Job) -> list[str]:
    """sbatch's options, what the configuration leaves open left out."""
    settings = job.settings
    gpus = job.gpus if job.gpus and settings.gres is None else None
    chosen: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nnodes,
        "ntasks-per-node": 1,
        "cpus-per-task": settings.cpus_per_task or job.nproc_per_node,
        "gpus-per-node": gpus,
        "gres": settings.gres,
        "mem": settings.mem,
        "time": settings.time_limit,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
    }
    said = [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    return [*said, "--requeue", "--open-mode=append", *settings.sbatch]
