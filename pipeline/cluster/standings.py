"""Ask the hosts of an attempt whose command is gone how it stands: which nodes still run, and how others ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.agent.reports import Standing
from pipeline.cluster.attempt.failures import explained_by_script
from pipeline.core import documents
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, LaunchPlan
from trainers.contract import run_folder
from trainers.contract.records import as_json


def why_over(cluster: Cluster, plan: LaunchPlan, run_dir: Path) -> list[str] | None:
    """Return why an attempt whose command is gone can't be followed, a line for each node that gave a reason.

    None: it can be, as each of its nodes still runs its part or has succeeded.

    Args:
        cluster: has the hosts of ``plan``.
        run_dir: records the ends that a command has seen. If all have ended, no host is asked.

    Raises:
        HostError: a host doesn't answer.
    """
    recorded = _recorded_failures(plan, run_dir)
    if recorded.keys() == {node.host for node in plan.nodes}:
        return [f"attempt {plan.attempt} is over on {host}: {how}" for host, how in recorded.items()]
    with closing(launchers.create(cluster)) as launcher:
        answers = launcher.standings(plan)
        if any(answer.value is None for answer in answers.values()):
            launcher.probe(None)  # raises HostError that names what is wrong with each host
            answers = launcher.standings(plan)
    silent = {host: answer.error for host, answer in answers.items() if answer.value is None}
    if silent:
        raise HostError(
            f"can't ask {', '.join(silent)} whether attempt {plan.attempt} still runs: {next(iter(silent.values()))}",
            hint="the same command again",
            hosts=[*silent],
        )
    standings = {host: answer.record(Standing) for host, answer in answers.items()}
    over = {
        host: standing
        for host, standing in standings.items()
        if standing is None or not (standing.alive or standing.code == 0)
    }
    lines = []
    for host, standing in over.items():
        if standing is not None and standing.reason:
            how = recorded.get(host) or _end_in_words(standing.reason, as_json(standing.errors))
            lines.append(f"attempt {plan.attempt} is over on {host}: {how}")
    return lines if over else None


def with_current_labels(cluster: Cluster, plan: LaunchPlan) -> LaunchPlan | None:
    """Return the plan with the labels that its hosts have in ``cluster``; None if they aren't the same hosts.

    Hosts are compared by host name, address and port of the ssh server, and user.
    """
    if plan.launcher != cluster.launcher or len(plan.nodes) != cluster.nnodes:
        return None
    with closing(launchers.create(cluster)) as launcher:
        answers = launcher.standings(plan)
    standings = {label: answer.record(Standing) for label, answer in answers.items()}
    labels = {standing and standing.identity: label for label, standing in standings.items()}
    if labels.keys() != {node.identity for node in plan.nodes}:
        return None
    named = tuple(dataclasses.replace(node, host=labels[node.identity]) for node in plan.nodes)
    return dataclasses.replace(plan, nodes=named)


def _recorded_failures(plan: LaunchPlan, run_dir: Path) -> dict[str, str]:
    """Return host → how its part failed, by the run folder's record; the host may have removed its own."""
    ends = {}
    for node in plan.nodes:
        path = run_dir / run_folder.ATTEMPTS / str(plan.attempt) / f"{node.host}.exit.json"
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            is_of_plan = path.stat().st_mtime_ns >= (run_dir / run_folder.PLAN).stat().st_mtime_ns
            end = documents.read(path)
            if is_of_plan and end["event"] == "NodeExit" and end["code"] != 0:
                ends[node.host] = _end_in_words(str(end["reason"]), end["errors"])
    return ends


def _end_in_words(reason: str, errors: Sequence[Mapping[str, Any]]) -> str:
    """Return a line about the end of a node's part: its first error, else the agent's reason."""
    for error in errors:
        rank, message = int(error["rank"]), str(error["message"]).partition("\n")[0]
        return f"rank {rank}{'' if message.startswith('ended with ') else ':'} {message}"
    first = reason.partition("\n")[0]
    return "it was stopped (Ctrl-C or doit stop)" if first == "stopped" else explained_by_script(reason) or first
