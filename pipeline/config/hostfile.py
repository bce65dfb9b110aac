"""Read hostfiles. Each line is ``user@host:port slots=N`` for ssh, ``host slots=N`` or ``host:N`` for MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.core.errors import UsageError
from pipeline.core.specs import Host, unfit_name

_HOST = re.compile(
    r"(?:(?P<user>[^@\s\[\]]+)@)?(?:\[(?P<v6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?)\]|(?P<name>[^\s@:\[\]]+))"
    r"(?::(?P<port>[^\s:]*))?$"
)
_FORM = "a line is [user@]host[:port] [slots=N], an IPv6 address is written in brackets"
_MPI_FORM = "a line is host [slots=N] [max_slots=N], or host:N"


def parse_ssh(text: str, source: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Return the hosts of an ssh hostfile in the file's order. ``slots`` is nproc_per_node.

    Args:
        source: the file's name, for errors.
        default_slots: nproc_per_node of lines without ``slots=``.

    Raises:
        UsageError: with ``source:line``, the value seen and the valid form.
    """
    hosts: dict[str, tuple[int, Host]] = {}  # with the number of their line
    for number, words in _lines(text):
        host = _host(words, f"{source}:{number}", default_slots)
        if host.label in hosts:
            raise UsageError(
                f"{source}:{number}: {host.label} is in line {hosts[host.label][0]} already; "
                "name each node once, with slots=N for more ranks"
            )
        hosts[host.label] = number, host
    if not hosts:
        raise UsageError(f"{source} names no host; {_FORM}")
    return tuple(host for _, host in hosts.values())


def _lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield number and words of each line with words."""
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines() ends a line at control characters too
        if words := line.partition("#")[0].split():
            yield number, words


def parse_mpi(text: str, source: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Return the hosts of a hostfile for Open MPI or MPICH.

    The slots of a host on several lines are added up, as batch systems list a host once for each slot. Raises
    UsageError.
    """
    slots: dict[str, list[int | None]] = {}
    for number, words in _lines(text):
        name, count = _mpi_line(words, f"{source}:{number}")
        slots.setdefault(name, []).append(count)
    if not slots:
        raise UsageError(f"{source} names no host; {_MPI_FORM}")
    return tuple(
        Host(name=name, nproc_per_node=default_slots if counts == [None] else sum(count or 1 for count in counts))
        for name, counts in slots.items()
    )


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
        count = _number(value, f"{where}: {key}", 1, None)
        if key in counts:
            raise UsageError(f"{where}: {key} is given twice, {counts[key]} and {count}; keep one of the two")
        counts[key] = count
    slots = counts.get("slots")
    if slots is not None and slots > counts.get("max_slots", slots):
        raise UsageError(f"{where}: slots={slots} is more than max_slots={counts['max_slots']}")
    return slots


def _host(words: list[str], where: str, default_slots: int) -> Host:
    match = _HOST.match(words[0])
    if match is None or words[0].startswith("-"):
        raise UsageError(f"{where}: {words[0]!r} is not a host; {_FORM}")
    port = match["port"]
    host = Host(
        name=match["v6"] or match["name"],
        user=match["user"],
        port=None if port is None else _number(port, f"{where}: port", 1, 65535),
        nproc_per_node=_slots(words[1:], where, _FORM) or default_slots,
    )
    if why := unfit_name(host):
        raise UsageError(f"{where}: {words[0]!r} {why}; {_FORM}")
    return host


def _number(text: str, what: str, low: int, high: int | None) -> int:
    bounds = f"a whole number from {low}" + (f" to {high}" if high else "")
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= (high or int(text)):
        raise UsageError(f"{what}={text!r} must be {bounds}")
    return int(text)
