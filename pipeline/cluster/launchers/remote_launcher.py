"""Hosts that share no files with the controller: where a run lies on them, and how its outputs come back."""

from __future__ import annotations

from abc import ABC
from functools import cached_property
from pathlib import Path

from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec, Place
from pipeline.cluster.launchers.collect import receive
from pipeline.core.specs import Host, LaunchPlan, NodeFacts


class RemoteLauncher(AgentLauncher, ABC):
    """What is left to write are ``exchange``, ``stream_argv``, ``explain`` and ``close``."""

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Host label → where it stands in the list."""
        return {host.label: number for number, host in enumerate(self.cluster.hosts)}

    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place:
        """A folder for each run id and node: homes are often shared over NFS."""
        workdir = self.workdir
        if workdir == "~" or workdir.startswith("~/"):
            workdir = facts.home + workdir[1:]
        node_dir = f"{workdir}/runs/{run_id}/node{self._numbers[host.label]}"
        data_dir = facts.pack_path or (f"{workdir}/data/{spec.pack.digest}" if spec.pack else "")
        return Place(run_dir=node_dir, data_dir=data_dir, state_dir=f"{node_dir}/agent")

    def registry(self, run_dir: Path) -> str:
        return f"{self.workdir}/agents"

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        host = next(host for host in self.cluster.hosts if host.label == plan.nodes[0].host)
        request = self._request(plan, run_dir)
        return receive(self.connection(host), request, run_dir, final=final, outputs=plan.outputs)
