"""One job of Kubernetes: created or found, waited for, and what became of it."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import NOT_ENDED, Outcome
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.kubernetes_api import Api
from pipeline.cluster.launchers.kubernetes_errors import UnansweredError
from pipeline.cluster.launchers.kubernetes_manifest import FOLDERS, MANIFEST, Manifest, text
from pipeline.cluster.launchers.kubernetes_pods import (
    Pod,
    conditions,
    helps,
    is_over,
    parse,
    waiting,
    why_it_ended,
)
from pipeline.core.errors import HostError

_LOOK_S = 0.2
_END_S = 75.0  # a pod has 60 s for its end
_DECIDED_S = 10.0  # from a node's last word until the API knows what took it


class PodsJob:
    """The job of one run folder, through all attempts that it serves. It has one life: what is taken away ends it.

    Args:
        write: a job's own part of its name → its manifest.
        run: the label of all jobs of this run folder.
    """

    life = 0

    def __init__(self, api: Api, write: Callable[[str], Manifest], *, run: str, run_dir: Path, nnodes: int) -> None:
        self._api, self._write, self._run, self._run_dir, self._nnodes = api, write, run, run_dir, nnodes
        self.name = ""
        self.folder = JobFolder(run_dir, MANIFEST)
        self.doing = "asking Kubernetes"
        self.standing = ""  # pods can't be suspended
        self._pods: dict[str, Pod] = {}  # all that were ever there, as they were seen last

    def find(self, say: Callable[[str], None]) -> bool:
        """Take up the job that waits or runs for this run already; others are deleted. Raises HostError."""
        for job in reversed(self._api.jobs(self._run)):
            name = job["metadata"]["name"]
            folder = folder_of(self._run_dir, name)
            same = folder.script == text(self._write(folder.path.name)) and not folder.was_left()
            if self.name or not same or is_over(job) or _broken(self._look(name)):
                release(self._api, folder, name)
                continue
            self.name, self.folder = name, folder
            say(f"{self._title()} of this run is there already; going on with it")
            folder.end(self.life)  # what an earlier command has started in it
        return bool(self.name)

    def submit(self, request: dict[str, Any], say: Callable[[str], None]) -> None:
        """A new job; ``request`` is what its agents are asked first. Raises HostError: it is refused."""
        nonce = secrets.token_hex(3)
        manifest = self._write(nonce)
        folder = JobFolder(self._run_dir / FOLDERS / nonce, MANIFEST)
        folder.make(text(manifest), {**request, "folder": str(folder.path)}, self._nnodes)
        self._api.create(manifest)
        self.name, self.folder, self._pods = manifest["metadata"]["name"], folder, {}
        say(
            f"{self._title()} was created; {self._api.kubectl} get pods -l paceline/job={self.name} shows its pods, "
            f"{self._api.kubectl} delete {self._api.kind.name.lower()} {self.name} ends it"
        )

    def _title(self) -> str:
        return f"{self._api.kind.name} {self.name}"

    def wait(self, say: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Until all nodes have told their facts; False: its pods were taken away before.

        Raises:
            HostError: it ended for another reason.
        """
        pause_s, told = 0.5, ""
        while True:
            try:
                job, pods = self._api.get(self.name), self._look(self.name)
                if outcome := self._ended_early(job, pods):
                    say(f"{outcome.text.partition(';')[0]}; another job is created")
                    return False
                self.doing, hint = self._words(job or {}, pods)
                if hint and self.doing != told:
                    told = self.doing
                    say(f"WARNING: {self.doing}; {hint}")
            except UnansweredError as error:  # it may have waited for hours, and the API answers again
                self.doing = f"waiting for {self._title()}: {error.what}"
            self.folder.beat()  # pods that run already wait for the others
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                check()
                if len(self.facts()) == self._nnodes and self.folder.is_idle(self.life, self._nnodes):
                    self.doing = f"starting torchrun in {self._title()}"
                    return True
                time.sleep(_LOOK_S)
            pause_s = min(10.0, pause_s * 1.5)

    def facts(self) -> list[dict[str, Any]]:
        """What the nodes have told, in the order of their numbers."""
        return self.folder.facts(self.life, self._nnodes)

    def described(self) -> str:
        """Which pod each node of the run is, and where."""
        with contextlib.suppress(HostError):  # the agents have answered, which matters more
            self._pods |= {pod.uid: pod for pod in self._look(self.name)}
        nodes = {pod.name: pod.node for pod in self._pods.values()}
        rows = [f"{label} is {name} on {nodes.get(name) or '?'}" for name, label in self._labels().items()]
        return ", ".join(rows)

    def _labels(self) -> dict[str, str]:
        """A pod's name → what its node is called in this run."""
        facts = self.facts()
        return {fact["host"]: f"pod{number}" for number, fact in enumerate(facts) if len(facts) == self._nnodes}

    def _look(self, name: str) -> list[Pod]:
        return [parse(pod) for pod in self._api.pods(name)]

    def _words(self, job: dict[str, Any], pods: Sequence[Pod]) -> tuple[str, str]:
        """Why it doesn't run yet, and what a person has to do, if anything."""
        if suspended := conditions(job).get("Suspended"):
            return f"waiting for {self._title()}: {suspended}", ""
        running = sum(pod.phase == "Running" for pod in pods)
        warnings = self._api.warnings(self.name) if running < self._nnodes else []
        why = waiting(pods, self._nnodes, warnings)
        return f"waiting for {self._title()}: {why}", helps(why)

    def _ended_early(self, job: dict[str, Any] | None, pods: Sequence[Pod]) -> Outcome | None:
        """What took its pods away; None where it goes on. Raises HostError: it ended otherwise."""
        if job is None:
            raise HostError(
                f"{self._title()} was deleted before the run began",
                hint=f"the same command creates another one; {self._api.kubectl} get events shows who may have done it",
            )
        outcome = self._judged(pods)
        if not is_over(job) and not _broken(pods) and not outcome.text:
            return None
        if outcome.again and not job["metadata"].get("deletionTimestamp"):
            release(self._api, self.folder, self.name)
            return outcome
        if removed := self.folder.removed(self._title()):
            raise removed
        lines = [line for pod in pods if pod.code for line in [*pod.said.splitlines(), *self._api.log(pod.name)]]
        said = list(dict.fromkeys([line for line in lines if line.startswith(SAYS)] or lines))[-4:]
        why = outcome.text or "; ".join(filter(None, conditions(job).values())) or "it doesn't say why"
        raise HostError(
            "\n".join([f"{self._title()} ended before the run began: {why}", *(f"  {line}" for line in said)]),
            hint=_early_hint(said, outcome),
        )

    def start(self, request: dict[str, Any]) -> None:
        """Tell all nodes to start torchrun. Raises OSError."""
        self.folder.order(restart=self.life, start=request)

    def gone(self, life: int) -> str:
        """Why a pod no longer runs its start; '' while all do, or while the API doesn't answer."""
        try:
            job, pods = self._api.get(self.name), self._look(self.name)
        except HostError:
            return ""
        if job is None or job["metadata"].get("deletionTimestamp"):
            return f"was taken away: {self._title()} was deleted"
        silent = [pod for pod in pods if pod.phase == "Succeeded" and pod.name not in self._end_times()]
        return self._judged(pods).text or next((f"{pod.words} ended without a word" for pod in silent), "")

    def _judged(self, now: Sequence[Pod]) -> Outcome:
        """What became of the pods; why one is taken off its node is remembered, as it may soon be gone.

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

    def _ends(self) -> list[dict[str, Any] | None]:
        """How each node has told that the newest start ended; None: not yet."""
        started = [order["start"]["run_id"] for order in self.folder.orders() if "start" in order]
        return [self.folder.end_of(number, started[-1]) for number in range(self._nnodes)] if started else []

    def outcome(self) -> Outcome:
        """What became of the job in which a start ended badly; waits until the API knows what took a node away."""
        if not self.folder.path.is_dir() or self.folder.was_left():  # the start tells the one, a person the other
            return Outcome()
        deadline = time.monotonic() + (_DECIDED_S if self._lost_nodes() else 0.0)
        while True:
            found = self._outcome_now()
            if found.text or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        if found.again:
            release(self._api, self.folder, self.name)
            vanish(self._api, [self.name])
        return found

    def _outcome_now(self) -> Outcome:
        try:
            job = self._api.get(self.name)
            if job is None or job["metadata"].get("deletionTimestamp"):
                return Outcome(text=f"{self._title()} was deleted", hint="the same command creates another one")
            return self._judged(self._look(self.name))
        except HostError as error:
            return Outcome(text=error.what)

    def _lost_nodes(self) -> bool:
        """Whether a node has not told how its newest start ended, or was ended by a signal from outside."""
        return any(end is None or end.get("terminated") for end in self._ends())

    def end_start(self) -> dict[str, str]:
        """End what runs; the job stays. Job → what is said of one that doesn't end it."""
        deadline = time.monotonic() + _END_S
        self.folder.end(self.life)
        while time.monotonic() < deadline:
            if self.folder.path.is_dir() and self.folder.is_idle(self.life, self._nnodes):
                return {}
            try:
                job = self._api.get(self.name)
                if job is None or is_over(job) or not any(pod.phase == "Running" for pod in self._look(self.name)):
                    return {}
            except HostError:
                pass
            time.sleep(_LOOK_S)
        return {self._title(): f"{NOT_ENDED}its pods don't answer; {self._delete()}"}

    def _delete(self) -> str:
        return f"{self._api.kubectl} delete {self._api.kind.name.lower()} {self.name}"


def folder_of(run_dir: Path, name: str) -> JobFolder:
    """The folder of the job of that name."""
    return JobFolder(run_dir / FOLDERS / name.rpartition("-")[2], MANIFEST)


def release(api: Api, folder: JobFolder, name: str) -> None:
    """Let the agents leave and delete the job; nothing is waited for. Raises HostError."""
    folder.leave()
    api.delete(name)


def vanish(api: Api, names: Sequence[str]) -> dict[str, str]:
    """Wait until deleted jobs have no pods any more; job → what is said of one that has. Raises HostError."""
    deadline, left = time.monotonic() + _END_S, {name: api.pods(name) for name in names}
    while any(left.values()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        left = {name: api.pods(name) for name, pods in left.items() if pods}
    return {
        name: f"{NOT_ENDED}{', '.join(parse(pod).words for pod in pods)} goes on; "
        f"{api.kubectl} delete pods --force -l paceline/job={name}"
        for name, pods in left.items()
        if pods
    }


def _broken(pods: Sequence[Pod]) -> bool:
    """Whether a pod will not do its part any more."""
    return any(pod.taken or pod.code or pod.leaving or pod.phase in ("Failed", "Succeeded") for pod in pods)


def _early_hint(said: Sequence[str], outcome: Outcome) -> str | None:
    if any(re.search(r"(cannot|can't) open|/request: No such file", line) for line in said):
        return "cluster.pvc= the volume that holds paths.runs, cluster.mount_path= where it is mounted on this computer"
    if any("not found" in line or "No such file" in line for line in said):
        return "cluster.python=<an interpreter that the image has>"
    return outcome.hint if outcome.cause == "memory" else None
