"""Read hostfiles. Each line is ``user@host:port slots=N`` for ssh, ``host slots=N`` or ``host:N`` for MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.cluster.launchers.settings import HostConfig
from pipeline.core.errors import UsageError
from pipeline.core.specs import Host, unfit_name

_HOST = re.compile(
    r"(?:(?P<user>[^@\s\[\]]+)@)?(?:\[(?P<v6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[^\s@:\[\]]+))"
    r"(?::(?P<port>[^\s:]*))?$"
)
_FORM = "a line is [user@]host[:port] [slots=N], an IPv6 address is written in brackets"
_MPI_FORM = "a line is host [slots=N] [max_slots=N], or host:N"


def parse_ssh(text: str, source: str) -> list[HostConfig]:
    """Return the hosts of an ssh hostfile in the file's order. ``slots`` is nproc_per_node.

    ``source`` is the file's name, for errors. Raises UsageError: with ``source:line``, the value seen and the valid
    form.
    """
    hosts: list[HostConfig] = []
    line_by_label: dict[str, int] = {}
    for number, words in _lines(text, source):
        host = _ssh_line(words, f"{source}:{number}")
        label = Host(name=host.name, user=host.user, port=host.port).label
        if label in line_by_label:
            raise UsageError(
                f"{source}:{number}: {label} is in line {line_by_label[label]} already; "
                "name each node once, with slots=N for more ranks"
            )
        line_by_label[label] = number
        hosts.append(host)
    if not hosts:
        raise UsageError(f"{source} names no host; {_FORM}")
    return hosts


def parse_mpi(text: str, source: str) -> list[HostConfig]:
    """Return the hosts of a hostfile for Open MPI or MPICH.

    The slots of a host on several lines are added up, as batch systems list a host once for each slot. Raises
    UsageError.
    """
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
    """Yield number and words of each line with words. Raises UsageError: the file is YAML."""
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() ends a line at control characters too
        if words := line.partition("#")[0].split():
            if words[0].endswith(":") or words[0] == "-":
                raise UsageError(
                    f"{source}:{number}: {line.strip()!r} is YAML, and a hostfile has one host in each line: node1",
                    hint="cluster.hosts=[node1,node2], or in a file of conf/cluster: hosts: [{name: node1}, …]",
                )
            yield number, words


def _mpi_line(words: list[str], where: str) -> tuple[str, int | None]:
    """Return name and slots (None: not given) of a line."""
    name, colon, text = words[0].partition(":")
    if why := unfit_name(Host(name=name)):
        raise UsageError(f"{where}: {words[0]!r} {why}; {_MPI_FORM}, and a user name belongs in ~/.ssh/config")
    return name, _slots([f"slots={text}", *words[1:]] if colon else words[1:], where, _MPI_FORM)


def _slots(words: list[str], where: str, form: str) -> int | None:
    """Return the slots of a line (None: not given). ``max_slots=`` is only checked not to be smaller."""
    counts: dict[str, int] = {}
    for word in words:
        key, equals, value = word.replace("max-slots", "max_slots").partition("=")
        if key not in ("slots", "max_slots") or not equals:
            raise UsageError(f"{where}: {word!r} is not understood; {form}")
        count = _number(value, f"{where}: {key}")
        if key in counts:
            raise UsageError(f"{where}: {key} is given twice, {counts[key]} and {count}; keep one of the two")
        counts[key] = count
    slots = counts.get("slots")
    if slots is not None and slots > counts.get("max_slots", slots):
        raise UsageError(f"{where}: slots={slots} is more than max_slots={counts['max_slots']}")
    return slots


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
