"""Turn the section ``cluster`` into hosts and launch numbers. Pure, except that a hostfile is read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers import LAUNCHERS, containers
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig
from pipeline.cluster.spares import why_unfit
from pipeline.cluster.validation import visible_gpus
from pipeline.config import hostfile
from pipeline.config.errors.unknown_key import HOST_FIELDS, not_of_a_host
from pipeline.config.values import encodable, typed
from pipeline.core.errors import UsageError, os_reason, suggestion
from pipeline.core.files import expanded
from pipeline.core.redact import HIDDEN, hide, is_secret_name, secret_values, split, without_secrets
from pipeline.core.specs import Cluster, Host, unfit_name

HOSTS = "hosts"
CPU_RANKS = 2  # `auto` without a GPU: the same number everywhere, so that a run has one key on every laptop


def build_cluster(raw: dict[str, Any], *, root: Path, local_gpus: int) -> Cluster:
    """Return hosts and launch numbers from the section ``cluster``. Raises UsageError."""
    launcher = str(raw["launcher"])
    settings: ClusterConfig = typed(LAUNCHERS.settings(launcher), without_secrets({"cluster": raw})["cluster"])
    here = settings.capabilities.is_this_computer
    device = _device(settings.device, here, raw["env"], local_gpus)
    nproc = _nproc(raw["nproc_per_node"], here, local_gpus if device == "cuda" else 0)
    secrets = secret_values({"cluster": raw})
    granted = settings.capabilities.hosts_are_granted
    for section in ("hosts", "spares"):
        for entry in raw[section]:  # ``++`` lets Hydra add any field
            if unknown := [str(name) for name in entry if name not in HOST_FIELDS]:
                raise not_of_a_host(unknown[0], f"cluster.{section} {entry['name']}")
    entries = _this_computer(raw) if here else _granted(raw) if granted else _first(_entries(raw, root, nproc), raw)
    make = functools.partial(_host, raw=raw, nproc=nproc, secrets=secrets, root=root)
    hosts = tuple(make(entry) for entry in entries)
    spares = tuple(make(entry, field="cluster.spares") for entry in raw["spares"])
    _check_restarts(settings, len(hosts))
    _check_hosts(hosts, spares)
    known = {name for host in hosts for name in host.env}
    for name in raw.get("secrets") or []:
        if name not in known:  # a misspelled name would leave its value unmasked
            raise UsageError(
                f"cluster.secrets names {name!r}, which cluster.env doesn't set; {suggestion(name, known)}"
            )
    ssh_config = raw["ssh_config"] or None
    return Cluster(
        launcher=launcher,
        hosts=hosts,
        ssh_config=ssh_config and str(root / expanded(ssh_config, f"cluster.ssh_config={ssh_config}")),
        environment=_versions(settings.environment or {}),
        **_container(raw, settings.capabilities),
        device=device,
        spares=spares,
        settings=settings,
    )


def _check_hosts(hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    """Refuse names, users and ports that a host can't have, hosts named twice, and spares that can take no place."""
    seen: dict[str, str] = {}
    for field, host in [*(("cluster.hosts", host) for host in hosts), *(("cluster.spares", host) for host in spares)]:
        if why := unfit_name(host):
            raise UsageError(f"{field}: {host.label!r} {why}")
        if host.port is not None and not 1 <= host.port <= 65535:
            raise UsageError(f"{field} {host.name}: port={host.port} must be a whole number from 1 to 65535")
        if (first := seen.get(host.label)) not in (None, field):
            raise UsageError(f"{first} and {field} both name {host.label}; a spare is a further host, for a lost one")
        if first is not None:
            raise UsageError(
                f"{field} names {host.label} twice; each node takes part once (more ranks: nproc_per_node)"
            )
        seen[host.label] = field
    for spare in spares:
        reasons = [why_unfit(spare, host) for host in hosts]
        if all(reasons):  # its ranks or variables, which count in the key, are no host's
            raise UsageError(
                f"cluster.spares {spare.label} can take no host's place: {reasons[0]}; "
                "a spare has the ranks and the variables of a host"
            )


def _container(raw: Mapping[str, Any], launcher: Capabilities) -> dict[str, Any]:
    """Return the ranks' container, and whether the hosts are asked for versions. Raises UsageError."""
    image, mounts = raw.get("container"), raw.get("container_mounts") or []
    if image is None:
        if mounts:
            raise UsageError("cluster.container_mounts is for cluster.container=IMAGE, which isn't set")
        return {"asks_environment": raw.get("environment") == HOSTS}
    if "image" in raw:
        raise UsageError(
            f"cluster.container={image}: pods are containers already; their image is cluster.image",
            hint=f"cluster.image={image}, without cluster.container",
        )
    if raw.get("environment_from"):
        raise UsageError("cluster.container has an environment of its own; take out cluster.environment_from")
    if raw.get("environment") and not launcher.hosts_are_granted:
        raise UsageError("cluster.container: its image is asked for its versions; take out cluster.environment")
    return {
        "container": containers.checked(image, launcher),
        "container_mounts": tuple(mounts),
        "asks_environment": not launcher.hosts_are_granted,
    }


def _versions(value: Any) -> dict[str, str]:
    """Return the versions in ``cluster.environment``; none if the hosts are asked for theirs. Raises UsageError."""
    if value == HOSTS:
        return {}
    if not isinstance(value, Mapping):
        what = f"cluster.environment={value} must be {HOSTS}, or versions of distributions on the hosts"
        raise UsageError(what, hint="cluster.environment='{torch: 2.9.1}'")
    return {str(name): str(version) for name, version in value.items()}


def _environment(raw: Mapping[str, Any], field: str) -> dict[str, str]:
    """Check the ranks' variables: valid names, and texts as values (``true`` of a file is "True" by now)."""
    for name, value in raw.items():
        if not name or any(mark in name for mark in "=\0") or not name.isprintable():
            raise UsageError(f"{field}: {name!r} can't be the name of a variable: it is empty, or holds '=' or NUL")
        if not isinstance(value, str):
            shown = HIDDEN if is_secret_name(name) else hide(repr(value))
            raise UsageError(f"{field}.{name}={shown} must be one text, number or boolean; write a list in quotes")
        if "\0" in value:
            raise UsageError(f"{field}.{name} holds a NUL character, which no variable can; take it out")
        encodable(f"{field}.{name}", value)
    return dict(raw)


def _device(value: str, here: bool, env: Mapping[str, str], local_gpus: int) -> str:
    """Return the kind of device that the ranks compute on, as it counts in the key; auto if no host was asked."""
    if value != "auto" or not here:
        return value
    return "cuda" if visible_gpus(local_gpus, env) else "cpu"


def _nproc(value: Any, here: bool, local_gpus: int) -> int:
    if value == "auto" and here:
        return local_gpus or CPU_RANKS
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        also = " or auto" if here else " (auto only for cluster=local: a run's key is taken before any host is asked)"
        raise UsageError(f"cluster.nproc_per_node={value!r} must be a whole number from 1{also}")
    return value


def _this_computer(raw: dict[str, Any]) -> list[dict[str, Any]]:
    if raw["hosts"] or raw["hostfile"]:
        raise UsageError(
            "cluster.hosts and cluster.hostfile need a launcher that reaches other hosts; use cluster=pssh"
        )
    if raw.get("nnodes") not in (None, 1):
        raise UsageError(
            f"cluster.nnodes={raw['nnodes']}: cluster={raw['launcher']} is this computer alone, which is one node",
            hint="cluster=pssh cluster.hostfile=FILE, or a cluster of your own: cluster=NAME",
        )
    return [{"name": "localhost"}]


def _granted(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per requested node; the scheduler names the nodes later."""
    if raw["hosts"] or raw["hostfile"]:
        raise UsageError(
            f"cluster.hosts and cluster.hostfile name hosts, and {raw['launcher']} chooses them itself; "
            "set cluster.nnodes, or use cluster=pssh"
        )
    if raw["nnodes"] < 1:
        raise UsageError(f"cluster.nnodes={raw['nnodes']} must be at least 1")
    return [{"name": f"granted{number}"} for number in range(raw["nnodes"])]


def _entries(raw: dict[str, Any], root: Path, nproc: int) -> list[dict[str, Any]]:
    """Return the host entries of `hosts` or of the hostfile."""
    if raw["hostfile"] is not None:
        if not raw["hostfile"].strip():
            raise UsageError("cluster.hostfile is empty; is a shell variable unset? Name a file, or write null")
        option = f"cluster.hostfile={raw['hostfile']}"
        text = _text_of(root / expanded(raw["hostfile"], option), option)
        of_mpi = LAUNCHERS.settings(raw["launcher"]).capabilities.hostfile_of_mpi
        parse = hostfile.parse_mpi if of_mpi else hostfile.parse_ssh
        return [dataclasses.asdict(host) for host in parse(text, str(raw["hostfile"]), default_slots=nproc)]
    if not raw["hosts"]:
        raise UsageError(
            "cluster.hosts is empty; name your hosts: cluster.hostfile=FILE or cluster.hosts=[HOST1,HOST2]"
        )
    return list(raw["hosts"])


def _first(entries: list[dict[str, Any]], raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the first ``cluster.nnodes`` hosts. Raises UsageError: there are fewer, or the number is missing."""
    count = raw.get("nnodes")
    if count is None:
        return entries
    if not 1 <= count <= len(entries):
        field = "cluster.hosts" if raw["hostfile"] is None else f"cluster.hostfile={raw['hostfile']}"
        raise UsageError(f"cluster.nnodes={count} must be 1 to {len(entries)}, the number of hosts in {field}")
    return entries[:count]


def _text_of(path: Path, option: str) -> str:
    """Return the text of a hostfile. Raises UsageError: it can't be read, or may be endless (a pipe, a device)."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{option} is no ordinary file; write its lines into one and name that")
        return path.read_text(encoding="utf-8-sig")  # editors of Windows put a byte order mark first
    except OSError as error:
        raise UsageError(f"{option} can't be read: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} is not a text file: {error}") from error


def _host(
    entry: dict[str, Any],
    *,
    raw: dict[str, Any],
    nproc: int,
    secrets: frozenset[str],
    root: Path,
    field: str = "cluster.hosts",
) -> Host:
    """Return one host; settings that its entry lacks come from the cluster."""
    own = entry.get("nproc_per_node")
    if own is not None and own < 1:
        raise UsageError(f"{field} {entry['name']}: nproc_per_node={own} must be at least 1")
    env = {
        **_environment(raw["env"], "cluster.env"),
        **_environment(entry.get("env") or {}, f"{field} {entry['name']}: env"),
    }
    for folder in filter(None, env.get("PYTHONPATH", "").split(":")):
        if not (root / folder).is_dir() and not folder.startswith("/"):  # an absolute one may be there on hosts alone
            raise UsageError(
                f"cluster.env.PYTHONPATH names {folder}, and there is no folder {root / folder}",
                hint="a folder relative to the project, or an absolute path",
            )
    shown, secret = split(env, secrets, raw.get("secrets") or ())
    return Host(
        name=entry["name"],
        nproc_per_node=own or nproc,
        port=entry.get("port"),
        user=entry.get("user"),
        address=entry.get("address"),
        interface=entry.get("interface") or raw["interface"],
        python=entry.get("python") or raw["python"],
        env=shown,
        secrets=secret,
    )


def _check_restarts(settings: ClusterConfig, nnodes: int) -> None:
    """Check restarts and spares, which need hosts with names. Raises UsageError."""
    spares, min_nodes, when_busy = settings.spares, settings.min_nodes, settings.when_busy
    if spares and settings.capabilities.is_this_computer:
        raise UsageError("cluster.spares needs a launcher that reaches other hosts; use cluster=pssh")
    if settings.capabilities.hosts_are_granted:
        unused = {"spares": bool(spares), "min_nodes": min_nodes != 0, f"when_busy={when_busy}": when_busy != "auto"}
        for name in (name for name, is_set in unused.items() if is_set):
            raise UsageError(
                f"cluster.{name} is about hosts that are named, and {settings.launcher} queues jobs and chooses hosts "
                "itself; take it out (cluster.max_restarts asks for another job)"
            )
    if min_nodes > nnodes:
        raise UsageError(f"cluster.min_nodes={min_nodes} is more than the {nnodes} of cluster.hosts")
