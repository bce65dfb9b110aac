"""This computer alone: the same agent, started without ssh; nothing is sent, nothing collected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from pipeline.cluster.launchers.agent_launcher import AgentLauncher, Answer
from pipeline.cluster.launchers.answers import parse_answer
from pipeline.cluster.launchers.base import AttemptSpec, Place
from pipeline.cluster.launchers.payload import BOOTSTRAP
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.core import process
from pipeline.core.errors import PacelineError
from pipeline.core.specs import Host, LaunchPlan, NodeFacts


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """Nothing more to set."""

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, is_this_computer=True)

    launcher: str = "local"


class LocalLauncher(AgentLauncher):
    """Runs in the run folder itself; the agent's files lie in ``attempts/N`` until the attempt is over."""

    def _argv(self, host: Host) -> list[str]:
        return [str(Path(host.python or sys.executable).expanduser()), "-E", "-c", BOOTSTRAP]

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Answer]:
        answers = {}
        for host in hosts:
            try:
                done = process.run_apart(self._argv(host), stdin=stdin, timeout_s=timeout_s)
            except PacelineError as error:
                answers[host.label] = Answer(value=None, failure=error.what)
                continue
            answers[host.label] = Answer(value=parse_answer(done.stdout.encode()), failure=done.stderr.strip())
        return answers

    def stream_argv(self, host: Host) -> list[str]:
        return self._argv(host)

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        state_dir = spec.run_dir / "attempts" / str(spec.attempt) / f"agent-{run_id}"
        data_dir = str(spec.pack.path) if spec.pack else ""
        return Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))

    def registry(self, run_dir: Path) -> str:
        return str(run_dir.parent / ".agents")  # outlives the run folder, which anybody may remove at any time

    def explain(self, host: Host, failure: str) -> tuple[str, str | None]:
        if failure.startswith("program not found"):
            return (
                f"{failure} (cluster.python={host.python})",
                "cluster.python=null, or the path of an interpreter",
            )
        return failure, None

    def close(self) -> None:
        """Nothing is held."""

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """The outputs lie in the run folder already."""
        return True
