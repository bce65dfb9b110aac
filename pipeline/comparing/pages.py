"""A report as one HTML file that fetches nothing, and as Markdown. Pure but for the template, which is read once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.comparing import drawing, tables
from pipeline.comparing.curves import Band, Point
from pipeline.comparing.drawing import COLOURS
from pipeline.comparing.report import Report
from pipeline.comparing.tables import RULE
from pipeline.core.redact import hide
from pipeline.sweep.report import MINIMIZE

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_MOST_AGAINST = 30  # configurations that are held against the best one, in words
_OF_HOST = ("hostname", "cpus", "cpu_model", "gpus", "gpu_models", "gpu_driver", "python", "torch")


def html(found: Report) -> str:
    """The page. Every text is escaped by the template; charts escape what they are given."""
    from markupsafe import Markup

    log = {name: name.endswith("loss") and _are_above_0(bands) for name, bands in found.bands.items()}
    drawn = [
        {
            "metric": name,
            "log": log[name],
            "svg": Markup(drawing.curves(bands, title=name, axis="step", log=log[name], colours=found.colours)),
            "gaps": sum(band.gaps for band in bands),
            "passes": max(band.passes for band in bands),
        }
        for name, bands in found.bands.items()
    ]
    across = drawing.parallel(found.axes, found.lines, less_is_better=found.direction == MINIMIZE) if found.axes else ""
    return _template().render(
        report=found,
        made=_time(found.unix_time),
        charts=[chart for chart in drawn if chart["svg"]],
        parallel=Markup(across),
        graph=Markup(drawing.graph(found.nodes)),
        coloured=COLOURS,
        cell=tables.cell,
        claim=tables.claim,
        larger=tables.larger,
        interval=tables.interval,
        rule=RULE,
        number=tables.number,
        against=found.comparison.against[:_MOST_AGAINST],
        hosts=hosts(found),
        packages=_packages(found),
        parts=[(part, rows) for part, rows in found.comparison.parts.items() if rows],
        day=_time,
        verdict=_verdict,
    )


def _are_above_0(bands: Sequence[Band]) -> bool:
    """As a logarithmic axis needs: some losses are negative (of a likelihood, a reward)."""
    return all(point.mean > 0 for band in bands for point in band.points)


@cache
def _template() -> Template:
    from jinja2 import ChainableUndefined, Environment

    # a run folder may lack any field: what it lacks is empty
    environment = Environment(autoescape=True, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _time(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_time))


def hosts(found: Report) -> list[dict[str, Any]]:
    """Each host once: what it is, how many runs it took part in, and what its network carried where runs tell."""
    known: dict[str, dict[str, Any]] = {}
    for run in found.runs:
        for name, facts in run.environments.items():
            told = {field: facts.get(field) or "" for field in _OF_HOST}
            host = known.setdefault(name, {"host": name, "runs": 0, "interface": "", **told})
            host["runs"] += 1
        for node in run.nodes:
            if str(node.get("host")) in known:
                known[str(node["host"])]["interface"] = _interface(node)
    return [*known.values()]


def _interface(node: Mapping[str, Any]) -> str:
    """Address of a node, and the network of its collectives where it was told one."""
    env = node.get("env")
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    told = [str(env[name]) for name in names if name in env] if isinstance(env, Mapping) else []
    return " ".join(dict.fromkeys([str(node.get("address") or ""), *told])).strip()


def _packages(found: Report) -> list[tuple[str, str]]:
    """Of the best run's first host."""
    first: Mapping[str, Any] = next(iter(found.groups[0].first.environments.values()), {})
    packages = first.get("packages")
    return sorted((str(name), str(value)) for name, value in packages.items()) if isinstance(packages, Mapping) else []


def _verdict(verdict: Mapping[str, Any] | None) -> str:
    """What `doit reproduce` found, in a few words."""
    if verdict is None:
        return "not made again yet"
    if verdict.get("reproduced"):
        return f"reproduced: {verdict.get('compared', 'weights_sha256')}, metrics and steps are equal"
    if verdict.get("within_spread"):
        return "on other hardware, its metrics within their spread"
    outcome = verdict.get("outcome")
    return f"not reproduced: {len(outcome) if isinstance(outcome, list) else 'some'} field(s) differ"


def markdown(found: Report) -> str:
    """The same without pictures."""
    lines = [f"# {tables.escaped(found.title)}", "", f"{found.summary}; made {_time(found.unix_time)}.", ""]
    lines += [*tables.fenced([hide(found.command)]), "", *(f"- {tables.escaped(line)}" for line in found.why)]
    lines += ["", tables.markdown(found.comparison)]
    if found.failures or found.absent:
        lines += ["", "## Not finished", ""]
        lines += [f"- `{run.key}` {run.state}: {tables.escaped(run.failure)}" for run in found.failures]
        lines += [f"- {tables.escaped(f'{one.key} {one.what} {one.state}: {one.why}')}" for one in found.absent]
    lines += ["", "## Provenance", "", "| run | commit | reproduced |", "| --- | --- | --- |"]
    for run in found.runs:
        commit = str(run.provenance.get("git_commit") or "-")[:10]
        dirty = " with changes" if run.provenance.get("git_dirty") else ""
        lines.append(tables.row((run.key, f"{commit}{dirty}", _verdict(run.verdict))))
    lines += ["", *tables.fenced([f"{run.command}  # {run.key}" for run in found.runs], "sh")]
    return "\n".join(lines)


def as_json(found: Report) -> dict[str, Any]:
    """The same as data, with the curves."""
    return {
        "title": found.title,
        "why": list(found.why),
        "command": found.command,
        "unix_time": found.unix_time,
        "by": found.by,
        "direction": found.direction,
        **tables.as_json(found.comparison),
        "curves": {
            name: {band.label: [_point(point) for point in band.points] for band in bands}
            for name, bands in found.bands.items()
        },
        "hosts": hosts(found),
        "absent": [asdict(one) for one in found.absent],
        "verdicts": {run.key: _verdict(run.verdict) for run in found.runs},
    }


def _point(point: Point) -> list[float | str | None]:
    """x, mean, standard deviation, n."""
    std = None if point.std is None else tables.json_number(point.std)
    return [point.x, tables.json_number(point.mean), std, point.n]
