"""What an attempt whose controller was killed, or whose connection broke, has left on its hosts: its checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.launchers.base import Launcher
from pipeline.core.errors import PacelineError
from pipeline.core.specs import Cluster, Host, LaunchPlan, NodeFacts, NodePlan, Outputs
from pipeline.runs import attempts

_DONE = "collected"


def bring(launcher: Launcher, facts: Sequence[NodeFacts], run_dir: Path) -> None:
    """End the attempt before on every host, take its checkpoints into ``run_dir``, and clear the hosts of it.

    Does nothing where they came already, or where its first host isn't one of these any more.
    """
    plan = left(run_dir)
    first = next((fact for fact in facts if plan is not None and fact.identity == plan.nodes[0].identity), None)
    if plan is None or first is None:
        return
    nodes = (dataclasses.replace(plan.nodes[0], host=first.host), *plan.nodes[1:])  # it may have another name by now
    plan = dataclasses.replace(plan, nodes=nodes)
    launcher.stop(plan.run_key, run_dir)
    _take(launcher, plan, run_dir)


def bring_from_other_hosts(
    cluster: Cluster, facts: Sequence[NodeFacts], run_dir: Path, doing: Callable[[Callable[[], str]], None]
) -> list[str]:
    """The same where the attempt before was started on hosts that aren't of this cluster: a run's key doesn't tell
    hosts apart, so it may go on elsewhere. What the person should know of it.

    Args:
        facts: of the cluster's hosts.
        doing: told what tells what this is at.
    """
    plan = left(run_dir)
    if plan is None or plan.nodes[0].identity in {fact.identity for fact in facts}:
        return []
    first, hosts = plan.nodes[0].host, tuple(_host(node.host, cluster) for node in plan.nodes)
    if first in {host.label for host in cluster.hosts}:
        return []
    what = f"ending attempt {plan.attempt} on {', '.join(host.label for host in hosts)} and bringing its checkpoints"
    there = dataclasses.replace(cluster, launcher=plan.launcher, hosts=hosts, spares=(), settings=None)
    try:
        if not keeps_files(there):
            return []
        doing(lambda: what)
        with closing(launchers.create(there)) as launcher:
            why = launcher.stop(plan.run_key, run_dir).get(first)
            if why is None and _take(launcher, plan, run_dir):
                return [f"attempt {plan.attempt} was left on {first}: it is ended there, and what it had saved is here"]
    except PacelineError as error:
        why = error.what
    return [
        f"WARNING: attempt {plan.attempt} was left on {first}, which can't be asked: {why or 'it sends no files'}\n"
        f"  this attempt goes on without what it has saved; ranks that live there are ended after cluster.lease_s"
        f"={plan.lease_s:g}, or by doit stop with words that name {first}"
    ]


def keeps_files(cluster: Cluster) -> bool:
    """Whether what an attempt leaves stays on hosts that somebody has chosen. Raises UsageError: no such launcher."""
    found = launchers.capabilities(cluster)
    return not (found.shares_run_dir or found.hosts_are_granted)


def _host(label: str, cluster: Cluster) -> Host:
    """A host of an earlier plan; what only a configuration tells of it is that of the same or the first host now."""
    known = {host.label: host for host in (*cluster.hosts, *cluster.spares)}
    if label in known:
        return known[label]
    user, _, place = label.rpartition("@")
    name, _, port = place.rpartition(":") if place.count(":") == 1 else (place, "", "")
    return Host(name=name, user=user or None, port=int(port) if port else None, python=cluster.hosts[0].python)


def _take(launcher: Launcher, plan: LaunchPlan, run_dir: Path) -> bool:
    """Whether all that an ended attempt has left came into ``run_dir``; its hosts are cleared of it then."""
    came = launcher.collect(plan, run_dir, final=False)
    if came:
        launcher.clean(plan)
        nothing_is_left(plan, run_dir)
    return came


def nothing_is_left(plan: LaunchPlan, run_dir: Path) -> None:
    """Note that no later attempt has to ask the hosts of ``plan`` for anything. A removed folder needs no note."""
    folder = run_dir / "attempts" / str(plan.attempt)
    if folder.is_dir():
        (folder / _DONE).write_text(plan.run_id, encoding="utf-8")


def is_fetched(run_id: str, run_dir: Path) -> bool:
    """Whether nothing that the attempt has left on its hosts is asked for any more: a later one has begun, or all of
    it is here."""
    known, number = attempts.known(run_dir), run_id.rsplit("-", 2)[-2]
    return run_id in known and (known[-1] != run_id or _noted(run_dir, number) == run_id)


def _noted(run_dir: Path, attempt: int | str) -> str:
    path = run_dir / "attempts" / str(attempt) / _DONE
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def newest(run_dir: Path) -> LaunchPlan | None:
    """The plan of the newest attempt; None where it can't be told."""
    try:
        return _read(json.loads((run_dir / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def left(run_dir: Path) -> LaunchPlan | None:
    """The same, unless all that it left is here."""
    plan = newest(run_dir)
    if plan is None or not plan.nodes or attempts.known(run_dir)[-1:] != [plan.run_id]:
        return None
    return None if _noted(run_dir, plan.attempt) == plan.run_id else plan


def _read(value: dict[str, Any]) -> LaunchPlan:
    nodes = tuple(NodePlan(**node) for node in value["nodes"])
    outputs: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value["outputs"].items()
    }
    return LaunchPlan(**{**value, "nodes": nodes, "outputs": Outputs(**outputs)})
