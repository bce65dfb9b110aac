"""The results of preflight's checks (``Check``), how they are made, and how they become warnings or an error."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.errors import HostError
from pipeline.core.tables import counted

_HOSTS_NAMED = 4  # in a line; the others are counted
ALL = ""  # host of a check that concerns all hosts


class State(enum.StrEnum):
    """The result of a check. A warning is shown and stops nothing."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """The result of one check of one host."""

    host: str  # the host's label, or ALL
    name: str  # of the check, as in docs/troubleshooting.md
    state: State
    seen: str  # the value found there
    wanted: str = ""  # the value needed; "" if ``seen`` makes it clear
    hint: str = ""  # the command or override that fixes it; "" if the check is ok


def judged(
    host: str, name: str, seen: str, is_ok: bool, *, wanted: str = "", hint: str = "", otherwise: State = State.WARNING
) -> Check:
    """Return a check: OK if ``is_ok``, else with the state ``otherwise``, the value wanted and the fix."""
    return Check(host, name, State.OK, seen) if is_ok else Check(host, name, otherwise, seen, wanted, hint)


def lines(checks: Iterable[Check]) -> list[str]:
    """Return a line for each different result, with all hosts that have it."""
    hosts_by_result: dict[tuple[str, str, str, str], list[str]] = {}
    for check in checks:
        hosts_by_result.setdefault((check.name, check.seen, check.wanted, check.hint), []).append(check.host)
    rows = []
    for (name, seen, wanted, hint), hosts in hosts_by_result.items():
        where = ", ".join(host for host in hosts[:_HOSTS_NAMED] if host != ALL)
        more = f" and {len(hosts) - _HOSTS_NAMED} more" if len(hosts) > _HOSTS_NAMED else ""
        needed, fix = f" (wanted: {wanted})" if wanted else "", f"; {hint}" if hint else ""
        rows.append(f"{f'{where}{more}: ' if where else ''}{name}: {seen}{needed}{fix}")
    return rows


def warnings(checks: Iterable[Check]) -> list[str]:
    """Return the warnings as lines."""
    return [f"warning: {line}" for line in lines(check for check in checks if check.state == State.WARNING)]


def refuse(checks: Sequence[Check], hosts: int) -> None:
    """Raise HostError that lists every failed check, if there is one. ``hosts`` is the size of the cluster."""
    failed = [check for check in checks if check.state == State.FAILED]
    if failed:
        labels = {check.host for check in failed} - {ALL}
        who = f"{len(labels)} of {counted(hosts, 'host')}" if labels else "the hosts"
        raise HostError("\n".join([f"preflight: {who} can't take part", *(f"  {line}" for line in lines(failed))]))


def from_error(error: HostError, name: str, labels: Iterable[str]) -> list[Check]:
    """Return the lines of an error as failed checks. A line ``HOST, HOST: text`` is a check of these hosts.

    ``name``: of the checks. ``labels``: of all hosts. Of an error with several lines, the first one is a heading.
    """
    known_labels, failed = set(labels), []
    for line in error.what.splitlines()[1:] or [error.what]:
        who, separator, what = line.strip().partition(": ")
        hosts, seen = who.split(", "), what
        if not separator or not known_labels.issuperset(hosts):
            hosts, seen = [ALL], line.strip()
        failed += [Check(host, name, State.FAILED, seen, hint=error.hint or "") for host in hosts]
    return failed


def compared(
    name: str, values: Mapping[str, str], *, state: State, hint: str, where: Mapping[str, str] | None = None
) -> list[Check]:
    """Check that all hosts have the same value: the most frequent one, on a tie the first host's.

    ``values``: host → its value, if known. ``state``: of the check of a host with another value. ``where``: host → text
    that is shown after its value but not compared.
    """
    if not values:
        return []
    shown = {host: f"{value}{(where or {}).get(host, '')}" for host, value in values.items()}
    wanted = Counter(values.values()).most_common(1)[0][0]
    hosts_with_it = [host for host, value in values.items() if value == wanted]
    who = f"as {hosts_with_it[0]} has it" if len(hosts_with_it) == 1 else f"as {len(hosts_with_it)} hosts have it"
    return [
        judged(host, name, shown[host], value == wanted, wanted=f"{wanted}, {who}", hint=hint, otherwise=state)
        for host, value in values.items()
    ]
