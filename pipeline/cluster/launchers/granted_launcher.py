"""Run attempts in a job of any ``Scheduler`` (Slurm, Kubernetes), which grants the hosts.

``cluster/attempt`` calls it as it calls ``AgentLauncher``. The nodes share the folder of runs with the controller. On
each node of the job a node agent waits for orders, which come through files in the job's folder (``job_folder.py``).
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.requests import JobRequest, WarmEnvironment
from pipeline.cluster.events import Event
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec, GrantedJob, JobState, Outcome, PackSource, Scheduler
from pipeline.cluster.launchers.job_folder import JobFolder
from pipeline.cluster.launchers.job_follower import JobFollower
from pipeline.cluster.launchers.settings import Capabilities, capabilities
from pipeline.cluster.launchers.transport import agent_client
from pipeline.cluster.launchers.transport.answers import Answer, host_facts
from pipeline.core.errors import HostError, PacelineError
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.keys import rank_environment
from trainers.contract.host_facts import HostFacts

POLL_S = 0.2
"""Between two reads of what the nodes have written."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0  # between two polls of a waiting job


class GrantedLauncher:
    """Runs attempts in a job, whose agents wait half a minute after a failed attempt for another one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.cluster, self.scheduler = scheduler.cluster, scheduler
        self._job: GrantedJob | None = None
        self._state = JobState()  # the scheduler's last answer
        # The scheduler is about to end this restart of the job, so the run must wait for a later restart; -1: none.
        self._unfit_restart = -1
        self._doing = f"asking {self.cluster.launcher} for hosts"

    @property
    def capabilities(self) -> Capabilities:
        return capabilities(self.cluster)

    @property
    def job(self) -> GrantedJob:
        """The job that ``grant`` has waited for."""
        assert self._job is not None, "no hosts were granted"
        return self._job

    def starting(self) -> str:
        """Return the progress of ``grant`` or ``start`` for another thread: words that follow "still"."""
        return self._doing

    # ---------------------------------------------------------------------------- a job
    def grant(
        self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None], check: Callable[[], None]
    ) -> Cluster:
        """Wait for the hosts of this attempt and return the cluster with their names.

        A job that an earlier command has submitted for this run is continued; else a new one is submitted.

        ``modules``: packages and modules whose versions the nodes are to report. ``say``: takes lines for the user.
        ``check``: called several times a second; raises when a signal has arrived. Raises HostError: the hosts are
        refused; TrainingError: somebody has cancelled the job.
        """
        self._doing = f"asking {self.scheduler.name}"
        self.scheduler.render(self.cluster, spec)  # raises UsageError before a job is submitted
        self._job = self._continue_own_job(spec, say, check)
        try:
            is_granted = self._job is not None and self._wait(say, check)
        except HostError:  # the continued job has just ended
            is_granted = False
        # False again if the scheduler took the nodes away before all had reported
        while not is_granted:
            self._submit(spec, modules, say)
            is_granted = self._wait(say, check)
        names = own_names = [str(fact["host"]) for fact in self._reported_facts()]
        if self.scheduler.node_prefix:  # messages use short names; this line says once which node each one is
            nodes = self._poll().nodes
            names = [f"{self.scheduler.node_prefix}{number}" for number in range(self.cluster.nnodes)]
            pairs = zip(names, own_names, strict=True)
            say(", ".join(f"{name} is {own_name} on {nodes.get(own_name) or '?'}" for name, own_name in pairs))
        hosts = [dataclasses.replace(host, name=name) for host, name in zip(self.cluster.hosts, names, strict=True)]
        self.cluster = dataclasses.replace(self.cluster, hosts=tuple(hosts))
        return self.cluster

    def _continue_own_job(
        self, spec: AttemptSpec, say: Callable[[str], None], check: Callable[[], None]
    ) -> GrantedJob | None:
        """Return the job that an earlier command has submitted for this run (None: none), and release all others."""
        continued = None
        for job in self.scheduler.jobs(spec.run_key, spec.run_dir):
            while (state := self.scheduler.poll(job)).is_unanswered:
                self._doing = state.words
                self._pause(_FIRST_PAUSE_S, check)
            # If the configuration has changed since, its script would be another one now, and its hosts may not fit.
            is_same = job.folder.script == self.scheduler.render(self.cluster, spec, job.folder.path.name)
            if continued is not None or not is_same or job.folder.was_left() or state.is_over:
                self._release(job)
                continue
            continued, self._state = job, state
            self._unfit_restart = state.restart if state.is_leaving else -1
            phase = f" ({state.phase})" if state.phase else ""
            say(f"{job.title} of this run is there already{phase}; going on with it")
            job.folder.end(state.restart)  # ranks that an earlier command has started may still run
        return continued

    def _submit(self, spec: AttemptSpec, modules: Sequence[str], say: Callable[[str], None]) -> None:
        folder = JobFolder(spec.run_dir / self.scheduler.folder / secrets.token_hex(3), self.scheduler.script)
        probe = agent_client.probe_request(self.cluster, spec.pack, modules, registry="", gpu_s=0.0)
        request = JobRequest(
            scheduler=self.scheduler.agent,
            folder=str(folder.path),
            lease_s=self.cluster.settings.lease_s,
            probe=probe._replace(workdir=str(spec.run_dir)),
            interface=self.cluster.hosts[0].interface,
            env_passed=tuple(rank_environment.PASSED),
        )
        job = self._job = self.scheduler.submit(self.cluster, spec, folder, request)
        self._state, self._unfit_restart = JobState(), -1
        say(f"{job.title} was submitted; {job.show_command} shows it, {job.end_command} ends it")

    def _wait(self, say: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Wait until all nodes have reported. False: the scheduler took them away, and another job is needed."""
        job, pause_s, last_warning = self.job, _FIRST_PAUSE_S, ""
        while True:
            job.folder.beat()  # else nodes that run already, and wait for the others, would give up
            state = self.scheduler.poll(job, self._state)
            self._doing = state.words
            if not state.is_unanswered:
                self._state = state
            if state.is_over and state.outcome.again:
                say(f"{state.outcome.text.partition(';')[0]}; another job is created")
                self._release(job)
                return False
            if state.is_over:
                if not job.folder.path.is_dir():
                    what = f"{job.title} found its folder {job.folder.path} removed"
                    raise HostError(what, hint="the same command begins anew")
                raise state.error or HostError(f"{job.title} ended before the run began")
            if state.warning and state.warning != last_warning:
                last_warning = state.warning
                say(f"WARNING: {last_warning}")
            if self._pause(pause_s, check, self._is_ready):
                self._job = dataclasses.replace(job, restart=self._state.restart)
                self._doing = f"starting torchrun in {job.title}"
                return True
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)

    @staticmethod
    def _pause(
        seconds: float, check: Callable[[], None] = lambda: None, is_ready: Callable[[], bool] = lambda: False
    ) -> bool:
        """Wait until ``is_ready()``, at most for ``seconds``. False: it wasn't ready by then."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            check()
            if is_ready():
                return True
            time.sleep(POLL_S)
        return False

    def _is_ready(self) -> bool:
        """True if all nodes have reported in this restart of the job, and nothing runs on them."""
        job, state = self.job, self._state
        if not state.is_running or state.restart <= self._unfit_restart:
            return False
        reported = job.folder.facts(state.restart, job.nnodes)
        return len(reported) == job.nnodes and job.folder.is_idle(state.restart, job.nnodes)

    def _reported_facts(self) -> list[dict[str, Any]]:
        return self.job.folder.facts(self.job.restart, self.job.nnodes)

    def _poll(self) -> JobState:
        """Return the state of the job; one with ``is_unanswered`` if the scheduler fails."""
        try:
            state = self.scheduler.poll(self.job, self._state)
        except HostError as error:
            return JobState(is_unanswered=True, outcome=Outcome(text=error.what))
        if not state.is_unanswered:
            self._state = state
        return state

    def _release(self, job: GrantedJob) -> None:
        job.folder.leave()
        self.scheduler.cancel(job)

    def _wait_for_end(self, jobs: Sequence[GrantedJob]) -> dict[str, str]:
        """Wait until cancelled jobs have ended. Returns job → the part that still runs after ``end_s``."""
        deadline, running = time.monotonic() + self.scheduler.end_s, {job.title: job for job in jobs}
        while True:
            remains = {title: why for title, job in running.items() if (why := self.scheduler.poll(job).remains)}
            running = {title: running[title] for title in remains}
            if not running or time.monotonic() >= deadline:
                return {title: f"{NOT_ENDED}{why}" for title, why in remains.items()}
            time.sleep(POLL_S)

    # ---------------------------------------------------------------------------- an attempt in it
    def probe(
        self, pack: PackSource | None, modules: Sequence[str] = (), warm: WarmEnvironment | None = None
    ) -> list[HostFacts]:
        """Return the facts that the job's nodes have reported. Raises HostError: no job, or no data pack there."""
        if self._job is None:
            raise HostError(
                f"{self.cluster.launcher} names the nodes only when a job runs, so none can be asked now",
                hint="doit preflight tells what can be told without a job",
            )
        facts = []
        for host, value in zip(self.cluster.hosts, self._reported_facts(), strict=True):
            fact = host_facts(host.label, value)
            facts.append(fact._replace(interface=host.interface or fact.interfaces.get(fact.address)))
        blind = [fact.host for fact in facts if pack is not None and fact.pack_path is None]
        if pack is not None and blind:
            raise HostError(
                f"{', '.join(blind)}: the data pack {pack.path} isn't there; all nodes must share the folder of data",
                hint="paths.data=<a folder on a file system that this computer and all nodes share>",
            )
        return facts

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[HostFacts], run_dir: Path) -> None:
        """Let all nodes start torchrun. Raises OSError."""
        # A killed command may have left the unmasked output of its ranks, which may contain secrets.
        for printed in run_dir.glob("attempts/*/agent-*/node*/ranks"):
            shutil.rmtree(printed, ignore_errors=True)
        # All nodes would make the same link and folders at once in the shared run folder, so one process makes them.
        if pack is not None and not (run_dir / "data").is_symlink():
            (run_dir / "data").symlink_to(pack.path)
        for node in plan.nodes:
            state_dir = Path(node.state_dir)
            state_dir.mkdir(mode=0o700, parents=True)
            for name in ("log", "lease", "attached"):
                (state_dir / name).touch()
        start = agent_client.job_start_request(plan, str(run_dir.parent / ".agents"), keeps_run_dir=True)
        job = self.job
        self._job = dataclasses.replace(job, is_started=True, printed_bytes=job.folder.output_bytes())
        job.folder.start(job.restart, start)

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> JobFollower:
        """Stream all nodes' output and ends into ``emit`` (called from another thread)."""
        return JobFollower(plan, self.job, self._poll, emit)

    def outcome(self, plan: LaunchPlan) -> Outcome:
        """Return what the scheduler did to the job of a failed attempt, once it has decided that."""
        job = self.job
        if _was_stopped(job):
            return Outcome()
        # Agents that wait for another start keep the job alive, and while it lives the scheduler can't decide whether
        # to queue it again. Nothing will be started in this restart of the job, so the agents are told to leave.
        if not self._poll().is_settled and self.scheduler.requeues:
            job.folder.leave(restart=job.restart)
        self._pause(self.scheduler.settle_s, is_ready=lambda: self._poll().is_settled)
        state = self._poll()
        if _was_stopped(job):
            return Outcome()
        if state.outcome.again and not self.scheduler.requeues:
            # such a scheduler keeps the old job: end it before the next attempt submits another
            self._release(job)
            self._wait_for_end([job])
        return state.outcome

    def stop(self, run_key: str, run_dir: Path, *, start: str = "") -> dict[str, str]:
        """End all jobs of the run folder. Returns job → why it still runs.

        ``start``: the run id of one start. Then only its ranks are ended; the job stays for a further attempt.
        """
        if start:
            return self._end_start()
        # through the shared folder, which works even if the scheduler doesn't answer
        for path in (run_dir / self.scheduler.folder).glob("*"):
            JobFolder(path, self.scheduler.script).leave()
        try:
            jobs = self.scheduler.jobs(run_key, run_dir)
            for job in jobs:
                self.scheduler.cancel(job)
            return self._wait_for_end(jobs)
        except PacelineError as error:
            why = f"{error.what}; its nodes were told through the run folder and end by themselves"
            return {self.scheduler.name: why}

    def _end_start(self) -> dict[str, str]:
        """End the ranks of the newest start; the job stays. Returns job → why they still run."""
        job = self.job
        job.folder.end(job.restart)

        def has_ended() -> bool:
            is_idle = job.folder.path.is_dir() and job.folder.is_idle(job.restart, job.nnodes)
            return is_idle or self._poll().is_idle

        if self._pause(self.scheduler.end_s, is_ready=has_ended):
            return {}
        return {job.title: f"{NOT_ENDED}its nodes don't answer; {job.end_command}"}

    def clean(self, plan: LaunchPlan) -> None:
        """Remove the agents' folders. After a good end also release the nodes; else a further attempt needs them."""
        for node in plan.nodes:
            shutil.rmtree(Path(node.state_dir).parent, ignore_errors=True)
        job = self._job
        if job is None or not job.folder.ended_well(plan.run_id, plan.nnodes):
            return
        if self.scheduler.requeues:
            job.folder.leave(restart=job.restart)
        else:
            with suppress(HostError):  # the scheduler removes it later by itself (its time to live)
                self._release(job)

    # -------------------- methods of a launcher that have nothing to do here, as the nodes share the run folder
    def standings(self, plan: LaunchPlan) -> dict[str, Answer]:
        return {}  # agents in a job take no requests

    def connect(self, facts: list[HostFacts]) -> tuple[list[HostFacts], str]:
        return facts, ""  # connections between granted hosts aren't tried

    def notes(self) -> list[str]:
        return []

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        return True

    def remove_folders(self, unwanted: Sequence[tuple[HostFacts, Sequence[str]]]) -> dict[str, list[str]]:
        return {}

    def close(self) -> None:
        return  # a job ends by itself, or is continued by another command


def _was_stopped(job: GrantedJob) -> bool:
    """Return True if the agents were told to leave for good, or the job's folder was removed, which ends them too."""
    return not job.folder.path.is_dir() or job.folder.was_left()
