"""The cluster of a run: ``build_cluster`` checks the section ``cluster`` and returns a ``Cluster`` with its hosts.

Hosts are this computer, named hosts (``cluster.hosts``, a hostfile), or nodes that a scheduler grants. None is asked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.launchers.settings import HOST_FIELDS, ClusterConfig, HostConfig, checked_container
from pipeline.cluster.validation import visible_gpus, why_unfit
from pipeline.config.schema import encodable, typed
from pipeline.core.errors import UsageError, os_reason, suggestion
from pipeline.core.files import expanded
from pipeline.core.redact import HIDDEN, hide, is_secret_name, secret_values, split_secrets, without_secrets
from pipeline.core.specs import Cluster, Host, unfit_name

HOSTS = "hosts"  # the value of ``cluster.environment`` with which the hosts are asked for their versions
CPU_RANKS = 2  # for nproc_per_node=auto without a GPU: the same everywhere, so that a run has one key on every laptop


def build_cluster(section: Mapping[str, Any], *, root: Path, local_gpus: int) -> Cluster:
    """Return the cluster that the section describes; relative paths start at ``root``. Raises UsageError."""
    settings_class = LAUNCHERS.settings(str(section["launcher"]))
    # settings may be shown and stored, so secrets are masked in them; unmasked has what the hosts need
    settings: ClusterConfig = typed(settings_class, without_secrets({"cluster": section})["cluster"])
    hosts_and_spares = {field: _typed_hosts(section, field) for field in ("hosts", "spares")}
    unmasked: ClusterConfig = typed(settings_class, {**section, **hosts_and_spares})
    is_this_computer = settings.capabilities.is_this_computer
    device = _device(settings, unmasked.env, local_gpus)
    nproc = _nproc_per_node(settings, local_gpus if device == "cuda" else 0)
    if is_this_computer:
        entries = _this_computer(settings)
    elif settings.capabilities.hosts_are_granted:
        entries = _granted_nodes(settings)
    else:
        entries = _first_nodes(_named_hosts(unmasked, root), settings)
    host = functools.partial(
        _make_host, cluster=unmasked, nproc_per_node=nproc, secrets=secret_values({"cluster": section}), root=root
    )
    hosts = tuple(host(entry, "cluster.hosts") for entry in entries)
    spares = tuple(host(entry, "cluster.spares") for entry in unmasked.spares)
    _check_restarts(settings, len(hosts))
    _check_hosts(hosts, spares)
    variables = {name for host in hosts for name in host.env}
    for name in unmasked.secrets or ():
        if name not in variables:  # a misspelled name would leave its value unmasked
            raise UsageError(
                f"cluster.secrets names {name!r}, which cluster.env doesn't set; {suggestion(name, variables)}"
            )
    ssh_config = unmasked.ssh_config
    has_container, is_granted = settings.container is not None, settings.capabilities.hosts_are_granted
    return Cluster(
        launcher=settings.launcher,
        hosts=hosts,
        ssh_config=str(root / expanded(ssh_config, f"cluster.ssh_config={ssh_config}")) if ssh_config else None,
        environment=_versions(settings.environment or {}),
        asks_environment=not is_granted if has_container else settings.environment == HOSTS,
        container=_container(unmasked),
        container_mounts=tuple(unmasked.container_mounts or ()) if has_container else (),
        device=device,
        spares=spares,
        settings=settings,
    )


# ------------------------------------------------------------------------------- the entries of hosts
def _typed_hosts(section: Mapping[str, Any], field: str) -> list[HostConfig]:
    """Return the entries of ``hosts`` or ``spares``. Raises UsageError: an unknown field, which ``++`` can add."""
    for entry in section[field]:
        if unknown := [str(name) for name in entry if name not in HOST_FIELDS]:
            from pipeline.config.unknown_key import not_of_a_host  # needed for this error alone

            raise not_of_a_host(unknown[0], f"cluster.{field} {entry['name']}")
    return [HostConfig(**entry) for entry in section[field]]


def _this_computer(cluster: ClusterConfig) -> list[HostConfig]:
    if cluster.hosts or cluster.hostfile:
        raise UsageError(
            "cluster.hosts and cluster.hostfile need a launcher that reaches other hosts; use cluster=pssh"
        )
    if cluster.nnodes not in (None, 1):
        raise UsageError(
            f"cluster.nnodes={cluster.nnodes}: cluster={cluster.launcher} is this computer alone, which is one node",
            hint="cluster=pssh cluster.hostfile=FILE, or a cluster of your own: cluster=NAME",
        )
    return [HostConfig(name="localhost")]


def _granted_nodes(cluster: ClusterConfig) -> list[HostConfig]:
    """Return an entry with an invented name for each requested node, because the scheduler names them only later."""
    if cluster.hosts or cluster.hostfile:
        raise UsageError(
            f"cluster.hosts and cluster.hostfile name hosts, and {cluster.launcher} chooses them itself; "
            "set cluster.nnodes, or use cluster=pssh"
        )
    nnodes = cluster.nnodes or 0
    if nnodes < 1:
        raise UsageError(f"cluster.nnodes={cluster.nnodes} must be at least 1")
    return [HostConfig(name=f"granted{number}") for number in range(nnodes)]


def _named_hosts(cluster: ClusterConfig, root: Path) -> list[HostConfig]:
    """Return the entries of the hostfile, or of ``cluster.hosts``. Raises UsageError: neither names a host."""
    if cluster.hostfile is not None:
        if not cluster.hostfile.strip():
            raise UsageError("cluster.hostfile is empty; is a shell variable unset? Name a file, or write null")
        option = f"cluster.hostfile={cluster.hostfile}"
        text = _read_hostfile(root / expanded(cluster.hostfile, option), option)
        parse = parse_mpi if cluster.capabilities.hostfile_of_mpi else parse_ssh
        return parse(text, cluster.hostfile)
    if not cluster.hosts:
        raise UsageError(
            "cluster.hosts is empty; name your hosts: cluster.hostfile=FILE or cluster.hosts=[HOST1,HOST2]"
        )
    return cluster.hosts


def _read_hostfile(path: Path, option: str) -> str:
    """Return the text of a hostfile. Raises UsageError: it can't be read, or may be endless (a pipe, a device)."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"{option} is no ordinary file; write its lines into one and name that")
        return path.read_text(encoding="utf-8-sig")  # editors of Windows put a byte order mark first
    except OSError as error:
        raise UsageError(f"{option} can't be read: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} is not a text file: {error}") from error


def _first_nodes(entries: list[HostConfig], cluster: ClusterConfig) -> list[HostConfig]:
    """Return the first ``cluster.nnodes`` hosts; all of them if that is null."""
    count = cluster.nnodes
    if count is None:
        return entries
    if not 1 <= count <= len(entries):
        field = "cluster.hosts" if cluster.hostfile is None else f"cluster.hostfile={cluster.hostfile}"
        raise UsageError(f"cluster.nnodes={count} must be 1 to {len(entries)}, the number of hosts in {field}")
    return entries[:count]


# ------------------------------------------------------------------------------- one host
def _make_host(
    entry: HostConfig, field: str, *, cluster: ClusterConfig, nproc_per_node: int, secrets: frozenset[str], root: Path
) -> Host:
    """Return the host of an entry; what it doesn't set comes from the cluster. ``secrets``: texts to be masked."""
    if entry.nproc_per_node is not None and entry.nproc_per_node < 1:
        raise UsageError(f"{field} {entry.name}: nproc_per_node={entry.nproc_per_node} must be at least 1")
    env = {**_checked_env(cluster.env, "cluster.env"), **_checked_env(entry.env or {}, f"{field} {entry.name}: env")}
    for folder in filter(None, env.get("PYTHONPATH", "").split(":")):
        if not (root / folder).is_dir() and not folder.startswith("/"):  # an absolute path may exist on hosts alone
            raise UsageError(
                f"cluster.env.PYTHONPATH names {folder}, and there is no folder {root / folder}",
                hint="a folder relative to the project, or an absolute path",
            )
    shown, secret = split_secrets(env, secrets, cluster.secrets or ())
    return Host(
        name=entry.name,
        nproc_per_node=entry.nproc_per_node or nproc_per_node,
        port=entry.port,
        user=entry.user,
        address=entry.address,
        interface=entry.interface or cluster.interface,
        python=entry.python or cluster.python,
        env=shown,
        secrets=secret,
    )


def _checked_env(env: Mapping[str, Any], field: str) -> dict[str, str]:
    """Return the environment variables of ranks after a check of their names and values, which must be texts."""
    for name, value in env.items():
        if not name or any(mark in name for mark in "=\0") or not name.isprintable():
            raise UsageError(f"{field}: {name!r} can't be the name of a variable: it is empty, or holds '=' or NUL")
        if not isinstance(value, str):
            shown = HIDDEN if is_secret_name(name) else hide(repr(value))
            raise UsageError(f"{field}.{name}={shown} must be one text, number or boolean; write a list in quotes")
        if "\0" in value:
            raise UsageError(f"{field}.{name} holds a NUL character, which no variable can; take it out")
        encodable(f"{field}.{name}", value)
    return dict(env)


def _device(cluster: ClusterConfig, env: Mapping[str, str], local_gpus: int) -> str:
    """Return the device of the ranks, a part of the key: cpu, cuda, or auto for hosts that are asked only later."""
    if cluster.device != "auto" or not cluster.capabilities.is_this_computer:
        return cluster.device
    return "cuda" if visible_gpus(local_gpus, env) else "cpu"


def _nproc_per_node(cluster: ClusterConfig, local_gpus: int) -> int:
    count, is_this_computer = cluster.nproc_per_node, cluster.capabilities.is_this_computer
    if count == "auto" and is_this_computer:
        return local_gpus or CPU_RANKS
    if isinstance(count, int) and not isinstance(count, bool) and count >= 1:
        return count
    auto = " or auto" if is_this_computer else " (auto only for cluster=local: a key is made before any host is asked)"
    raise UsageError(f"cluster.nproc_per_node={count!r} must be a whole number from 1{auto}")


# ------------------------------------------------------------------------------- checks of several fields
def _check_hosts(hosts: Sequence[Host], spares: Sequence[Host]) -> None:
    """Raise UsageError: an impossible name, user or port, a host that is named twice, or a spare unlike all hosts."""
    field_by_label: dict[str, str] = {}
    for field, host in [*(("cluster.hosts", host) for host in hosts), *(("cluster.spares", host) for host in spares)]:
        if why := unfit_name(host):
            raise UsageError(f"{field}: {host.label!r} {why}")
        if host.port is not None and not 1 <= host.port <= 65535:
            raise UsageError(f"{field} {host.name}: port={host.port} must be a whole number from 1 to 65535")
        first = field_by_label.setdefault(host.label, "")
        if first == field:
            raise UsageError(
                f"{field} names {host.label} twice; each node takes part once "
                "(more ranks: nproc_per_node, or slots=N in a file)"
            )
        if first:
            raise UsageError(f"{first} and {field} both name {host.label}; a spare is a further host, for a lost one")
        field_by_label[host.label] = field
    for spare in spares:
        reasons = [why_unfit(spare, host) for host in hosts]
        if all(reasons):  # a spare needs a host's ranks and variables, because these are part of the key
            raise UsageError(
                f"cluster.spares {spare.label} can take no host's place: {reasons[0]}; "
                "a spare has the ranks and the variables of a host"
            )


def _container(cluster: ClusterConfig) -> str | None:
    """Return the image that the ranks run in, or None. Raises UsageError: not with this launcher or these settings."""
    image = cluster.container
    if image is None:
        if cluster.container_mounts:
            raise UsageError("cluster.container_mounts is for cluster.container=IMAGE, which isn't set")
        return None
    if hasattr(cluster, "image"):
        raise UsageError(
            f"cluster.container={image}: pods are containers already; their image is cluster.image",
            hint=f"cluster.image={image}, without cluster.container",
        )
    if getattr(cluster, "environment_from", None):
        raise UsageError("cluster.container has an environment of its own; take out cluster.environment_from")
    if cluster.environment and not cluster.capabilities.hosts_are_granted:
        raise UsageError("cluster.container: its image is asked for its versions; take out cluster.environment")
    return checked_container(image, cluster.capabilities)


def _versions(environment: Any) -> dict[str, str]:
    """Return the versions in ``cluster.environment``; {} if the hosts are to be asked for theirs. Raises UsageError."""
    if environment == HOSTS:
        return {}
    if not isinstance(environment, Mapping):
        raise UsageError(
            f"cluster.environment={environment} must be {HOSTS}, or versions of distributions on the hosts",
            hint="cluster.environment='{torch: 2.9.1}'",
        )
    return {str(name): str(version) for name, version in environment.items()}


def _check_restarts(cluster: ClusterConfig, nnodes: int) -> None:
    """Raise UsageError if what is to happen after a lost host, or on busy ones, doesn't fit the launcher."""
    min_nodes, when_busy = cluster.min_nodes, cluster.when_busy
    if cluster.spares and cluster.capabilities.is_this_computer:
        raise UsageError("cluster.spares needs a launcher that reaches other hosts; use cluster=pssh")
    if cluster.capabilities.hosts_are_granted:
        is_set = {
            "spares": bool(cluster.spares),
            "min_nodes": min_nodes != 0,
            f"when_busy={when_busy}": when_busy != "auto",
        }
        for name in filter(is_set.get, is_set):
            raise UsageError(
                f"cluster.{name} is about hosts that are named, and {cluster.launcher} queues jobs and chooses hosts "
                "itself; take it out (cluster.max_restarts asks for another job)"
            )
    if min_nodes > nnodes:
        raise UsageError(f"cluster.min_nodes={min_nodes} is more than the {nnodes} of cluster.hosts")


# ------------------------------------------------------------------------------- hostfiles
_HOST = re.compile(
    r"(?:(?P<user>[^@\s\[\]]+)@)?(?:\[(?P<v6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[^\s@:\[\]]+))"
    r"(?::(?P<port>[^\s:]*))?$"
)
_FORM = "a line is [user@]host[:port] [slots=N], an IPv6 address is written in brackets"
_MPI_FORM = "a line is host [slots=N] [max_slots=N], or host:N"


def parse_ssh(text: str, source: str) -> list[HostConfig]:
    """Return the hosts of an ssh hostfile in the file's order; ``slots=N`` sets nproc_per_node.

    ``source``: the file's name for errors. Raises UsageError: a line that can't be read.
    """
    hosts = [_ssh_line(words, f"{source}:{number}") for number, words in _lines(text, source)]
    if not hosts:
        raise UsageError(f"{source} names no host; {_FORM}")
    return hosts


def parse_mpi(text: str, source: str) -> list[HostConfig]:
    """Return the hosts of a hostfile for Open MPI or MPICH. Raises UsageError."""
    # name → slots of each line with it, which are added up: batch systems list a host once for each slot
    slots: dict[str, list[int | None]] = {}
    for number, words in _lines(text, source):
        name, count = _mpi_line(words, f"{source}:{number}")
        slots.setdefault(name, []).append(count)
    if not slots:
        raise UsageError(f"{source} names no host; {_MPI_FORM}")
    return [
        HostConfig(name=name, nproc_per_node=None if counts == [None] else sum(count or 1 for count in counts))
        for name, counts in slots.items()
    ]


def _lines(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield pairs (number, words) of the lines that are not empty. Raises UsageError: the file is YAML."""
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() also splits at control characters
        if words := line.partition("#")[0].split():
            if words[0].endswith(":") or words[0] == "-":
                raise UsageError(
                    f"{source}:{number}: {line.strip()!r} is YAML, and a hostfile has one host in each line: node1",
                    hint="cluster.hosts=[node1,node2], or in a file of conf/cluster: hosts: [{name: node1}, …]",
                )
            yield number, words


def _mpi_line(words: list[str], where: str) -> tuple[str, int | None]:
    """Return the host name and the slots of a line; None for slots that it doesn't say."""
    name, colon, text = words[0].partition(":")
    if why := unfit_name(Host(name=name)):
        raise UsageError(f"{where}: {words[0]!r} {why}; {_MPI_FORM}, and a user name belongs in ~/.ssh/config")
    return name, _slots([f"slots={text}", *words[1:]] if colon else words[1:], where, _MPI_FORM)


def _slots(words: list[str], where: str, form: str) -> int | None:
    """Return the slots that the words behind a host's name set, or None. ``max_slots=`` is left to mpirun."""
    counts: dict[str, int] = {}
    for word in words:
        key, equals, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or not equals:
            raise UsageError(f"{where}: {word!r} is not understood; {form}")
        count = _number(value, f"{where}: {key}")
        if key in counts:
            raise UsageError(f"{where}: {key} is given twice, {counts[key]} and {count}; keep one of the two")
        counts[key] = count
    return counts.get("slots")


def _ssh_line(words: list[str], where: str) -> HostConfig:
    match = _HOST.match(words[0])
    if match is None or words[0].startswith("-"):
        raise UsageError(f"{where}: {words[0]!r} is not a host; {_FORM}")
    host = HostConfig(
        name=match["v6"] or match["name"],
        user=match["user"],
        port=None if match["port"] is None else _number(match["port"], f"{where}: port", 65535),
        nproc_per_node=_slots(words[1:], where, _FORM),
    )
    if why := unfit_name(Host(name=host.name, user=host.user)):
        raise UsageError(f"{where}: {words[0]!r} {why}; {_FORM}")
    return host


def _number(text: str, field: str, largest: int | None = None) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= (largest or int(text)):
        raise UsageError(f"{field}={text!r} must be a whole number from 1{f' to {largest}' if largest else ''}")
    return int(text)
