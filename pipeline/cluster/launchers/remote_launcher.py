"""Hosts that share no files with the controller: where a run lies on them, and how its outputs come back."""

from __future__ import annotations

import dataclasses
import shutil
from abc import ABC
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec, Place
from pipeline.cluster.launchers.collect import receive
from pipeline.core.specs import Host, LaunchPlan, NodeFacts, NodePlan, Outputs
from trainers.contract import run_folder

_AT_ONCE = 8  # hosts that send at a time
_NOT_HAD = (
    "{hosts}: what its ranks alone have saved (checkpoints, files in the working directory) can't be fetched; an "
    "attempt that goes on from a checkpoint does so without it"
)


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
        """The first node's outputs, then what the others have of their own, into ``nodes/RANK``.

        Where one of those can't be had before the end, that is noted and the rest counts.
        """
        hosts = {host.label: host for host in self.cluster.hosts}
        request = self._request(plan, run_dir)
        came = self._receive(hosts[plan.nodes[0].host], request, run_dir, plan.outputs, 0, final=final)
        if came and plan.outputs.others:
            reachable = [node for node in plan.nodes[1:] if node.host in hosts and node.host not in self._silent]
            outputs = _of_others(plan.outputs)

            def receive_own(node: NodePlan) -> bool:
                return self._receive(hosts[node.host], request, run_dir, outputs, node.node_rank, final=final)

            with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
                had = dict(zip([node.host for node in reachable], pool.map(receive_own, reachable), strict=True))
            lacking = [node.host for node in plan.nodes[1:] if not had.get(node.host)]
            if lacking:
                self._notes.append(_NOT_HAD.format(hosts=", ".join(lacking)))
        if came and final and not (run_dir / run_folder.PRUNED).exists():  # all of it is among the outputs now
            for folder in [run_dir / "work", *run_dir.glob("nodes/*/work")]:
                shutil.rmtree(folder, ignore_errors=True)
        return came

    def _receive(
        self, host: Host, request: dict[str, Any], run_dir: Path, outputs: Outputs, rank: int, *, final: bool
    ) -> bool:
        return receive(
            self.connection(host), request, run_dir, final=final, outputs=outputs, rank=rank, say=self._notes.append
        )


def _of_others(outputs: Outputs) -> Outputs:
    return dataclasses.replace(outputs, resume=outputs.others, final=outputs.others, needed=(), pruned=None)
