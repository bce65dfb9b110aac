"""What launchers share whose hosts a scheduler grants: one job, whose nodes share the folder of runs with us."""

from __future__ import annotations

import dataclasses
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pipeline.cluster import launchers
from pipeline.cluster.launchers.agent_requests import ENV_NAMES
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec, Launcher, Outcome, PackSource, Place
from pipeline.cluster.launchers.job_folder import JobFolder, JobFollower
from pipeline.cluster.launchers.probe_answer import node_facts
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Event, Host, LaunchPlan, NodeFacts
from pipeline.keys import rank_environment
from pipeline.runs import attempts
from trainers.contract import run_folder

LOOK_S = 0.2
"""Between two looks at what the nodes have written."""


class GrantedJob(ABC):
    """The scheduler's job that serves the attempts of one run.

    ``doing``: what is waited for, as words that follow "still". ``standing``: why its ranks stand still, by the
    scheduler's newest answer; '': they don't. ``end_s``: how long the end of a start may take.
    """

    standing = ""
    end_s = 20.0

    def __init__(self, folder: JobFolder, nnodes: int, *, doing: str) -> None:
        self.folder, self._nnodes, self.doing = folder, nnodes, doing

    @property
    @abstractmethod
    def life(self) -> int:
        """How often the scheduler has taken its nodes away and granted it others."""

    @property
    @abstractmethod
    def title(self) -> str:
        """How messages name the job."""

    @property
    @abstractmethod
    def end_command(self) -> str:
        """The command with which the user may end it."""

    def wait(self, say: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Wait until all nodes have reported; False: they were taken away before, and another job is needed.

        Raises:
            HostError: the job ended before; and what ``check`` raises, which is called all the time.
        """
        pause_s = 0.5
        while self._goes_on(say):
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                check()
                if self._is_ready():
                    self.doing = f"starting torchrun in {self.title}"
                    return True
                time.sleep(LOOK_S)
            pause_s = min(10.0, pause_s * 1.5)
        return False

    @abstractmethod
    def _goes_on(self, say: Callable[[str], None]) -> bool:
        """Ask the scheduler for the job's state, and set ``doing``. False, HostError: as ``wait``."""

    def _is_ready(self) -> bool:
        """Whether all nodes have reported, and nothing runs on them."""
        return len(self.facts()) == self._nnodes and self.folder.is_idle(self.life, self._nnodes)

    def facts(self) -> list[dict[str, Any]]:
        """The facts of the nodes that have reported in this life of the job, in the order of their numbers."""
        return self.folder.facts(self.life, self._nnodes)

    def start(self, request: dict[str, Any]) -> None:
        """Let all nodes start torchrun. Raises OSError."""
        self.folder.order(restart=self.life, start=request)

    @abstractmethod
    def gone(self, life: int) -> str:
        """Why the job is no longer in that life of it; '' while it is, or while the scheduler doesn't answer."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """What the scheduler did to the job in which a start ended badly; waits until that is decided."""

    def end_start(self) -> dict[str, str]:
        """End the start that runs in this life of the job; the job stays. Job → why the start goes on."""
        life, deadline = self.life, time.monotonic() + self.end_s
        self.folder.end(life)
        while time.monotonic() < deadline:
            if (self.folder.path.is_dir() and self.folder.is_idle(life, self._nnodes)) or self._is_off(life):
                return {}
            time.sleep(LOOK_S)
        return {self.title: f"{NOT_ENDED}its nodes don't answer; {self.end_command}"}

    @abstractmethod
    def _is_off(self, life: int) -> bool:
        """Whether the scheduler says that nothing runs in that life of the job any more."""


class GrantedLauncher(Launcher):
    """Asks a scheduler for a job; on each of its nodes an agent waits for starts, which come through ``JobFolder``.

    After a bad end the agents wait for another start for half a minute, so that a further attempt needn't queue again.
    ``scheduler`` names the agent's module that knows which node of the job it is on.
    """

    scheduler: ClassVar[str]
    _job: GrantedJob | None = None

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @property
    def capabilities(self) -> Capabilities:
        return launchers.capabilities(self.cluster)

    @property
    def job(self) -> GrantedJob:
        """The job that ``grant`` has waited for."""
        if self._job is None:
            raise RuntimeError("no hosts were granted")
        return self._job

    @abstractmethod
    def cancel_all(self, run_key: str, run_dir: Path) -> dict[str, str]:
        """End all jobs of a run folder; job → why one that goes on does."""

    def named(self, names: Sequence[str]) -> Cluster:
        """The cluster with its hosts' names, which it has from now on."""
        hosts = tuple(
            dataclasses.replace(host, name=name) for host, name in zip(self.cluster.hosts, names, strict=True)
        )
        self.cluster = dataclasses.replace(self.cluster, hosts=hosts)
        return self.cluster

    def starting(self) -> str:
        return self._job.doing if self._job is not None else f"asking {self.cluster.launcher} for hosts"

    def request(self, spec: AttemptSpec, modules: Sequence[str]) -> dict[str, Any]:
        """The first request to every node of the job."""
        return {
            "do": "job",
            "scheduler": self.scheduler,
            "lease_s": self.cluster.lease_s,
            "interface": self.cluster.hosts[0].interface,
            "env_passed": rank_environment.PASSED,
            "probe": {
                "workdir": str(spec.run_dir),
                "env_names": ENV_NAMES,
                "env_families": rank_environment.FAMILIES,
                "env_passed": rank_environment.PASSED,
                "modules": modules,
                "python_path": self.cluster.python_path,
                "pack_digest": spec.pack.digest if spec.pack else "",
                "pack_places": [str(spec.pack.path)] if spec.pack else [],
            },
        }

    # ---------------------------------------------------------------------------- an attempt in it
    def probe(
        self, pack: PackSource | None, modules: Sequence[str] = (), warm: Mapping[str, Any] | None = None
    ) -> list[NodeFacts]:
        if self._job is None:
            raise HostError(
                f"{self.cluster.launcher} names the nodes only when a job runs, so none can be asked now",
                hint="doit preflight tells what can be told without a job",
            )
        facts = [_facts(host, value) for host, value in zip(self.cluster.hosts, self._job.facts(), strict=True)]
        blind = [fact.host for fact in facts if pack is not None and fact.pack_path is None]
        if pack is not None and blind:
            raise HostError(
                f"{', '.join(blind)}: the data pack {pack.path} isn't there; all nodes must share the folder of data",
                hint="paths.data=<a folder on a file system that this computer and all nodes share>",
            )
        return facts

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        number = self.cluster.hosts.index(host)
        state_dir = spec.run_dir / run_folder.ATTEMPTS / str(spec.attempt) / f"agent-{run_id}" / f"node{number}"
        data_dir = str(spec.pack.path) if spec.pack else ""
        return Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[NodeFacts], run_dir: Path) -> None:
        """The folders are made here, where one process makes them for all nodes.

        What ranks of an earlier start have printed goes, which a killed command has left: it may hold secrets.
        """
        for printed in run_dir.glob("attempts/*/agent-*/node*/ranks"):
            shutil.rmtree(printed, ignore_errors=True)
        if pack is not None and not (run_dir / "data").is_symlink():
            (run_dir / "data").symlink_to(pack.path)
        for node in plan.nodes:
            state_dir = Path(node.state_dir)
            state_dir.mkdir(mode=0o700, parents=True)
            for name in ("log", "lease", "attached"):
                (state_dir / name).touch()
        start = {
            "run_key": plan.run_key,
            "run_id": plan.run_id,
            "attempts": attempts.prefix_of(plan.run_id),
            "lease_s": plan.lease_s,
            "registry": str(run_dir.parent / ".agents"),
            "nodes": [{**dataclasses.asdict(node), "remove": [node.state_dir]} for node in plan.nodes],
        }
        self.job.start(start)

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> JobFollower:
        life = self.job.life
        return JobFollower(plan, self.job.folder, life, partial(self.job.gone, life), emit, lambda: self.job.standing)

    def outcome(self, plan: LaunchPlan) -> Outcome:
        return self.job.outcome()

    def stop(self, run_key: str, run_dir: Path, *, bar: str = "") -> dict[str, str]:
        if bar:  # one start, after which the job may be wanted for another
            return self.job.end_start()
        return self.cancel_all(run_key, run_dir)

    def clean(self, plan: LaunchPlan) -> None:
        """After a good end the nodes may go too; after a bad one another attempt may want them."""
        for node in plan.nodes:
            shutil.rmtree(Path(node.state_dir).parent, ignore_errors=True)
        if self._job is not None and self._job.folder.ended_well(plan.run_id, plan.nnodes):
            self.let_go()

    def let_go(self) -> None:
        """What follows a good end: the nodes leave."""
        self.job.folder.leave(restart=self.job.life)

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """The outputs lie in the run folder already."""
        return True

    def close(self) -> None:
        """Nothing is held: a job ends by itself, or is found again."""


def _facts(host: Host, value: dict[str, Any]) -> NodeFacts:
    """A node's answer with what the configuration says on top."""
    facts = node_facts(host.label, value)
    return dataclasses.replace(facts, interface=host.interface or facts.extra["interfaces"].get(facts.address))
