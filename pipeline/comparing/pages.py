"""Render a report as Markdown and as JSON, and texts shared with its HTML page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.comparing import tables
from pipeline.comparing.report import Report
from pipeline.comparing.tables import json_number
from pipeline.core.redact import hide
from pipeline.core.tables import fenced

_OF_HOST = ("hostname", "cpus", "cpu_model", "gpus", "gpu_models", "gpu_driver", "python", "torch")


def time_text(unix_time: float) -> str:
    """Format in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_time))


def hosts(report: Report) -> list[dict[str, Any]]:
    """Return each host once: its properties, its number of runs, and its address and network if recorded."""
    known: dict[str, dict[str, Any]] = {}
    for run in report.runs:
        for name, facts in run.environments.items():
            about = {field: facts.get(field) or "" for field in _OF_HOST}
            host = known.setdefault(name, {"host": name, "runs": 0, "interface": "", **about})
            host["runs"] += 1
        for node in run.nodes:
            if str(node.get("host")) in known:
                known[str(node["host"])]["interface"] = _interface(node)
    return [*known.values()]


def _interface(node: Mapping[str, Any]) -> str:
    """Return the address of a node, and the network of its collectives if set."""
    env = node.get("env")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    networks = [str(env[name]).lstrip("=") for name in names if name in env] if isinstance(env, Mapping) else []
    return " ".join(dict.fromkeys([str(node.get("address") or ""), *networks])).strip()


def verdict_text(verdict: Mapping[str, Any] | None) -> str:
    """Describe the result of `doit reproduce` in a few words."""
    if verdict is None:
        return "not made again yet"
    if verdict.get("reproduced"):
        return f"reproduced: {verdict.get('compared', 'weights_sha256')}, metrics and steps are equal"
    if verdict.get("within_spread"):
        return "on other hardware, its metrics within their spread"
    outcome = verdict.get("outcome")
    return f"not reproduced: {len(outcome) if isinstance(outcome, list) else 'some'} field(s) differ"


def markdown(report: Report) -> str:
    """Render the report without pictures."""
    about = f"{tables.escaped(report.subject)}: {report.summary}; made {time_text(report.unix_time)}."
    lines = [f"# {tables.escaped(report.title)}", "", about, "", tables.escaped(report.conclusion), ""]
    lines += [*fenced([hide(report.command)]), "", *(f"- {tables.escaped(line)}" for line in report.why)]
    lines += ["", tables.markdown(report.comparison)]
    if report.failures or report.absent:
        lines += ["", "## Not finished", ""]
        lines += [f"- `{run.key}` {run.state}: {tables.escaped(run.failure)}" for run in report.failures]
        lines += [f"- {tables.escaped(f'{one.key} {one.what} {one.state}: {one.why}')}" for one in report.absent]
    lines += ["", "## Provenance", "", "| run | commit | reproduced |", "| --- | --- | --- |"]
    for run in report.runs:
        commit = str(run.provenance.get("git_commit") or "-")[:10]
        dirty = " with changes" if run.provenance.get("git_dirty") else ""
        lines.append(tables.row((run.key, f"{commit}{dirty}", verdict_text(run.verdict))))
    lines += ["", *fenced([f"{run.command}  # {run.key}" for run in report.runs], "sh")]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as data, with the curves."""
    return {
        "title": report.title,
        "subject": report.subject,
        "conclusion": report.conclusion,
        "why": list(report.why),
        "command": report.command,
        "unix_time": report.unix_time,
        "by": report.by,
        "direction": report.direction,
        **tables.as_json(report.comparison),
        "curves": {
            name: {
                band.label: [
                    [point.x, json_number(point.mean), json_number(point.std), point.n] for point in band.points
                ]
                for band in bands
            }
            for name, bands in report.bands.items()
        },
        "hosts": hosts(report),
        "absent": [asdict(one) for one in report.absent],
        "verdicts": {run.key: verdict_text(run.verdict) for run in report.runs},
    }
