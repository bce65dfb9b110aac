"""Render a report as one self-contained HTML file. Pure except for the template, which is read once.

Imports matplotlib and jinja2, so it is only imported where a page is rendered.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jinja2 import ChainableUndefined, Environment, Template
from markupsafe import Markup, escape

from pipeline.comparing import drawing, tables
from pipeline.comparing.reading import ComparedRun
from pipeline.comparing.report import COLOURS, MOST_AGAINST, Report, hosts, time_text, verdict_text
from pipeline.evaluation import overview
from pipeline.runs.contents import short_field_names, short_value
from trainers.contract import run_folder

_MOST_COLUMNS = 8  # metrics of one table, so that a printed page has room for it
_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html(report: Report) -> str:
    """Render the page. The template escapes all texts; the pictures escape theirs."""
    # A logarithmic axis, unless losses are negative (of a likelihood, a reward).
    log = {
        name: name.endswith("loss") and all(point.mean > 0 for band in bands for point in band.points)
        for name, bands in report.bands.items()
    }
    drawn = [
        {
            "metric": name,
            "log": log[name],
            "svg": Markup(drawing.curves(bands, title=name, axis="step", log=log[name], colours=report.colours)),
            "gaps": sum(band.gaps for band in bands),
            "passes": max(band.passes for band in bands),
        }
        for name, bands in report.bands.items()
    ]
    grid = report.grid
    return _template().render(
        report=report,
        made=time_text(report.unix_time),
        charts=[chart for chart in drawn if chart["svg"]],
        coloured=COLOURS,
        tables=tables,
        against=report.comparison.against[:MOST_AGAINST],
        forest=Markup(_forest(report)),
        grid=Markup("" if grid is None else drawing.cells(grid.rows, grid.columns, grid.cells, about=grid.about)),
        evaluation=_evaluation(report.groups[0].first),
        hosts=hosts(report),
        packages=_packages(report),
        parts=[(part, rows) for part, rows in report.comparison.parts.items() if rows and rows != report.fields],
        names=short_field_names([row.name for row in report.fields]),
        short=short_value,
        breakable=_breakable,
        most_columns=_MOST_COLUMNS,
        several=any(group.n > 1 for group in report.groups),
        verdict=verdict_text,
    )


@cache
def _template() -> Template:
    # A run folder may lack any field; missing fields render as empty.
    environment = Environment(autoescape=True, undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _breakable(name: str) -> Markup:
    """Return the name with places where a narrow column of a printed page may break it."""
    return Markup(re.sub(r"([/_.])(?=\w)", r"\1<wbr>", str(escape(name))))


def _forest(report: Report) -> str:
    """Draw the differences from the best; '' if none is known."""
    groups = report.groups[1 : 1 + MOST_AGAINST]
    if not report.intervals:
        return ""
    names = [f"{group.label}  {group.brief}" for group in groups]
    return drawing.forest(names, [report.colours.get(group.label) for group in groups], report.intervals)


def _evaluation(run: ComparedRun) -> dict[str, str]:
    """Return the pictures of a run's evaluation as ``data:`` addresses, by what they show; none if there are none."""
    paths = {"Confusion matrix": run.folder / run_folder.CONFUSION_MATRIX, "Overview": run.folder / overview.FILE}
    shown = {said: path.read_bytes() for said, path in paths.items() if run.counts and path.is_file()}
    return {said: f"data:image/png;base64,{base64.b64encode(png).decode()}" for said, png in shown.items()}


def _packages(report: Report) -> list[tuple[str, str]]:
    """Return the packages of the best run's first host."""
    packages = next(iter(report.groups[0].first.environments.values()), {}).get("packages")
    return sorted((str(name), str(value)) for name, value in packages.items()) if isinstance(packages, Mapping) else []
