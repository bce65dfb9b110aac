"""Other users of the hosts: runs by their claims, other processes on GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.cluster.agent.running.claims import clock, collide, printable
from pipeline.cluster.launchers.settings import REFUSE, WHEN_BUSY_HINT, busy_policy
from pipeline.cluster.launchers.transport.agent_client import claim, resources
from pipeline.cluster.preflight import hardware
from pipeline.cluster.preflight.judgement import Check, State, judged
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import counted
from trainers.contract.host_facts import HostFacts


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """The users of one host, as texts: ``runs`` that claim it, and ``processes`` that belong to no known run."""

    host: str
    runs: tuple[str, ...]
    processes: tuple[str, ...]

    @property
    def who(self) -> str:
        return "; ".join([*self.runs, *self.processes])


def occupied(cluster: Cluster, facts: Sequence[HostFacts], attempts: str) -> list[Occupation]:
    """Return the hosts that others use.

    ``attempts``: prefix of the ids of this run's own attempts, which don't count as others; '' if it has none.
    """
    occupations = []
    for host, fact in zip(cluster.hosts, facts, strict=True):
        own_claim = claim(cluster, host, attempts, "")
        runs = tuple(held.description for held in fact.claims if collide(held, own_claim))
        processes = tuple(_processes(host, fact, attempts)) if cluster.device == "cuda" else ()
        if runs or processes:
            occupations.append(Occupation(host=fact.host, runs=runs, processes=processes))
    return occupations


def _processes(host: Host, fact: HostFacts, own_attempts: str) -> Iterator[str]:
    """Yield a line for each process on the ranks' GPUs that belongs neither to this run nor to one with a claim."""
    known_runs = {own_attempts, *(held.attempt_prefix for held in fact.claims)} - {""}
    devices_of_ranks = set(resources(host, "cuda"))
    owners = {
        int(pid): (printable(user), f" since {clock(float(since))}", mark)  # its PACELINE_NODE
        for pid, user, since, mark in hardware.rows(fact.nvidia_smi.owners if fact.nvidia_smi else "", 4)
        if pid.isdecimal() and since.isdecimal()
    }
    for gpu in hardware.parse_gpus(fact.nvidia_smi):
        if devices_of_ranks.isdisjoint({f"gpu:{gpu.index}", f"gpu:{gpu.uuid}"}):
            continue
        for process in gpu.processes:
            user, since, mark = owners.get(process.pid, ("somebody", "", ""))
            if not any(mark.startswith(prefix) for prefix in known_runs):
                program = printable(process.program)
                yield f"{user}'s {program} (pid {process.pid}) is on GPU {gpu.index}{since}"


def checks(cluster: Cluster, facts: Sequence[HostFacts]) -> list[Check]:
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
