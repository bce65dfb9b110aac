"""Other users of the hosts: runs by their claims, other processes on GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.cluster.agent.running.claims import clock, collide, printable
from pipeline.cluster.launchers.settings import REFUSE, WHEN_BUSY_HINT, busy_policy
from pipeline.cluster.launchers.transport.agent_requests import claim, resources
from pipeline.cluster.preflight import gpus
from pipeline.cluster.preflight.judgement import Check, State, judged
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import counted


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """The users of one host, as texts: ``runs`` that claim it, and ``processes`` that belong to no known run."""

    host: str
    runs: tuple[str, ...]
    processes: tuple[str, ...]

    @property
    def who(self) -> str:
        return "; ".join([*self.runs, *self.processes])


def occupied(cluster: Cluster, facts: Sequence[NodeFacts], attempts: str) -> list[Occupation]:
    """Return the hosts that others use.

    ``attempts``: prefix of the ids of this run's own attempts, which don't count as others; '' if it has none.
    """
    occupations = []
    for host, fact in zip(cluster.hosts, facts, strict=True):
        system = fact.extra.get("system", {})
        own_claim = claim(cluster, host, attempts, "")
        rows = [row for row in system.get("claims", []) if collide(row, own_claim)]
        # processes of these runs are known by their claims
        known = {attempts, *(row["attempts"] for row in system.get("claims", []))} - {""}
        answers = system.get("gpus") or {} if cluster.device == "cuda" else {}
        processes = tuple(_processes(host, answers, known))
        if rows or processes:
            occupations.append(
                Occupation(host=fact.host, runs=tuple(str(row["words"]) for row in rows), processes=processes)
            )
    return occupations


def _processes(host: Host, answers: Mapping[str, str], known: set[str]) -> Iterator[str]:
    """Yield the processes on the ranks' GPUs that belong to no known run."""
    wanted = set(resources(host, "cuda"))
    owners = {
        int(pid): (printable(user), f" since {clock(float(since))}", mark)  # its PACELINE_NODE
        for pid, user, since, mark in gpus.rows(answers.get("owners", ""), 4)
        if pid.isdecimal() and since.isdecimal()
    }
    for gpu in gpus.parse(answers):
        if wanted.isdisjoint({f"gpu:{gpu.index}", f"gpu:{gpu.uuid}"}):
            continue
        for process in gpu.processes:
            user, since, mark = owners.get(process.pid, ("somebody", "", ""))
            if not any(mark.startswith(prefix) for prefix in known):
                program = printable(process.program)
                yield f"{user}'s {program} (pid {process.pid}) is on GPU {gpu.index}{since}"


def checks(cluster: Cluster, facts: Sequence[NodeFacts]) -> list[Check]:
    """Return the checks of preflight: all runs count, also the user's own."""
    state = State.FAILED if busy_policy(cluster) == REFUSE else State.WARNING
    return [
        judged(one.host, "occupied", one.who, False, wanted="nobody", hint=WHEN_BUSY_HINT, otherwise=state)
        for one in occupied(cluster, facts, "")
    ]


def refuse(occupations: Sequence[Occupation], nnodes: int) -> None:
    """Raise HostError that names the users of each busy host, if there is one."""
    if occupations:
        rows = [f"  {one.host} is busy: {one.who}" for one in occupations]
        head = f"{len(occupations)} of {counted(nnodes, 'host')} {'is' if len(occupations) == 1 else 'are'} busy:"
        raise HostError("\n".join([head, *rows]), hint=WHEN_BUSY_HINT)
