"""`doit queue`: who computes on the cluster's hosts, and which runs of this project wait for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.cli import answers
from pipeline.cli.output import note, say
from pipeline.cli.session import ROOT, session
from pipeline.cluster import launchers
from pipeline.cluster.agent.running.claims import clock
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.preflight import occupation
from pipeline.core.errors import UsageError
from pipeline.core.processes.heartbeat import waiting
from pipeline.core.specs import Cluster, NodeFacts
from pipeline.core.tables import aligned
from pipeline.execution import this_computer
from pipeline.runs import waits
from pipeline.runs.waits import Wait


@dataclass(frozen=True, kw_only=True)
class Computing:
    """A run on a host. ``resources``: such as gpu:0, or cpu; ``since``: unix time by that host's clock."""

    host: str
    user: str
    what: str
    resources: tuple[str, ...]
    since: float

    @property
    def devices(self) -> str:
        gpus = [name.partition(":")[2] for name in self.resources if name.startswith("gpu:")]
        return f"GPU {', '.join(gpus)}" if gpus else "processors"


@dataclass(frozen=True, kw_only=True)
class Queue:
    """``processes``: of nobody's run, on GPUs that a run of these words would take; in words, with their host."""

    hosts: tuple[str, ...]
    computing: tuple[Computing, ...]
    processes: tuple[str, ...]
    waiting: tuple[Wait, ...]


def queue() -> None:
    """Ask every host. Raises HostError: one can't be asked. UsageError: a scheduler has the queue."""
    config = session().config
    cluster = config.cluster.with_spares
    if launchers.capabilities(cluster).hosts_are_granted:
        raise UsageError(
            f"{cluster.launcher} has a queue of its own", hint="squeue, kubectl get pods, or what your scheduler has"
        )
    this_computer.refuse_without_lab(cluster, ROOT)
    with waiting(note, "asking the hosts"), closing(Hosts(cluster)) as hosts:
        facts = hosts.facts(None)
    found = asked(cluster, facts, waits.under_way(config.runs_dir))
    if answers.wanted():
        answers.answer(asdict(found))
        return
    say(text(found))


def asked(cluster: Cluster, facts: Sequence[NodeFacts], waiting: Sequence[Wait]) -> Queue:
    """What the hosts have answered, and who waits."""
    computing = [
        _computing(fact.host, row) for fact in facts for row in (fact.extra.get("system") or {}).get("claims", [])
    ]
    others = occupation.occupied(cluster, facts, "")
    return Queue(
        hosts=tuple(fact.host for fact in facts),
        computing=tuple(computing),
        processes=tuple(f"{one.host}: {said}" for one in others for said in one.processes),
        waiting=tuple(waiting),
    )


def _computing(host: str, row: Mapping[str, Any]) -> Computing:
    return Computing(
        host=host, user=row["user"], what=row["what"], resources=tuple(row["resources"]), since=float(row["since"])
    )


def text(found: Queue) -> str:
    """The hosts as a table, and below it who is there without a claim, and who waits."""
    rows = [("host", "user", "run", "on", "since")]
    for host in found.hosts:
        there = [item for item in found.computing if item.host == host]
        rows += [(host, item.user, item.what, item.devices, clock(item.since)) for item in there]
        rows += [] if there else [(host, "-", "free", "", "")]
    lines = [aligned(rows), *found.processes]
    lines += [f"{wait.key} waits since {clock(wait.since)} for {wait.host}: {wait.who}" for wait in found.waiting]
    return "\n".join([*lines, *([] if found.waiting else ["no run of this project waits"])])
