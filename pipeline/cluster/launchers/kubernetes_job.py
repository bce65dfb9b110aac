"""One job of Kubernetes: created or found, waited for, and what became of it and of its pods."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import NOT_ENDED, Outcome
from pipeline.cluster.launchers.granted_launcher import LOOK_S, GrantedJob
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.kubernetes_api import Api, Object, UnansweredError, help_for
from pipeline.core.errors import HostError
from pipeline.core.printable import printable

FOLDERS, MANIFEST = "kubernetes", "job.yaml"
"""The folder below a run's for those of its jobs, and the file in such a folder with the manifest."""

_DECIDED_S = 10.0  # from a node's last word until the API knows what took it
_STARTING = ("ContainerCreating", "PodInitializing")


def yaml_of(manifest: Object) -> str:
    """A manifest as a file that kubectl takes."""
    text: str = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=120)
    return text


class PodsJob(GrantedJob):
    """The job of one run folder, through all attempts that it serves. It has one life: a job whose pods are taken away
    ends. Its ranks never stand still, as pods can't be suspended.

    Args:
        write: a job's own part of its name → its manifest.
        run: the label of all jobs of this run folder.
    """

    life = 0
    end_s = 75.0  # a pod has 60 s for its end

    def __init__(self, api: Api, write: Callable[[str], Object], *, run: str, run_dir: Path, nnodes: int) -> None:
        super().__init__(JobFolder(run_dir, MANIFEST), nnodes, doing="asking Kubernetes")
        self._api, self._write, self._run, self._run_dir = api, write, run, run_dir
        self.name = self._warned = ""
        self._pods: dict[str, Pod] = {}  # uid → each pod that ever was there, as it was seen last

    @property
    def title(self) -> str:
        return f"{self._api.kind.name} {self.name}"

    @property
    def end_command(self) -> str:
        return f"{self._api.kubectl} delete {self._api.kind.name.lower()} {self.name}"

    def find(self, say: Callable[[str], None]) -> bool:
        """Take up the job that waits or runs for this run already; others are deleted. Raises HostError."""
        for job in reversed(self._api.jobs(self._run)):
            name = job["metadata"]["name"]
            nonce = name.rpartition("-")[2]
            folder = JobFolder(self._run_dir / FOLDERS / nonce, MANIFEST)
            same = folder.script == yaml_of(self._write(nonce)) and not folder.was_left()
            if self.name or not same or is_over(job) or _broken(self._look(name)):
                release(self._api, folder, name)
                continue
            self.name, self.folder = name, folder
            say(f"{self.title} of this run is there already; going on with it")
            folder.end(self.life)  # what an earlier command has started in it
        return bool(self.name)

    def submit(self, request: Object, say: Callable[[str], None]) -> None:
        """Create a job, whose agents get ``request`` first. Raises HostError: it is refused."""
        nonce = secrets.token_hex(3)
        manifest = self._write(nonce)
        folder = JobFolder(self._run_dir / FOLDERS / nonce, MANIFEST)
        folder.make(yaml_of(manifest), {**request, "folder": str(folder.path)}, self._nnodes)
        self._api.create(manifest)
        self.name, self.folder, self._pods = manifest["metadata"]["name"], folder, {}
        say(
            f"{self.title} was created; {self._api.kubectl} get pods -l paceline/job={self.name} shows its pods, "
            f"{self.end_command} ends it"
        )

    def _goes_on(self, say: Callable[[str], None]) -> bool:
        self.folder.beat()  # pods that run already wait for the others
        try:
            job, pods = self._api.get(self.name), self._look(self.name)
            if outcome := self._ended_early(job, pods):
                say(f"{outcome.text.partition(';')[0]}; another job is created")
                return False
            self.doing, hint = self._state(job or {}, pods)
            if hint and self.doing != self._warned:
                self._warned = self.doing
                say(f"WARNING: {self.doing}; {hint}")
        except UnansweredError as error:  # it may have waited for hours, and the API answers again
            self.doing = f"waiting for {self.title}: {error.what}"
        return True

    def described(self) -> str:
        """Each node of the run with its pod and the cluster's node."""
        with contextlib.suppress(HostError):  # the agents have answered, which matters more
            self._pods |= {pod.uid: pod for pod in self._look(self.name)}
        nodes = {pod.name: pod.node for pod in self._pods.values()}
        return ", ".join(f"{label} is {name} on {nodes.get(name) or '?'}" for name, label in self._labels().items())

    def _labels(self) -> dict[str, str]:
        """A pod's name → its node's name in this run."""
        facts = self.facts()
        return {fact["host"]: f"pod{number}" for number, fact in enumerate(facts) if len(facts) == self._nnodes}

    def _look(self, name: str) -> list[Pod]:
        return [pod_of(pod) for pod in self._api.pods(name)]

    def _state(self, job: Object, pods: Sequence[Pod]) -> tuple[str, str]:
        """Why it doesn't run yet, and what the user has to do, if anything."""
        if suspended := conditions(job).get("Suspended"):
            return f"waiting for {self.title}: {suspended}", ""
        running = sum(pod.phase == "Running" for pod in pods)
        warnings = self._api.warnings(self.name) if running < self._nnodes else []
        why = waiting(pods, self._nnodes, warnings)
        return f"waiting for {self.title}: {why}", help_for(why)

    def _ended_early(self, job: Object | None, pods: Sequence[Pod]) -> Outcome | None:
        """How its pods were taken away; None: it goes on. Raises HostError: it ended otherwise."""
        if job is None:
            raise HostError(
                f"{self.title} was deleted before the run began",
                hint=f"the same command creates another one; {self._api.kubectl} get events shows who may have done it",
            )
        outcome = self._judged(pods)
        if not is_over(job) and not _broken(pods) and not outcome.text:
            return None
        if outcome.again and not job["metadata"].get("deletionTimestamp"):
            release(self._api, self.folder, self.name)
            return outcome
        if removed := self.folder.removed(self.title):
            raise removed
        lines = [line for pod in pods if pod.code for line in [*pod.said.splitlines(), *self._api.log(pod.name)]]
        said = list(dict.fromkeys([line for line in lines if line.startswith(SAYS)] or lines))[-4:]
        why = outcome.text or "; ".join(filter(None, conditions(job).values())) or "it doesn't say why"
        raise HostError(
            "\n".join([f"{self.title} ended before the run began: {why}", *(f"  {line}" for line in said)]),
            hint=_early_hint(said, outcome),
        )

    def gone(self, life: int) -> str:
        try:
            job, pods = self._api.get(self.name), self._look(self.name)
        except HostError:
            return ""
        if job is None or job["metadata"].get("deletionTimestamp"):
            return f"was taken away: {self.title} was deleted"
        silent = [pod for pod in pods if pod.phase == "Succeeded" and pod.name not in self._end_times()]
        return self._judged(pods).text or next((f"{pod.words} ended without a word" for pod in silent), "")

    def _judged(self, now: Sequence[Pod]) -> Outcome:
        """What became of the pods: of those that were seen before, too, as the API soon forgets one that is taken away.

        The pod that ended first comes first: it has taken the others with it.
        """
        self._pods |= {pod.uid: pod for pod in now}
        ended = self._end_times()
        known = sorted(self._pods.values(), key=lambda pod: ended.get(pod.name, math.inf))
        return why_it_ended(known, now, self._labels())

    def _end_times(self) -> dict[str, float]:
        """A pod's name → when the newest start ended there, by its own clock."""
        names, ends = [fact["host"] for fact in self.facts()], self._ends()
        return {name: float(end["now"]) for name, end in zip(names, ends, strict=False) if end is not None}

    def _ends(self) -> list[Object | None]:
        """Each node's report of how the newest start ended; None: not yet."""
        started = [order["start"]["run_id"] for order in self.folder.orders() if "start" in order]
        return [self.folder.end_of(number, started[-1]) for number in range(self._nnodes)] if started else []

    def outcome(self) -> Outcome:
        if not self.folder.path.is_dir() or self.folder.was_left():  # removed, which the start reports; or stopped
            return Outcome()
        # a node that reported no end, or one by a signal from outside, was lost
        lost = any(end is None or end.get("terminated") for end in self._ends())
        deadline = time.monotonic() + (_DECIDED_S if lost else 0.0)
        while not (outcome := self._outcome_now()).text and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if outcome.again:
            release(self._api, self.folder, self.name)
            vanish(self._api, [self.name])
        return outcome

    def _outcome_now(self) -> Outcome:
        try:
            job = self._api.get(self.name)
            if job is None or job["metadata"].get("deletionTimestamp"):
                return Outcome(text=f"{self.title} was deleted", hint="the same command creates another one")
            return self._judged(self._look(self.name))
        except HostError as error:
            return Outcome(text=error.what)

    def _is_off(self, life: int) -> bool:
        try:
            job = self._api.get(self.name)
            return job is None or is_over(job) or not any(pod.phase == "Running" for pod in self._look(self.name))
        except HostError:
            return False


def release(api: Api, folder: JobFolder, name: str) -> None:
    """Let the agents leave and delete the job, without waiting. Raises HostError."""
    folder.leave()
    api.delete(name)


def vanish(api: Api, names: Sequence[str]) -> dict[str, str]:
    """Wait until deleted jobs have no pods any more; job → the pods of one that has. Raises HostError."""
    deadline, left = time.monotonic() + PodsJob.end_s, {name: api.pods(name) for name in names}
    while any(left.values()) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        left = {name: api.pods(name) for name, pods in left.items() if pods}
    return {
        name: f"{NOT_ENDED}{', '.join(pod_of(pod).words for pod in pods)} goes on; "
        f"{api.kubectl} delete pods --force -l paceline/job={name}"
        for name, pods in left.items()
        if pods
    }


def _broken(pods: Sequence[Pod]) -> bool:
    """Whether a pod ended, or is about to."""
    return any(pod.taken or pod.code or pod.leaving or pod.phase in ("Failed", "Succeeded") for pod in pods)


def _early_hint(said: Sequence[str], outcome: Outcome) -> str | None:
    if any(re.search(r"(cannot|can't) open|/request: No such file", line) for line in said):
        return "cluster.pvc= the volume that holds paths.runs, cluster.mount_path= where it is mounted on this computer"
    if any("not found" in line or "No such file" in line for line in said):
        return "cluster.python=<an interpreter that the image has>"
    return outcome.hint if outcome.cause == "memory" else None


# -------------------------------------------------------------------------- what the API says of the pods (pure)
@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod of a job. Empty texts: the API doesn't say.

    ``waits``: why it doesn't run yet. ``ended``, ``code``, ``said``: how its container ended, and its last words.
    ``taken``: why it is taken off its node. ``leaving``: it is about to be deleted, perhaps only as its job has failed.
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


def pod_of(value: Mapping[str, Any]) -> Pod:
    """Read one pod of the API's."""
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
    """Why the first container waits for more than its start, else why no node was chosen."""
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
            terminated: Mapping[str, Any] | None = (state.get(name) or {}).get("terminated")
            if terminated:
                return terminated
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


def waiting(pods: Sequence[Pod], nnodes: int, warnings: Sequence[str]) -> str:
    """Why a job doesn't run yet, in a few words; ``warnings`` are those of the API's events, the newest last."""
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


def claim_words(claim: Mapping[str, Any] | None, nnodes: int) -> str:
    """The state of a volume claim, and whether pods on several nodes may share it; None: it may not be read."""
    if claim is None:
        return "may not be looked at"
    modes = (claim.get("spec") or {}).get("accessModes") or []
    alone = nnodes > 1 and "ReadWriteMany" not in modes
    held = "; pods on several nodes can't share it, which takes ReadWriteMany" if alone else ""
    return f"{(claim.get('status') or {}).get('phase') or 'not bound'}, {', '.join(modes)}{held}"


def is_over(job: Mapping[str, Any]) -> bool:
    """Whether nothing more becomes of a job of any kind."""
    ends = ("Complete", "Failed", "FailureTarget")
    return bool(job["metadata"].get("deletionTimestamp")) or not conditions(job).keys().isdisjoint(ends)


def why_it_ended(before: Sequence[Pod], now: Sequence[Pod], labels: Mapping[str, str]) -> Outcome:
    """What became of a job's pods in which a start ended badly; empty where all are as they were.

    A job that fails for one pod deletes the others, so a pod that was only deleted comes last.

    Args:
        before: the pods as they were seen last.
        labels: a pod's name → its node's name in this run.
    """
    current = {pod.uid: pod for pod in now}
    gone = [old for old in before if old.uid not in current]
    pods = [current[old.uid] for old in before if old.uid in current]
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
