"""What preflight shows: the hosts as a table, the checks as a summary, all of it as JSON. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from pipeline.cluster.preflight.examination import Report
from pipeline.cluster.preflight.judgement import ALL, Check, State
from pipeline.core.specs import NodeFacts
from pipeline.core.tables import aligned


def table(facts: Sequence[NodeFacts]) -> str:
    """The facts as aligned text, a host a line."""
    rows = [("host", "address", "interface", "python", "torch", "gpus", "cpus", "memory", "disk free")]
    rows += [
        (
            fact.host,
            fact.address,
            fact.interface or "-",
            fact.python_version,
            fact.torch_version or "-",
            str(fact.gpus),
            str(fact.cpus),
            f"{fact.memory_bytes / 2**30:.1f} GiB",
            f"{fact.disk_free_bytes / 2**30:.1f} GiB",
        )
        for fact in facts
    ]
    return aligned(rows)


def summary(checks: Sequence[Check]) -> str:
    """A line a check: on how many hosts it is ok, the hosts where it isn't, and what was seen on the first of them."""
    rows: list[tuple[str, ...]] = [("check", "ok", "warning", "failed", "seen")]
    for name in dict.fromkeys(check.name for check in checks):
        mine = [check for check in checks if check.name == name]
        worst = next(check for state in reversed(State) for check in mine if check.state == state)
        rows.append((name, *(_hosts(mine, state) for state in State), worst.seen))
    return aligned(rows)


def _hosts(checks: Sequence[Check], state: State) -> str:
    labels = list(dict.fromkeys(check.host or "-" for check in checks if check.state == state))
    if state == State.OK:
        return str(len(labels)) if labels else "-"
    return ",".join(labels[:3]) + (f"+{len(labels) - 3}" if len(labels) > 3 else "") if labels else "-"


def as_json(report: Report) -> str:
    """``{"ok": …, "hosts": [facts], "checks": [{"host", "name", "state", "seen", "wanted", "hint"}]}``."""
    checks = report.all_checks
    value = {
        "ok": report.is_ok,
        "hosts": [dataclasses.asdict(fact) for fact in report.facts],
        "checks": [
            {**dataclasses.asdict(check), "host": None if check.host == ALL else check.host} for check in checks
        ],
    }
    return json.dumps(value, indent=2)
