"""A job of Kubernetes and its pods as the API shows them, and what that means for a run."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.agent.reports import JobReport
from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import GrantedJob, JobState, Outcome
from pipeline.cluster.launchers.kubernetes_api import JOB, Api, Object, help_for
from pipeline.core.errors import HostError
from pipeline.core.printable import printable

_STARTING = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a job. Empty texts: the API doesn't say.

    Attributes:
        waits: why it doesn't run yet.
        end_reason: why its container ended, with exit ``code`` and its ``last_words``.
        taken: why it is taken off its node.
        leaving: it is about to be deleted, perhaps only because its job has failed.
    """

    name: str
    uid: str
    node: str = ""
    phase: str = ""
    waits: str = ""
    end_reason: str = ""
    code: int = 0
    last_words: str = ""
    taken: str = ""
    leaving: bool = False

    @property
    def title(self) -> str:
        """``pod NAME on NODE``."""
        return f"pod {self.name}" + (f" on {self.node}" if self.node else "")


def pod_of(shown: Mapping[str, Any]) -> Pod:
    """Read one pod as the API shows it."""
    meta, spec, status = shown["metadata"], shown.get("spec") or {}, shown.get("status") or {}
    states = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    terminated = _terminated(states)
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "",
        waits=_waits(status, states),
        end_reason=terminated.get("reason") or "",
        code=int(terminated.get("exitCode") or 0),
        last_words=(terminated.get("message") or "").strip(),
        taken=_taken(status),
        leaving=bool(meta.get("deletionTimestamp")),
    )


def _waits(status: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> str:
    """Return why the first container can't start, else why no node was chosen."""
    for state in states:
        waiting = (state.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            return _words(waiting)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _words(condition)
    return ""


def _terminated(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return how the last container that ended did, in this life or the one before."""
    for state in reversed(states):
        for name in ("state", "lastState"):
            terminated: Mapping[str, Any] | None = (state.get(name) or {}).get("terminated")
            if terminated:
                return terminated
    return {}


def _taken(status: Mapping[str, Any]) -> str:
    """Return a disruption in the API's words."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return _words(condition)
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, Preempting, NodeShutdown, NodeLost, …
        return _words(status)
    return ""


def _words(state: Mapping[str, Any]) -> str:
    reason, message = state.get("reason") or "", printable(" ".join((state.get("message") or "").split()))
    return f"{reason}: {message}" if reason and message else reason or message


def waiting(pods: Sequence[Pod], nnodes: int, warnings: Sequence[str]) -> str:
    """Return why a job doesn't run yet, in a few words; ``warnings`` are those of the API's events, the newest last."""
    running = sum(pod.phase == "Running" for pod in pods)
    for pod in pods:
        if pod.waits:
            return f"{running} of {nnodes} pods run; {pod.title}: {pod.waits}"
    if len(pods) < nnodes or running < nnodes:
        why = f": {warnings[-1]}" if warnings else ""
        return f"{running} of {nnodes} pods run, {len(pods)} were made{why}"
    return f"all {nnodes} pods run; their agents have not answered yet"


def conditions(shown: Mapping[str, Any]) -> dict[str, str]:
    """Return the conditions of a job that hold, with their words."""
    rows = (shown.get("status") or {}).get("conditions") or []
    return {row["type"]: _words(row) for row in rows if row["status"] == "True"}


def claim_words(claim: Mapping[str, Any] | None, nnodes: int) -> str:
    """Return the state of a volume claim (None: it may not be read), and whether pods on several nodes may share it."""
    if claim is None:
        return "may not be looked at"
    modes = (claim.get("spec") or {}).get("accessModes") or []
    alone = nnodes > 1 and "ReadWriteMany" not in modes
    held = "; pods on several nodes can't share it, which takes ReadWriteMany" if alone else ""
    return f"{(claim.get('status') or {}).get('phase') or 'not bound'}, {', '.join(modes)}{held}"


def is_over(shown: Mapping[str, Any]) -> bool:
    """True if a job of any kind won't run any more."""
    ends = ("Complete", "Failed", "FailureTarget")
    return bool(shown["metadata"].get("deletionTimestamp")) or not conditions(shown).keys().isdisjoint(ends)


def why_it_ended(before: Sequence[Pod], now: Sequence[Pod], labels: Mapping[str, str]) -> Outcome:
    """Return why a start ended badly, by what became of the pods of its job; empty if all are as they were.

    A job that fails because of one pod deletes the others, so a pod that was only deleted comes last.

    Args:
        before: the pods when last seen.
        labels: a pod's name → its node's name in this run.
    """
    current = {pod.uid: pod for pod in now}
    gone = [old for old in before if old.uid not in current]
    pods = [current[old.uid] for old in before if old.uid in current]
    deleted = [*gone, *(pod for pod in pods if pod.leaving)]
    outcomes = itertools.chain(
        (_taken_away(pod, pod.taken, labels) for pod in [*pods, *gone] if pod.taken),
        (_ended_badly(pod, labels) for pod in pods if pod.code and not pod.leaving),
        (_taken_away(pod, "it was deleted", labels) for pod in deleted),
    )
    return next(outcomes, Outcome())


def _taken_away(pod: Pod, why: str, labels: Mapping[str, str]) -> Outcome:
    return Outcome(
        text=f"{_who(pod, labels)} was taken away ({why}); another job takes the place of this one, and the run will "
        "start again in it",
        again=True,
    )


def _ended_badly(pod: Pod, labels: Mapping[str, str]) -> Outcome:
    if pod.end_reason == "OOMKilled":
        return Outcome(
            text=f"{_who(pod, labels)} was out of memory (OOMKilled)",
            hint="cluster.memory=<memory of each node>, or a smaller trainer.global_batch_size",
            cause="memory",
        )
    last_words = f": {pod.last_words.splitlines()[-1]}" if pod.last_words else ""
    return Outcome(
        text=f"{_who(pod, labels)} ended with exit code {pod.code} ({pod.end_reason}){last_words}",
        hint="the same command again",
        cause="host",
    )


def _who(pod: Pod, labels: Mapping[str, str]) -> str:
    return f"{labels[pod.name]}, {pod.title}," if pod.name in labels else pod.title


# ------------------------------------------------------------------------------------------------ the state of a job
@dataclass(frozen=True, kw_only=True)
class PodsState(JobState):
    """A job's state with all its ``pods`` when last seen: the API soon forgets one that is taken away."""

    pods: tuple[Pod, ...] = ()


def state_of(
    job: GrantedJob,
    shown: Object | None,
    now: Sequence[Pod],
    before: JobState | None,
    api: Api,
    warnings: Sequence[str],
) -> PodsState:
    """Return the state of ``job`` with the pods ``now``; ``shown`` is what the API shows of it, None: no such job.

    ``before``: an earlier state. ``warnings``: of the API's events, the newest last.
    """
    seen = before.pods if isinstance(before, PodsState) else ()
    pods = tuple({pod.uid: pod for pod in (*seen, *now)}.values())  # each when last seen
    reports, labels = _end_reports(job), _labels(job)
    end_times = {name: report.now for name, report in zip(labels, reports, strict=False) if report is not None}
    # the pod that ended first has caused the end of the others
    judged = why_it_ended(sorted(pods, key=lambda pod: end_times.get(pod.name, math.inf)), now, labels)
    is_deleted = shown is None or bool(shown["metadata"].get("deletionTimestamp"))
    has_ended = shown is None or is_over(shown)
    over = has_ended or _is_broken(now) or bool(judged.text)
    words, warning = _waiting_words(job, shown, now, warnings)
    outcome, why_gone = judged, judged.text or _ended_silently(now, end_times)
    if is_deleted:
        outcome = Outcome(text=f"{job.title} was deleted", hint="the same command creates another one")
        why_gone = f"was taken away: {job.title} was deleted"
    # a node without a report, or ended by a signal from outside, was lost
    is_lost = any(report is None or report.was_terminated for report in reports)
    left = ", ".join(pod.title for pod in now)
    return PodsState(
        words=words,
        warning=warning,
        is_running=not over,
        is_over=over,
        is_idle=has_ended or not any(pod.phase == "Running" for pod in now),
        is_settled=bool(outcome.text) or not is_lost,
        why_gone=why_gone,
        remains=f"{left} goes on; {api.kubectl} delete pods --force -l {JOB}={job.id}" if left else "",
        outcome=outcome,
        error=_ended_early(job, shown, now, judged, api) if over and not job.is_started else None,
        nodes={pod.name: pod.node for pod in pods},
        pods=pods,
    )


def _is_broken(pods: Sequence[Pod]) -> bool:
    """True if a pod has ended or is about to, so that the job can't go on."""
    return any(pod.taken or pod.code or pod.leaving or pod.phase in ("Failed", "Succeeded") for pod in pods)


def _ended_silently(pods: Sequence[Pod], end_times: Mapping[str, float]) -> str:
    """Name the first pod that ended well without its agent's report, or return ''."""
    silent = (pod for pod in pods if pod.phase == "Succeeded" and pod.name not in end_times)
    return next((f"{pod.title} ended without a word" for pod in silent), "")


def _waiting_words(
    job: GrantedJob, shown: Object | None, pods: Sequence[Pod], warnings: Sequence[str]
) -> tuple[str, str]:
    """Return why the job still waits, and the warning of what somebody has to do first ('': nothing)."""
    suspended = conditions(shown or {}).get("Suspended")
    why = suspended or waiting(pods, job.nnodes, warnings)
    words, hint = f"waiting for {job.title}: {why}", "" if suspended else help_for(why)
    return words, f"{words}; {hint}" if hint else ""


def _labels(job: GrantedJob) -> dict[str, str]:
    """Return a pod's name → its node's name in this run, once all have reported."""
    facts = job.folder.facts(job.restart, job.nnodes)
    return {fact["host"]: f"pod{number}" for number, fact in enumerate(facts) if len(facts) == job.nnodes}


def _end_reports(job: GrantedJob) -> list[JobReport | None]:
    """Return each node's report of how the newest start ended; None: not yet."""
    started = [order.start.run_id for order in job.folder.orders() if order.start is not None]
    return [job.folder.end_of(number, started[-1]) for number in range(job.nnodes)] if started else []


def _ended_early(job: GrantedJob, shown: Object | None, pods: Sequence[Pod], judged: Outcome, api: Api) -> HostError:
    if shown is None:
        return HostError(
            f"{job.title} was deleted before the run began",
            hint=f"the same command creates another one; {api.kubectl} get events shows who may have done it",
        )
    lines = [line for pod in pods if pod.code for line in [*pod.last_words.splitlines(), *api.log(pod.name)]]
    printed = list(dict.fromkeys([line for line in lines if line.startswith(SAYS)] or lines))[-4:]
    why = judged.text or "; ".join(filter(None, conditions(shown).values())) or "it doesn't say why"
    return HostError(
        "\n".join([f"{job.title} ended before the run began: {why}", *(f"  {line}" for line in printed)]),
        hint=_early_hint(printed, judged),
    )


def _early_hint(printed: Sequence[str], outcome: Outcome) -> str | None:
    if any(re.search(r"(cannot|can't) open|/request: No such file", line) for line in printed):
        return "cluster.pvc= the volume that holds paths.runs, cluster.mount_path= where it is mounted on this computer"
    if any("not found" in line or "No such file" in line for line in printed):
        return "cluster.python=<an interpreter that the image has>"
    return outcome.hint if outcome.cause == "memory" else None
