"""Slurm's commands (sbatch, squeue, scontrol, scancel) for the jobs of runs, and the meaning of their output.

``Queue`` runs the commands. The functions below it are pure: they turn Slurm's output into the state of a job, into
errors with a fix, and into what Slurm did to a job.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import GrantedJob, JobState, Outcome
from pipeline.cluster.launchers.job_folder import OUTPUT
from pipeline.core.errors import HostError, PacelineError, TrainingError
from pipeline.core.processes import process

_LASTS_S = 2.0  # a reason to wait is reported after this time: nodes are unavailable for a moment when a job ends
_TIMEOUT_S = 60.0  # of a command, which itself repeats its request if Slurm's controller is busy


# ------------------------------------------------------------------------------- Slurm's commands and their answers
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""The final states of a job."""

_REFUSALS = {
    "invalid partition": "sinfo -s shows the partitions; cluster.partition=NAME",
    "partition not available": "sinfo -s shows which partitions are up; cluster.partition=NAME",
    "reservation is invalid": "scontrol show reservation; --reservation= of cluster.sbatch",
    "invalid account": "sacctmgr show associations user=$USER shows yours; cluster.account=NAME cluster.partition=NAME",
    "invalid qos": "sacctmgr show associations user=$USER shows yours; cluster.qos=NAME",
    "time limit": "cluster.time_limit=, at most what sinfo -o '%P %l' shows",
    "node configuration": "sinfo -N -o '%N %c %m %G' shows what nodes have; cluster.cpus_per_task, gres, mem within it",
    "generic resource": "sinfo -o '%N %G' shows what nodes have; cluster.gres=",
    "feature specification": "sinfo -o '%N %f' shows the features of nodes; cluster.constraint=",
    "more processors": "cluster.cpus_per_task= within what sinfo -N -o '%N %c' shows",
    "node count": "cluster.nnodes= within what sinfo -s shows",
    "contact slurm controller": "scontrol ping shows whether slurmctld answers",
}
"""Words in an error of sbatch, in small letters → the fix."""

_ID = re.compile(r"(\d+)(?:;\S*)?")  # as sbatch --parsable prints it, perhaps with the cluster's name
# variables that these commands would take for options: those of a job around this process, those for the user's own
# squeue, and those that break a run's job; SBATCH_PARTITION and others, by which the user submits jobs, stay
_OPTION_VARIABLES = re.compile(r"SLURM_(?!CONF$)|(SQUEUE|SCANCEL|SCONTROL)_|SBATCH_(ARRAY_INX|CLUSTERS|WAIT)$")
_NOT_CONFIGURED = r"resolve_ctls_from_dns_srv|fetch_config|Could not establish a configuration source"

_NO_NODE = "a node that it needs is drained, down or reserved: sinfo -R says why"
WAITS = {
    "PartitionTimeLimit": "its time limit is more than the partition allows: cluster.time_limit=",
    "PartitionNodeLimit": "it wants more nodes than the partition has: cluster.nnodes=",
    "PartitionConfig": "the partition can't give what it wants: scontrol show partition",
    "BadConstraints": "no node has what it wants: cluster.constraint=, cluster.gres=",
    "AccountNotAllowed": "the partition is not for this account: cluster.account=",
    "InvalidAccount": "there is no such account: cluster.account=",
    "InvalidQOS": "there is no such qos: cluster.qos=",
    "QOSNotAllowed": "the partition is not for this qos: cluster.qos=",
    "AssocGrpGRES": "the account's GPUs are all in use",
    "JobHeldUser": "it is held: scontrol release",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "DependencyNeverSatisfied": "what it is to follow has ended otherwise: --dependency of cluster.sbatch",
    "QOSMaxWallDurationPerJobLimit": "its time limit is more than the qos allows: cluster.time_limit=",
    "AssocMaxWallDurationPerJobLimit": "its time limit is more than the account may have: cluster.time_limit=",
    "ReqNodeNotAvail": _NO_NODE,
    "Nodes_required_for_job_are_DOWN": _NO_NODE,
}
"""Reasons of Slurm for which a job may wait for ever → their meaning for the user."""


@dataclass(frozen=True, kw_only=True)
class ShownJob:
    """One job as scontrol shows it; "" for what it doesn't show."""

    id: str
    state: str = ""  # "" if Slurm has forgotten the job
    reason: str = ""  # why it waits
    partition: str = ""
    restarts: int = 0
    preempted: bool = False
    time_limit: str = ""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        """True if the job won't run any more."""
        return self.state in _ENDED or not self.state


def parse_job(id_: str, text: str) -> ShownJob:
    """Read the line of ``scontrol -o show job``."""
    # Free text (comments, paths) comes last and may look like more fields, so the first field of each name counts.
    shown = reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", text))
    fields = {name: "" if value in ("None", "(null)", "Unknown") else value for name, value in shown}
    return ShownJob(
        id=id_,
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        partition=fields.get("Partition", ""),
        restarts=int(fields.get("Restarts") or 0),
        preempted=bool(fields.get("PreemptTime")),
        time_limit=fields.get("TimeLimit", ""),
        nodes=fields.get("NodeList", ""),
    )


class Queue:
    """The commands of one Slurm cluster, found by PATH."""

    def __init__(self) -> None:
        for program in ("sbatch", "squeue", "scontrol", "scancel"):
            if process.find(program) is None:
                raise HostError(
                    f"cluster.launcher=slurm needs {program}, which is not in PATH={os.environ.get('PATH')}",
                    hint="run doit on a login node of the cluster; some need: module load slurm",
                )

    def submit(self, script: str, *, folder: str, output: str, environ: Mapping[str, str]) -> str:
        """Submit a job that starts in ``folder``, and return its id. Raises HostError: refused, with Slurm's own words.

        ``output``: where it prints to, as a pattern of sbatch. ``environ``: further variables of the job's environment.
        """
        options = options_of(script)
        argv = ["sbatch", *options, "--parsable", f"--chdir={folder}", f"--output={output}"]
        done = _run(*argv, script=script, environ=environ)
        only_id = _ID.fullmatch(done.stdout.strip())
        if done.code == 0 and only_id:
            return only_id[1]
        # A site may have replaced sbatch by a program that prints other lines too, or ends with another exit code
        # although it has submitted the job. Then the job is looked for in the queue by its name.
        if done.code == 0 or re.search(r"\d", done.stdout):
            name = next((word.partition("=")[2] for word in options if word.startswith("--job-name=")), "")
            if name and (jobs := self.own_jobs(name)):
                return jobs[-1][0]
        if done.code != 0:
            raise refused(done.stderr or done.stdout)
        return job_id(done.stdout)  # the job has already ended and left the queue

    def rehearse(self, script: str) -> str:
        """Return when and where Slurm would start such a job, in Slurm's words, with a warning of its time limit.

        Raises HostError: Slurm refuses the job, or its partition starts none.
        """
        done = _run("sbatch", *options_of(script), "--test-only", script=script)
        if done.code != 0:
            raise refused(done.stderr)
        text = _words(done.stderr or done.stdout)
        # sbatch names a time at which the job would start even if the partition is down
        if partition := re.search(r"in partition (\S+)", text):
            shown = _run("scontrol", "-o", "show", "partition", partition[1]).stdout
            state = re.search(r"\bState=(\S+)", shown)
            if state and state[1] != "UP":
                raise HostError(
                    f"Slurm takes the job and doesn't start it: the state of partition {partition[1]} is {state[1]}",
                    hint=f"scontrol update partitionname={partition[1]} state=up (an administrator's); or "
                    "cluster.partition=<one that sinfo -s shows as up>",
                )
            text += _above_limit(options_of(script), partition[1], shown)
        return text

    def own_jobs(self, name: str) -> list[tuple[str, str]]:
        """Return (id, name) of this user's jobs whose names begin with ``name``, the newest last. Raises HostError."""
        done = _run("squeue", "--noheader", f"--user={os.getuid()}", "--sort=i", "--format=%i %j")
        if done.code != 0:
            if re.search(_NOT_CONFIGURED, done.stderr):
                raise refused(done.stderr)
            raise HostError(f"squeue: {_words(done.stderr)}", hint=_hint_for(done.stderr))
        rows = (line.strip().partition(" ") for line in done.stdout.splitlines())
        return [(id_, job_name.strip()) for id_, _, job_name in rows if job_name.strip().startswith(name)]

    def show(self, id_: str) -> ShownJob:
        """Return a job; its state is "" if Slurm has forgotten it. Raises PacelineError: no answer."""
        done = _run("scontrol", "-o", "show", "job", id_)
        if done.code == 0 and "JobState=" in done.stdout:
            return parse_job(id_, done.stdout)
        if "Invalid job id" in done.stderr + done.stdout:
            return ShownJob(id=id_)
        raise PacelineError(f"scontrol: {_words(done.stderr or done.stdout)}")

    def place(self, job: ShownJob) -> str:
        """Return the job's place among those that wait, ``place 3 of 12 in partition gpu``; '' if it isn't known."""
        options = ("--noheader", "--array", "--states=PENDING", f"--partition={job.partition}", "--sort=-p,i")
        try:
            waiting = _run("squeue", *options, "--format=%i").stdout.split()
        except PacelineError:
            return ""
        if job.id not in waiting:
            return ""
        return f"place {waiting.index(job.id) + 1} of {len(waiting)} in partition {job.partition}"

    def cancel(self, id_: str) -> None:
        """End a job; one that is over is no error."""
        _run("scancel", id_)


def _run(*argv: str, script: str = "", environ: Mapping[str, str] | None = None) -> process.Completed:
    """Run one of Slurm's commands. Raises PacelineError."""
    inherited = {name: value for name, value in os.environ.items() if not _OPTION_VARIABLES.match(name)}
    return process.run(argv, input=script.encode(), env={**inherited, **(environ or {})}, timeout_s=_TIMEOUT_S)


def options_of(script: str) -> list[str]:
    """Return the #SBATCH lines of the script as arguments, which the user's SBATCH_… variables can't override."""
    lines = re.findall(r"^#SBATCH (.*)", script, re.MULTILINE)
    return [word for line in lines for word in shlex.split(line, comments=True)]


def job_id(output: str) -> str:
    """Return the id that ``sbatch --parsable`` prints, perhaps after a site's own lines. Raises HostError."""
    ids = [match[1] for match in map(_ID.fullmatch, output.splitlines()) if match]
    if not ids:
        raise HostError(
            f"sbatch has taken the job and told no number of it: {_words(output)}",
            hint="the same command finds the job by its name; doit stop ends it",
        )
    return ids[-1]


def refused(output: str) -> HostError:
    """Return the refusal of sbatch with the fix, or that this computer isn't configured for Slurm."""
    if re.search(_NOT_CONFIGURED, output):
        return HostError(
            f"Slurm is not configured on this computer, so nothing was submitted: {_words(output)}",
            hint="run doit on a login node of the cluster, or SLURM_CONF=/path/to/slurm.conf before the same words",
        )
    return HostError(f"Slurm refused the job: {_words(output)}", hint=_hint_for(output))


def _words(output: str) -> str:
    """Return a command's message on one line, without ``sbatch: error:`` in front."""
    lines = [re.sub(r"^\w+: (?:error: )?", "", line.strip()) for line in output.splitlines() if line.strip()]
    return "; ".join(lines) or "it said nothing"


def _hint_for(output: str) -> str | None:
    return next((hint for words, hint in _REFUSALS.items() if words in output.lower()), None)


def meaning_of_wait(job: ShownJob) -> str:
    """Return what the reason for which a job waits means, if somebody has to act first; '': it only has to wait."""
    return next((text for reason, text in WAITS.items() if job.reason.startswith(reason)), "")


def waiting(job: ShownJob, place: str) -> str:
    """Return why a job doesn't run yet, in a few words. ``place``: its place in the queue."""
    return ", ".join(filter(None, [f"{job.state} ({job.reason or 'no reason yet'})", place, meaning_of_wait(job)]))


def why_it_ended(restart: int, now: ShownJob, output: Sequence[str]) -> Outcome:
    """Return what Slurm did to a job in whose ``restart`` a start failed. ``output``: the last lines of its output."""
    errors = "".join(f"\n  {line}" for line in slurm_errors(output))
    name, goes_on = f"job {now.id}", "the run will start again there"
    # requeued, or about to be
    if now.restarts > restart or (now.preempted and not now.ended) or now.state in ("PENDING", "REQUEUED"):
        why = "preempted" if now.preempted or "preempt" in errors.lower() else "taken off its nodes"
        return Outcome(text=f"{name} was {why} by Slurm and waits in the queue again; {goes_on}", again=True)
    if now.state == "PREEMPTED":
        text = f"{name} was preempted by Slurm, which doesn't requeue it; another job takes its place, and {goes_on}"
        return Outcome(text=text, again=True)
    # Slurm ended it
    if now.state == "OUT_OF_MEMORY" or "oom" in errors.lower():
        return Outcome(
            text=f"{name} was out of memory: a process had more than Slurm allows it there{errors}",
            hint="cluster.mem=<memory of each node>, or a smaller trainer.global_batch_size",
            cause="memory",
        )
    if now.state == "TIMEOUT" or now.reason == "TimeLimit":
        return Outcome(
            text=f"{name} reached its time limit of {now.time_limit}",
            hint="the same command again; cluster.time_limit= gives the job more",
        )
    if now.state in ("NODE_FAIL", "BOOT_FAIL"):
        return Outcome(text=f"{name} lost a node ({now.state}){errors}", hint="sinfo -R says why", cause="host")
    if now.state in ("CANCELLED", "DEADLINE"):
        text = f"{name} was ended by Slurm: {now.state}{errors}"
        return Outcome(text=text, hint="the same command submits it again", cause="cancelled")
    if now.state == "FAILED" or re.search(r"task \d+: Killed", errors):
        return Outcome(text=f"the node agent in {name} was ended{errors}", hint="the same command again", cause="host")
    return Outcome(text=errors.strip())  # Slurm did nothing: the nodes' reports explain the end


def slurm_errors(lines: Sequence[str]) -> list[str]:
    """Return the last errors that Slurm itself wrote into a job's output, each once, the newest last."""
    errors = [line.strip() for line in lines if re.match(r"(?:slurmstepd|srun|slurmd)[\w-]*: error: ", line)]
    return list(dict.fromkeys(errors))[-4:]


# ------------------------------------------------------------------------------------------------ the state of a job
@dataclass(frozen=True, kw_only=True)
class SlurmState(JobState):
    """A job's state with Slurm's reason why it waits."""

    reason: str = ""
    reason_since: float = 0.0  # monotonic seconds at the first poll with this reason


def state_of(job: GrantedJob, now: ShownJob, place: str, before: JobState | None) -> SlurmState:
    """Return the state of ``job``. ``place``: its place in the queue. ``before``: the state at an earlier poll."""
    # for how long it has waited for the same reason: a reason that soon passes needs no warning
    since = time.monotonic()
    if isinstance(before, SlurmState) and before.reason == now.reason:
        since = before.reason_since
    words = f"waiting for {job.title}: {waiting(now, place)}"
    if now.state == "RUNNING":
        words = f"waiting for the agents of {job.title} on {now.nodes}"
    is_stuck = now.state == "PENDING" and bool(meaning_of_wait(now)) and time.monotonic() - since >= _LASTS_S
    advice = f"scontrol resume {now.id} lets it go on"
    suspended = f"{job.title} is suspended by Slurm, and the run waits for it; {advice}"
    has_nodes = now.state in ("RUNNING", "SUSPENDED") and now.restarts == job.restart
    output = job.folder.output(job.printed_bytes)
    why_taken = [f"was taken away: {job.title} is {now.state or 'over'}", *slurm_errors(output)]
    return SlurmState(
        words=words,
        phase=now.state,
        warning=f"{job.title} can't start as things are: {waiting(now, '')}" if is_stuck else "",
        restart=now.restarts,
        is_running=now.state == "RUNNING",
        is_leaving=now.state == "RUNNING" and now.preempted,
        is_over=now.ended,
        is_idle=now.restarts > job.restart or now.state not in ("RUNNING", "COMPLETING"),
        is_settled=now.state != "COMPLETING",
        why_halted=suspended if now.state == "SUSPENDED" else "",
        why_gone="" if has_nodes else "; ".join(why_taken),
        remains="" if now.ended else f"it is {now.state}; {job.end_command}",
        outcome=why_it_ended(job.restart, now, output),
        error=_ended_early(job, now, output) if now.ended and not job.is_started else None,
        reason=now.reason,
        reason_since=since,
    )


def _above_limit(options: Sequence[str], partition: str, shown: str) -> str:
    """Return a warning if a job asks for more time than its partition has; ``shown`` is what scontrol says of it.

    sbatch takes such a job all the same where slurm.conf has EnforcePartLimits=NO, and a QOS may allow more.
    """
    wanted = next((word.partition("=")[2] for word in options if word.startswith("--time=")), "")
    most = re.search(r"\bMaxTime=(\S+)", shown)
    wanted_s, most_s = duration_s(wanted), duration_s(most[1] if most else "")
    if most is None or wanted_s is None or most_s is None or wanted_s <= most_s:
        return ""
    return (
        f" (but cluster.time_limit={wanted} is more than the {most[1]} of partition {partition}: the job would wait "
        f"for ever unless its qos allows that; cluster.time_limit={most[1]})"
    )


def duration_s(text: str) -> int | None:
    """Return the seconds of a time as Slurm writes it (``days-hours:minutes:seconds`` and its short forms, by the
    manual page of sbatch); None for anything else, such as UNLIMITED."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]):
        return None
    if dash or len(parts) == 3:  # the first part is hours
        hours, minutes, seconds = (int(part) for part in (*parts, "0", "0")[:3])
    else:
        hours, (minutes, seconds) = 0, (int(part) for part in (*parts, "0")[:2])
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def _ended_early(job: GrantedJob, now: ShownJob, lines: Sequence[str]) -> HostError | TrainingError:
    """Return the error of a job that ended before anything was started in it. ``lines``: its output."""
    # the agent's own error explains it best, then Slurm's, then whatever was printed last
    printed = [line for line in lines if line.startswith(SAYS)] or slurm_errors(lines) or list(lines[-4:])
    if now.state == "CANCELLED":
        text = "\n".join([f"{job.title} was cancelled before the run began", *(f"  {line}" for line in printed)])
        return TrainingError(text, hint="the same command submits it again", cause="cancelled")
    how = f"{job.title} ended before the run began: {now.state or 'Slurm does not know it any more'}"
    if not printed:
        return HostError(
            f"{how}, and nothing is in {job.folder.path / OUTPUT}",
            hint="paths.runs=<a folder that this computer and all nodes share>; or cluster.setup has ended it; "
            f"scontrol show job {now.id}",
        )
    hint = "the same command submits another job"
    if any("No such file" in line or "not found" in line for line in printed):
        hint = "cluster.python=<an interpreter that the nodes have>"
    return HostError("\n".join([how, *(f"  {line}" for line in printed)]), hint=hint)
