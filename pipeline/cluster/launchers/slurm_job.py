"""One batch job of Slurm: submitted or found, waited for, and what became of it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.wire import SAYS
from pipeline.cluster.launchers.base import NOT_ENDED, Outcome
from pipeline.cluster.launchers.job_folder import OUTPUT, JobFolder
from pipeline.cluster.launchers.slurm_array import ELEMENT, Arrays
from pipeline.cluster.launchers.slurm_queue import JobState, Queue, complaints, stuck, waiting, why_it_ended
from pipeline.cluster.launchers.slurm_script import FOLDERS, NAME_PREFIX, SCRIPT, Job, script
from pipeline.core.errors import HostError, TrainingError
from trainers.contract import variables

_LOOK_S = 0.2
_END_S = 20.0
_LASTS_S = 2.0  # a node whose last job is just ending isn't available for a moment


class BatchJob:
    """The job of one run folder, through all attempts that it serves.

    Args:
        arrays: what submits it.
        job: a job's own part of its name → the job.
        name: how the names of all jobs of this run folder begin.
    """

    def __init__(self, arrays: Arrays, job: Callable[[str], Job], *, name: str, run_dir: Path, nnodes: int) -> None:
        self._queue, self._arrays, self._job = arrays.queue, arrays, job
        self._name, self._run_dir, self._nnodes = name, run_dir, nnodes
        self.state = JobState(id="")
        self.folder = JobFolder(run_dir, SCRIPT)
        self._lost = -1  # the life of the job that Slurm is about to take back
        self._printed_bytes = 0  # by the job before the newest start
        self.doing = "asking Slurm"
        self.standing = ""

    @property
    def life(self) -> int:
        """How often Slurm has put it back into the queue."""
        return self.state.restarts

    def find(self, say: Callable[[str], None]) -> bool:
        """Take up the job that waits or runs for this run already; one with another script is cancelled."""
        for id_, folder in _jobs_of(self._queue, self._name, self._run_dir):
            state = self._queue.show(id_)
            if state is None or state.ended:
                continue
            if folder.script == script(self._job(folder.path.name)) and not folder.was_left():
                self.state, self.folder = state, folder
                self._lost = state.restarts if state.preempted and state.state == "RUNNING" else -1
                say(f"job {id_} of this run is in the queue already ({state.state}); going on with it")
                folder.end(state.restarts)  # what an earlier command has started in it
                return True
            self._queue.cancel(id_)
        return False

    def submit(self, request: Mapping[str, Any], told: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """A new job: ``request`` is what its agents are asked first, ``told`` what no file may hold.

        Raises:
            HostError: Slurm refuses it.
        """
        nonce = secrets.token_hex(3)
        job = self._job(nonce)
        self.folder = JobFolder(Path(job.folder), SCRIPT)
        asked = {**request, "folder": job.folder, "is_told": any(told.values())}
        self.folder.make(script(job), asked, self._nnodes)
        id_ = self._arrays.submit(job, {variables.SECRETS: json.dumps(told)})
        self.state = JobState(id=id_, state="PENDING")
        say(f"job {id_} was submitted; squeue -j {id_} shows it, scancel {id_} ends it")

    def wait(self, say: Callable[[str], None], check: Callable[[], None]) -> None:
        """Until all nodes have told their facts. Raises HostError: the job ended before, what ``check`` raises."""
        pause_s, seen, told, since = 0.5, "", "", time.monotonic()
        while True:
            state = self._queue.show(self.state.id)
            if state is None:
                self.doing = f"asking Slurm, which doesn't tell how job {self.state.id} stands: {self._queue.trouble}"
            else:
                self.state = state
                if state.ended:
                    raise self._ended_early()
                self.doing = self._words()
                if state.reason != seen:
                    seen, since = state.reason, time.monotonic()
                lasts = time.monotonic() - since >= _LASTS_S
                if state.state == "PENDING" and stuck(state) and state.reason != told and lasts:
                    told = state.reason
                    say(f"WARNING: job {state.id} can't start as things are: {waiting(state, '')}")
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                check()
                if self._is_ready():
                    self.doing = f"starting torchrun in job {self.state.id}"
                    return
                time.sleep(_LOOK_S)
            pause_s = min(10.0, pause_s * 1.5)

    def facts(self) -> list[dict[str, Any]]:
        """What the nodes have told in this life of the job, in the order of their numbers."""
        return self.folder.facts(self.state.restarts, self._nnodes)

    def _is_ready(self) -> bool:
        """Whether all nodes have told their facts, and nothing is under way on them."""
        there = self.state.state == "RUNNING" and self.state.restarts > self._lost
        return there and len(self.facts()) == self._nnodes and self._is_idle()

    def _is_idle(self) -> bool:
        return self.folder.is_idle(self.state.restarts, self._nnodes)

    def _words(self) -> str:
        state = self.state
        if state.state == "RUNNING":
            return f"waiting for the agents of job {state.id} on {state.nodes}"
        place = self._queue.place(state) if state.state == "PENDING" else ""
        return f"waiting for job {state.id}: {waiting(state, place)}"

    def _ended_early(self) -> HostError | TrainingError:
        """The job ended before its agents told their facts; TrainingError: somebody has cancelled it."""
        if removed := self.folder.removed(f"job {self.state.id}"):
            return removed
        lines = self.folder.output()
        said = [line for line in lines if line.startswith(SAYS)] or complaints(lines) or lines[-4:]
        id_, state = self.state.id, self.state.state or "Slurm does not know it any more"
        was_forgotten = "_" in id_ and not self.state.state and not said  # as an element that waits is once cancelled
        if self.state.state == "CANCELLED" or was_forgotten:
            text = "\n".join([f"job {id_} was cancelled before the run began", *(f"  {line}" for line in said)])
            return TrainingError(text, hint="the same command submits it again", cause="cancelled")
        how = f"job {id_} ended before the run began: {state}"
        if not said:
            return HostError(
                f"{how}, and nothing is in {self.folder.path / OUTPUT}",
                hint="paths.runs=<a folder that this computer and all nodes share>; or cluster.setup has ended it; "
                f"scontrol show job {id_}",
            )
        python = any("No such file" in line or "not found" in line for line in said)
        other = "cluster.python=<an interpreter that the nodes have>"
        hint = other if python else "the same command submits another job"
        return HostError("\n".join([how, *(f"  {line}" for line in said)]), hint=hint)

    def start(self, request: Mapping[str, Any]) -> None:
        """Tell all nodes to start torchrun. Raises OSError."""
        self._printed_bytes = self.folder.output_bytes()
        self.folder.order(restart=self.state.restarts, start=request)

    def gone(self, life: int) -> str:
        """Why the job is no longer in that life of it; '' while it is, or while Slurm doesn't answer."""
        now = self._queue.show(self.state.id)
        if now is not None:
            self.standing = _standing(now)
        if now is None or (now.state in ("RUNNING", "SUSPENDED") and now.restarts == life):
            return ""
        said = complaints(self.folder.output(self._printed_bytes))
        return "; ".join([f"was taken away: job {now.id} is {now.state or 'over'}", *said])

    def outcome(self) -> Outcome:
        """What Slurm has done to the job in which a start ended badly; waits until that is decided."""
        before, now, deadline = self.state, self._queue.show(self.state.id), time.monotonic() + _END_S
        if now is not None and now.state == "COMPLETING":  # nobody waits for another start in this life of it
            self.folder.leave(restart=before.restarts)
        while now is not None and now.state == "COMPLETING" and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            now = self._queue.show(before.id)
        if not self.folder.path.is_dir():  # removed while the run went on, which ended the agents: the start tells it
            return Outcome()
        if now is None or self.folder.was_left():  # the second: somebody has stopped the run
            return Outcome()
        return why_it_ended(before, now, self.folder.output(self._printed_bytes))

    def end_start(self) -> dict[str, str]:
        """End what runs in this life of the job; the job stays. Job → what is said of one that doesn't end it."""
        before, deadline = self.state, time.monotonic() + _END_S
        self.folder.end(before.restarts)
        while time.monotonic() < deadline:
            now = self._queue.show(before.id)
            if now is not None and (now.restarts > before.restarts or now.state not in ("RUNNING", "COMPLETING")):
                return {}
            if self.folder.path.is_dir() and self._is_idle():
                return {}
            time.sleep(_LOOK_S)
        return {f"job {before.id}": f"{NOT_ENDED}its nodes don't answer; scancel {before.id}"}


def _standing(job: JobState) -> str:
    """Why its ranks stand still, as a person has to know; '': they don't."""
    if job.state != "SUSPENDED":
        return ""
    return f"job {job.id} is suspended by Slurm, and the run waits for it; scontrol resume {job.id} lets it go on"


def cancel_all(queue: Queue, name: str, run_dir: Path) -> dict[str, str]:
    """End all jobs of a run folder; job → what is said of one that doesn't end. Raises HostError."""
    for folder in (run_dir / FOLDERS).glob("*"):  # also where Slurm doesn't answer
        JobFolder(folder, SCRIPT).leave()
    found = _jobs_of(queue, name, run_dir)
    for id_, _ in found:
        queue.cancel(id_)
    return {f"job {id_}": why for id_, _ in found if (why := _survives(queue, id_))}


def _jobs_of(queue: Queue, name: str, run_dir: Path) -> list[tuple[str, JobFolder]]:
    """Ids and folders of all jobs of a run folder that are in the queue: by their names, or as elements of an array.

    Raises HostError.
    """
    elements = {path.read_text(encoding="utf-8"): path.parent for path in (run_dir / FOLDERS).glob(f"*/{ELEMENT}")}
    found = []
    for id_, called in queue.mine(NAME_PREFIX):
        own = run_dir / FOLDERS / called.removeprefix(name) if called.startswith(name) else None
        folder = own or elements.get(f"{called} {id_.rpartition('_')[2]}")
        if folder is not None:
            found.append((id_, JobFolder(folder, SCRIPT)))
    return found


def _survives(queue: Queue, id_: str) -> str:
    """What is said of a job that doesn't end; '' for one that has."""
    deadline = time.monotonic() + _END_S
    job = queue.show(id_)
    while (job is None or not job.ended) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        job = queue.show(id_)
    if job is not None and job.ended:
        return ""
    state = job.state if job is not None else "in a state that Slurm doesn't tell"
    return f"{NOT_ENDED}it is {state}; scancel {id_}"
