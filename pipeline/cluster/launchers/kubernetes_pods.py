"""What the API tells of a job's pods, and what that means. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.cluster.launchers.base import Outcome
from pipeline.core.printable import printable

_STARTING = ("ContainerCreating", "PodInitializing")

STUCK = {
    "ImagePullBackOff": "cluster.image=, and cluster.registry_logins= for a registry that wants a login",
    "ErrImagePull": "cluster.image=, and cluster.registry_logins= for a registry that wants a login",
    "InvalidImageName": "cluster.image=",
    "CreateContainerConfigError": "cluster.env_from=, cluster.run_as_user=",
    "CreateContainerError": "kubectl describe pod shows more",
    "CrashLoopBackOff": "kubectl logs shows what it prints",
    "persistentvolumeclaim": "cluster.pvc=; kubectl get pvc shows yours",
    "FailedMount": "cluster.pvc=; kubectl get pvc shows yours",
    "affinity/selector": "cluster.node_selector=; kubectl get nodes --show-labels",
    "untolerated taint": "cluster.tolerations=",
    "exceeded quota": "cluster.cpu=, cluster.memory= and cluster.gpus= within what kubectl describe quota shows",
    "must specify": "cluster.cpu= and cluster.memory=, which the quota of this namespace asks for",
    "violates PodSecurity": "cluster.run_as_user= another than 0",
    "serviceaccount": "cluster.service_account=; kubectl get serviceaccounts shows yours",
}
"""What the API says of a pod that may never start → what helps."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a job. Empty texts: the API doesn't say.

    ``waits`` is why it doesn't run yet, ``ended`` how its container has, ``taken`` why it is taken off its node;
    ``leaving`` one is about to be deleted, perhaps only because its job has failed.
    """

    name: str
    uid: str
    node: str = ""
    phase: str = ""
    waits: str = ""
    ended: str = ""
    code: int = 0
    said: str = ""
    taken: str = ""
    leaving: bool = False

    @property
    def words(self) -> str:
        """``pod NAME on NODE``."""
        return f"pod {self.name}" + (f" on {self.node}" if self.node else "")


def parse(value: Mapping[str, Any]) -> Pod:
    """One pod as the API tells it."""
    meta, spec, status = value["metadata"], value.get("spec") or {}, value.get("status") or {}
    states = [
        *(status.get("initContainerStatuses") or []),
        *(status.get("containerStatuses") or []),
    ]
    ended = _ended(states)
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName") or "",
        phase=status.get("phase") or "",
        waits=_waits(status, states),
        ended=ended.get("reason") or "",
        code=int(ended.get("exitCode") or 0),
        said=(ended.get("message") or "").strip(),
        taken=_taken(status),
        leaving=bool(meta.get("deletionTimestamp")),
    )


def _waits(status: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> str:
    """The first container that waits for more than its start, else the scheduler's word."""
    for state in states:
        waiting = (state.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _STARTING:
            return _words(waiting)
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _words(condition)
    return ""


def _ended(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """How the last container that ended did, in this life or the one before."""
    for state in reversed(states):
        for name in ("state", "lastState"):
            found: Mapping[str, Any] | None = (state.get(name) or {}).get("terminated")
            if found:
                return found
    return {}


def _taken(status: Mapping[str, Any]) -> str:
    """A disruption in the API's words."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return _words(condition)
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, Preempting, NodeShutdown, NodeLost, …
        return _words(status)
    return ""


def _words(said: Mapping[str, Any]) -> str:
    reason, message = said.get("reason") or "", printable(" ".join((said.get("message") or "").split()))
    return f"{reason}: {message}" if reason and message else reason or message


def helps(said: str) -> str:
    """What helps against a reason for which a pod may wait for ever; '' where it may only take its time."""
    return next((hint for words, hint in STUCK.items() if words in said), "")


def waiting(pods: Sequence[Pod], nnodes: int, warnings: Sequence[str]) -> str:
    """Why a job doesn't run yet, in a few words; ``warnings`` are what the API's events say, the newest last."""
    running = sum(pod.phase == "Running" for pod in pods)
    for pod in pods:
        if pod.waits:
            return f"{running} of {nnodes} pods run; {pod.words}: {pod.waits}"
    if len(pods) < nnodes or running < nnodes:
        why = f": {warnings[-1]}" if warnings else ""
        return f"{running} of {nnodes} pods run, {len(pods)} were made{why}"
    return f"all {nnodes} pods run; their agents have not answered yet"


def conditions(job: Mapping[str, Any]) -> dict[str, str]:
    """The conditions of a job that hold, with their words."""
    rows = (job.get("status") or {}).get("conditions") or []
    return {row["type"]: _words(row) for row in rows if row["status"] == "True"}


def claimed(claim: Mapping[str, Any] | None, nnodes: int) -> str:
    """How a volume claim is, and whether pods on several nodes may share it; None: it could not be read."""
    if claim is None:
        return "may not be looked at"
    modes = (claim.get("spec") or {}).get("accessModes") or []
    alone = nnodes > 1 and "ReadWriteMany" not in modes
    held = "; pods on several nodes can't share it, which takes ReadWriteMany" if alone else ""
    return f"{(claim.get('status') or {}).get('phase') or 'not bound'}, {', '.join(modes)}{held}"


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether nothing more becomes of a job of any kind."""
    ends = ("Complete", "Completed", "Succeeded", "Failed", "FailureTarget")
    return bool(job["metadata"].get("deletionTimestamp")) or not conditions(job).keys().isdisjoint(ends)


def why_it_ended(before: Sequence[Pod], now: Sequence[Pod], labels: Mapping[str, str]) -> Outcome:
    """What became of a job's pods in which a start ended badly: an empty one where all are as they were.

    A job that fails for one pod takes the others with it, so who was only deleted comes last.

    Args:
        before: the pods as they were seen last.
        labels: a pod's name → what its node is called in this run.
    """
    found = {pod.uid: pod for pod in now}
    gone = [old for old in before if old.uid not in found]
    pods = [found[old.uid] for old in before if old.uid in found]
    deleted = [*gone, *(pod for pod in pods if pod.leaving)]
    for judged in (
        *(_taken_away(pod, pod.taken, labels) for pod in [*pods, *gone] if pod.taken),
        *(_ended_badly(pod, labels) for pod in pods if pod.code and not pod.leaving),
        *(_taken_away(pod, "it was deleted", labels) for pod in deleted),
    ):
        return judged
    return Outcome()


def _taken_away(pod: Pod, why: str, labels: Mapping[str, str]) -> Outcome:
    return Outcome(
        text=f"{_who(pod, labels)} was taken away ({why}); another job takes the place of this one, and the run will "
        "go on from its last checkpoint",
        again=True,
    )


def _ended_badly(pod: Pod, labels: Mapping[str, str]) -> Outcome:
    if pod.ended == "OOMKilled":
        return Outcome(
            text=f"{_who(pod, labels)} was out of memory (OOMKilled)",
            hint="cluster.memory=<memory of each node>, or a smaller trainer.global_batch_size",
            cause="memory",
        )
    said = f": {pod.said.splitlines()[-1]}" if pod.said else ""
    return Outcome(
        text=f"{_who(pod, labels)} ended with exit code {pod.code} ({pod.ended}){said}",
        hint="the same command continues from the last checkpoint",
        cause="host",
    )


def _who(pod: Pod, labels: Mapping[str, str]) -> str:
    return f"{labels[pod.name]}, {pod.words}," if pod.name in labels else pod.words
