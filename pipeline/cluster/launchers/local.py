"""This computer alone: the same agent, started without ssh; nothing is sent, nothing collected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.answers import Answer, Output
from pipeline.cluster.launchers.base import AttemptSpec, Place
from pipeline.cluster.launchers.host_errors import quoted, too_old
from pipeline.cluster.launchers.payload import BOOTSTRAP
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.core import process
from pipeline.core.errors import PacelineError
from pipeline.core.files import expanded
from pipeline.core.specs import Host, LaunchPlan, NodeFacts
from trainers.contract import run_folder

_STARVED_S = 60.0


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """Nothing more to set."""

    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, is_this_computer=True)

    launcher: str = "local"


class LocalLauncher(AgentLauncher):
    """Runs in the run folder itself; the agent's files lie in ``attempts/N`` until the attempt is over.

    Between it and its agents lies no network: one that has ended is noticed at once, and one that says nothing gets no
    processor, for as long as others want them all.
    """

    silent_s = _STARVED_S

    def _argv(self, host: Host) -> list[str]:
        return [str(expanded(host.python or sys.executable, f"cluster.python={host.python}")), "-E", "-c", BOOTSTRAP]

    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        outputs = {}
        for host in hosts:
            try:
                done = process.run_apart(self._argv(host), stdin=stdin, timeout_s=timeout_s + _STARVED_S)
            except PacelineError as error:
                outputs[host.label] = Output(code=None, note=error.what)
                continue
            outputs[host.label] = Output(stdout=done.stdout.encode(), stderr=done.stderr, code=done.code)
        return outputs

    def stream_argv(self, host: Host) -> list[str]:
        return self._argv(host)

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        state_dir = spec.run_dir / run_folder.ATTEMPTS / str(spec.attempt) / f"agent-{run_id}"
        data_dir = str(spec.pack.path) if spec.pack else ""
        return Place(run_dir=str(spec.run_dir), data_dir=data_dir, state_dir=str(state_dir))

    def registry(self, run_dir: Path) -> str:
        return str(run_dir.parent / ".agents")  # outlives the run folder, which anybody may remove at any time

    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        if answer.told is not None:
            return answer.told, None
        note, code = answer.output.note, answer.output.code
        if note.startswith("program not found") or "can't be run" in note:
            return f"{note} (cluster.python={host.python})", "cluster.python=null, or the path of an interpreter"
        ended = note or f"the node agent ended with exit code {code} and no answer"
        return too_old(answer.output) or (ended + quoted(answer.output, host.secrets.values()), None)

    def close(self) -> None:
        """Nothing is held."""

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        """The outputs lie in the run folder already."""
        return True
