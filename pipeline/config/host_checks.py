"""What can be said of hosts and spares before any of them is asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cluster.spares import against
from pipeline.core.cluster import Host, unfit_name
from pipeline.core.errors import UsageError


def check_places(workdir: str | None, hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    """Raises UsageError: a folder, name, user or port that a host can't be given."""
    if workdir is not None and workdir != "~" and not workdir.startswith(("/", "~/")):
        raise UsageError(f"cluster.workdir={workdir} must be an absolute path on the hosts, or begin with ~/")
    for field, host in _named(hosts, spares):
        if why := unfit_name(host):
            raise UsageError(f"{field}: {host.label!r} {why}")
        if host.port is not None and not 1 <= host.port <= 65535:
            raise UsageError(f"{field} {host.name}: port={host.port} must be a whole number from 1 to 65535")


def check_together(hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    """Raises UsageError: two with one label, or a spare that is of no use to these hosts."""
    _refuse_duplicates(hosts, spares)
    _refuse_unfit_spares(hosts, spares)


def _refuse_duplicates(hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    seen: dict[str, str] = {}
    for field, host in _named(hosts, spares):
        if (first := seen.get(host.label)) == "cluster.hosts" and field == "cluster.spares":
            raise UsageError(
                f"cluster.hosts and cluster.spares both name {host.label}; a spare is a further host, for a lost one"
            )
        if first is not None:
            raise UsageError(
                f"{field} names {host.label} twice; each node takes part once (more ranks: nproc_per_node)"
            )
        seen[host.label] = field


def _refuse_unfit_spares(hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    """Ranks and variables count in a run's key, so a spare that has others than every host could take no place."""
    for spare in spares:
        reasons = [against(spare, host) for host in hosts]
        if all(reasons):
            raise UsageError(
                f"cluster.spares {spare.label} can take no host's place: {reasons[0]}; "
                "a spare has the ranks and the variables of a host"
            )


def _named(hosts: Sequence[Host], spares: Sequence[Host]) -> list[tuple[str, Host]]:
    """Each with the field that it stands in."""
    return [*(("cluster.hosts", host) for host in hosts), *(("cluster.spares", spare) for spare in spares)]
