"""Set up ssh without a password among all hosts of a cluster, over the user's own access to them (`doit mesh`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.cluster import launchers
from pipeline.cluster.agent.host.mesh import AT_ONCE, MARK, TRY_S
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import aligned, counted


@dataclass(frozen=True, kw_only=True)
class Member:
    """One host of the mesh: how others log in to it, and what was changed on it."""

    host: str
    name: str
    user: str
    address: str
    port: int
    public_key: str
    made_key: bool
    host_keys: tuple[str, ...]
    names: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    added_keys: int = 0
    added_hosts: int = 0
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The hosts and failed connections of a mesh.

    ``failures``: (from, to) → why ssh failed; ``exact``: (from, to) → why ssh works only with a port and a user.
    """

    members: tuple[Member, ...]
    failures: Mapping[tuple[str, str], str]
    exact: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        return len(self.members) * (len(self.members) - 1)


@dataclass(frozen=True, kw_only=True)
class Undone:
    """What was removed from one host."""

    host: str
    keys: int
    hosts: int
    key_removed: bool


def connect(cluster: Cluster) -> Mesh:
    """Make missing keys, add them on every host, then try every pair (three commands a host).

    Raises:
        UsageError: the launcher reaches no other hosts.
        HostError: a host doesn't answer.
    """
    with closing(_launcher(cluster)) as launcher:
        members = _members(launcher, make=True)
        values = _asked(launcher, {"do": "mesh_accept", **accepted(members)})
        added = [
            replace(one, added_keys=value["keys"], added_hosts=value["hosts"], conflicts=tuple(value["conflicts"]))
            for one in members
            for value in [values[one.host]]
        ]
        return Mesh(members=tuple(added), **_try_pairs(launcher, members))


def check(cluster: Cluster) -> Mesh:
    """Try every pair and change nothing. Raises UsageError, HostError."""
    with closing(_launcher(cluster)) as launcher:
        members = _members(launcher, make=False)
        return Mesh(members=tuple(members), **_try_pairs(launcher, members))


def undo(cluster: Cluster) -> list[Undone]:
    """Remove what ``connect`` added. Raises UsageError, HostError."""
    with closing(_launcher(cluster)) as launcher:
        values = _asked(launcher, {"do": "mesh_undo"})
        return [Undone(host=host.label, **values[host.label]) for host in cluster.hosts]


def _launcher(cluster: Cluster) -> AgentLauncher:
    launcher = launchers.create(cluster)
    if isinstance(launcher, AgentLauncher) and not launcher.capabilities.is_this_computer and cluster.nnodes > 1:
        return launcher
    launcher.close()
    if cluster.nnodes < 2 and not launcher.capabilities.is_this_computer:
        what = f"doit mesh connects hosts with each other, and the cluster has {counted(cluster.nnodes, 'host')}"
        raise UsageError(what)
    raise UsageError(
        f"doit mesh connects hosts that ssh reaches, and cluster.launcher={cluster.launcher} reaches none",
        hint="cluster=pssh cluster.hostfile=FILE, or cluster=two_node after doit lab --hosts 2",
    )


def _asked(launcher: AgentLauncher, request: dict[str, Any], longer_s: float = 20.0) -> dict[str, dict[str, Any]]:
    return launcher.demand("mesh", request, timeout_s=launcher.short_s + longer_s)


def _members(launcher: AgentLauncher, *, make: bool) -> list[Member]:
    values = _asked(launcher, {"do": "mesh_offer", "check": not make})
    return [member(host, values[host.label]) for host in launcher.cluster.hosts]


def member(host: Host, value: Mapping[str, Any]) -> Member:
    """Return the host's keys and the names that others may use for it, from its answer. Pure."""
    address = host.address or str(value["address"])
    port = int(value["port"])
    return Member(
        host=host.label,
        name=host.name,
        user=str(value["user"]),
        address=address,
        port=port,
        public_key=str(value["public_key"]),
        made_key=bool(value["made"]),
        host_keys=tuple(value["host_keys"]),
        names=tuple(dict.fromkeys(known_name(name, port) for name in (host.name, address, str(value["address"])))),
        warnings=tuple(value["warnings"]),
    )


def known_name(name: str, port: int) -> str:
    """Return a host in the spelling of known_hosts (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT)."""
    return name if port == 22 else f"[{name}]:{port}"


def accepted(members: Sequence[Member]) -> dict[str, Any]:
    """Return the request that makes a host accept all public keys and know all host keys. Pure."""
    return {
        "keys": [f"{one.public_key} {one.user}@{one.host.rpartition('@')[2]} {MARK}" for one in members],
        "known": [{"names": one.names, "keys": one.host_keys} for one in members],
    }


def _try_pairs(launcher: AgentLauncher, members: Sequence[Member]) -> dict[str, dict[tuple[str, str], str]]:
    """Try every pair; return ``failures`` and ``exact`` of the mesh."""
    targets = [
        {"label": one.host, "name": one.name, "user": one.user, "address": one.address, "port": one.port}
        for one in members
    ]
    values = _asked(launcher, {"do": "mesh_try", "targets": targets}, -(-len(members) // AT_ONCE) * TRY_S)
    return {
        kind: {
            (one.host, target): str(why)
            for one in members
            for target, why in values[one.host][kind].items()
            if target != one.host
        }
        for kind in ("failures", "exact")
    }


def table(mesh: Mesh) -> str:
    """Return a table with a row a host: its key, what was added there, and how many others it reaches."""
    rows = [("host", "login", "key", "keys added", "host keys added", "reaches")]
    others = len(mesh.members) - 1
    for one in mesh.members:
        key = "made" if one.made_key else "there" if one.public_key else "none"
        reached = others - sum(1 for source, _ in mesh.failures if source == one.host)
        login = f"{one.user}@{one.address}" + ("" if one.port == 22 else f":{one.port}")
        rows.append((one.host, login, key, str(one.added_keys), str(one.added_hosts), f"{reached} of {others}"))
    return aligned(rows)


def refuse_failures(mesh: Mesh, *, checked_only: bool) -> None:
    """Raise HostError that lists each failed connection, its reason and the fix."""
    if not mesh.failures:
        return
    logins = {one.host: f"{one.host} ({one.user}@{one.address} port {one.port})" for one in mesh.members}
    rows = [f"  {source} can't log in to {logins[to]}: {why}" for (source, to), why in mesh.failures.items()]
    lacks = checked_only and any(not why.startswith("`ssh ") for why in mesh.failures.values())
    hints = ["doit mesh with the same words, without --check"] if lacks else []
    typed = {source: why.split("`")[1] for (source, _), why in mesh.failures.items() if why.startswith("`ssh ")}
    hints += [
        f"on {source}: its ssh configuration changes what {words!r} reaches: {words.replace('ssh', 'ssh -G', 1)}"
        for source, words in typed.items()
    ]
    for one in mesh.members:
        hints += [f"on {one.host}: ssh-keygen -R {name!r}, once you know why its key changed" for name in one.conflicts]
        hints += [f"on {one.host}: {text}" for text in one.warnings]
    head = f"ssh among the hosts: {len(mesh.failures)} of {counted(mesh.pairs, 'connection')} can't be made"
    raise HostError("\n".join([head, *rows]), hint="; then ".join(dict.fromkeys(hints)) or None)


def unreached_by_name(mesh: Mesh) -> list[str]:
    """Return a line for each host that ssh reaches only with its port and user, not by its plain name."""
    lines = []
    for to in mesh.members:
        sources = [source for source, target in mesh.exact if target == to.host]
        if sources:
            entry = f"Host {to.name} / HostName {to.address} / Port {to.port} / User {to.user}"
            lines.append(
                f"{to.host}: reached only as ssh -p {to.port} {to.user}@{to.address} from {', '.join(sources)} "
                f"({mesh.exact[sources[0], to.host]}); mpirun types the plain name: it needs there in ~/.ssh/config: "
                f"{entry}"
            )
    return lines
