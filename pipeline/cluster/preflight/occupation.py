"""Who else computes where the ranks are to: other runs by their claims, other people's processes on GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.cluster.agent.running.claims import clock, collide, printable
from pipeline.cluster.launchers.settings import REFUSE, WHEN_BUSY_HINT, busy_policy
from pipeline.cluster.launchers.transport.agent_requests import claim, resources
from pipeline.cluster.preflight import gpus
from pipeline.cluster.preflight.judgement import Check, State
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import counted


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """Who is on a host, in words: ``runs`` that have claims there, and ``processes`` that have none."""

    host: str
    runs: tuple[str, ...]
    processes: tuple[str, ...]

    @property
    def who(self) -> str:
        return "; ".join([*self.runs, *self.processes])


def occupied(cluster: Cluster, facts: Sequence[NodeFacts], attempts: str) -> list[Occupation]:
    """The hosts where somebody else is.

    Args:
        attempts: how the ids of the asking run's own attempts begin, which give way to it; '': it has none.
    """
    occupations = []
    for host, fact in zip(cluster.hosts, facts, strict=True):
        system = fact.extra.get("system", {})
        wish = claim(cluster, host, attempts, "")
        rows = [row for row in system.get("claims", []) if collide(row, wish)]
        own = {
            attempts,
            *(row["attempts"] for row in system.get("claims", [])),
        }  # processes of these runs are counted by the claims
        said = system.get("gpus") or {} if cluster.device == "cuda" else {}
        processes = tuple(_processes(host, said, own - {""}))
        if rows or processes:
            occupations.append(
                Occupation(host=fact.host, runs=tuple(str(row["words"]) for row in rows), processes=processes)
            )
    return occupations


def _processes(host: Host, said: Mapping[str, str], own: set[str]) -> Iterator[str]:
    """Processes on the GPUs of the ranks that belong to no run that is known there."""
    wanted = set(resources(host, "cuda"))
    owners = dict(_owners(said.get("owners", "")))
    for gpu in gpus.parse(said):
        if wanted.isdisjoint({f"gpu:{gpu.index}", f"gpu:{gpu.uuid}"}):
            continue
        for process in gpu.processes:
            user, since, mark = owners.get(process.pid, ("somebody", "", ""))
            if not any(mark.startswith(prefix) for prefix in own):
                program = printable(process.program)
                yield f"{user}'s {program} (pid {process.pid}) is on GPU {gpu.index}{since}"


def _owners(text: str) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """pid → user, since when in words, PACELINE_NODE."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) == 4 and cells[0].isdecimal() and cells[2].isdecimal():
            yield int(cells[0]), (printable(cells[1]), f" since {clock(float(cells[2]))}", cells[3])


def checks(cluster: Cluster, facts: Sequence[NodeFacts]) -> list[Check]:
    """For preflight, where no run is meant yet: one of one's own is named as well."""
    state = State.FAILED if busy_policy(cluster) == REFUSE else State.WARNING
    return [
        Check(
            host=occupation.host,
            name="occupied",
            state=state,
            seen=occupation.who,
            wanted="nobody",
            hint=WHEN_BUSY_HINT,
        )
        for occupation in occupied(cluster, facts, "")
    ]


def refuse(occupations: Sequence[Occupation], nnodes: int) -> None:
    """Raises HostError: it names who is where."""
    if occupations:
        rows = [f"  {one.host} is busy: {one.who}" for one in occupations]
        head = f"{len(occupations)} of {counted(nnodes, 'host')} {'is' if len(occupations) == 1 else 'are'} busy:"
        raise HostError("\n".join([head, *rows]), hint=WHEN_BUSY_HINT)
