"""Pictures with matplotlib: curves as files, and the HTML page of a report with its pictures as SVG elements.

Equal data give equal bytes. An import takes 0.6 s, so only commands that draw import this module."""

from __future__ import annotations

import base64
import io
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from jinja2 import ChainableUndefined, Environment, Template
from markupsafe import Markup, escape

from pipeline.comparing import comparison as tables
from pipeline.comparing.curves import Band, parts_with_spread, span_of, thinned, within
from pipeline.comparing.groups import MeanDifference
from pipeline.comparing.report import COLOURS, LEVELS, MOST_AGAINST, Cell, Report, hosts, time_text, verdict_text
from pipeline.core.printable import printable
from pipeline.core.tables import counted, quantity
from pipeline.runs.contents import short_field_names, short_value
from trainers.contract import run_folder

# Before the import, which warns about a home folder without write access.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

import matplotlib as mpl  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator  # noqa: E402

from pipeline.evaluation import report as evaluations  # noqa: E402  (imports matplotlib too)

_DATES = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}  # left out of files
_FILE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#8a6d00", "#4b8bbe", "#6a3d9a", "#7f4f24")
_FILE_INCHES = (6.4, 4.0)
_NAMES_INSIDE, _LETTERS_INSIDE, _LETTERS_BELOW, _INCHES_A_LINE = 8, 50, 100, 0.16  # limits of the legend
_CSS_VARIABLES = ("text", "soft", "ground", "box", "line", "rest", *(f"c{n}" for n in range(COLOURS)),
              *(f"q{n}" for n in range(LEVELS)))  # fmt: skip
_INK = {name: f"#fe{number:02x}ef" for number, name in enumerate(_CSS_VARIABLES)}
"""CSS variable of the page → an *ink*, the colour that stands for it while matplotlib draws. ``_element`` replaces inks
by ``var(--name)``, which has a light and a dark value."""
_NAME_BY_INK = {ink: name for name, ink in _INK.items()}
_TITLE_ID = "title:"  # an artist with an id that begins so shows the rest of the id on hover
# all lengths on the page are in pixels
_WIDTH, _HEIGHT = 640, 300  # of a chart of curves
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 40  # margins of a chart
_NAME_CHAR = 7.2  # approximate width of a character
_PAGE_WIDTH, _LINE_HEIGHT = 1000, 14  # of a chart across the page, of a line of text
_ROW_CHARS, _CELL_CHARS = 44, 20  # characters of the name of a row: of intervals, of a table of cells
_POINTS, _POINTS_OF_MANY = 150, 60  # points per curve; the second if there are more curves than colours


# ---------------------------------------------------------------------------------------------- curves
def curve_file(bands: Sequence[Band], *, metric: str, axis: str, form: str, log: bool = False) -> bytes:
    """Return the content of a file with mean curves and shades of one standard deviation. ``form``: one of FORMATS."""
    names = [metric, *(band.title for band in bands)]
    with _drawing(*_FILE_INCHES, names, dpi=200, layout="constrained") as figure:
        axes = figure.subplots()
        inks = [(band, _FILE_COLOURS[number % COLOURS]) for number, band in enumerate(bands)]
        _draw(axes, inks, axis, log=log)
        axes.set_ylabel(printable(metric))
        axes.grid(visible=True, alpha=0.3)
        _legend(figure, axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, metadata=_DATES[form])
    return buffer.getvalue()


def curves(bands: Sequence[Band], *, title: str, axis: str, log: bool = False, colours: Mapping[str, int]) -> str:
    """Return the curves as an SVG element; '' without points. ``colours``: label → number; other curves are grey."""
    inks = [(band, _INK[f"c{colours[band.label]}" if band.label in colours else "rest"]) for band in bands]
    inks.sort(key=lambda item: item[1] != _INK["rest"])  # grey curves are drawn first, below the others
    with _drawing(_WIDTH / 72, _HEIGHT / 72) as figure:
        axes = _axes(figure, _LEFT, _BOTTOM, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM)
        if not _draw(axes, inks, axis, log=log, most=_POINTS if len(bands) <= COLOURS else _POINTS_OF_MANY):
            return ""
        axes.grid(axis="y", linewidth=0.7)
        axes.spines[["left", "right", "top"]].set_visible(False)
        ends = [f"{band.label} ends at {quantity(title, band.points[-1].mean, '.4g')}" for band in bands if band.points]
        return _element(figure, f"{title} over {axis}: {counted(len(ends), 'curve')}; {', '.join(ends[:COLOURS])}")


def _draw(axes: Axes, inks: Sequence[tuple[Band, str]], axis: str, *, log: bool, most: int | None = None) -> bool:
    """Draw each band in its colour; False without points. ``most``: points of a piece on a page; None for a file."""
    points = [point for band, _ in inks for point in band.points]
    span = span_of((value for point in points for value in (point.mean, *point.ends)), log=log)
    if span is None:
        return False
    for band, ink in inks:
        name = _legend_name(band)
        title = f"{_TITLE_ID}{band.label} {name}" if most else None
        for part in band.parts:
            shown = thinned(part, most) if most else part
            x, y = [point.x for point in shown], [within(span, point.mean) for point in shown]
            axes.plot(x, y, color=ink, label=name.lstrip("_"), gid=title, marker="." if len(part) == 1 else "")
            # grey curves have no shade
            for spread in [] if ink == _INK["rest"] else parts_with_spread(shown):
                low, high = ([(point.x, within(span, point.ends[end])) for point in spread] for end in (0, 1))
                axes.fill(*zip(*low, *reversed(high), strict=True), color=ink, alpha=0.2, linewidth=0, gid=title)
    _set_ticks(axes, span, log=log)
    if axis != "minutes":
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(axis, loc="right")
    return True


def _legend_name(band: Band) -> str:
    """Return the name of a curve in the legend, ``optimizer.lr=0.1 (n=3, 2 gaps)``."""
    notes = [f"n={band.count}", band.unfinished, f"{band.gaps} gaps" if band.gaps else ""]
    notes += [f"last of {band.passes} passes"] if band.passes > 1 else []
    notes += [f"{band.below} points at or below 0"] if band.below else []
    return f"{printable(band.title)} ({', '.join(filter(None, notes))})"


def _legend(figure: Figure, axes: Axes) -> None:
    """Place a small legend inside the axes, a large one below them, where it doesn't hide curves."""
    by_name = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # a band has one line per piece
    if len(by_name) <= _NAMES_INSIDE and all(len(name) <= _LETTERS_INSIDE for name in by_name):
        axes.legend(by_name.values(), by_name, frameon=False, fontsize=9)
        return
    folded = [textwrap.fill(name, _LETTERS_BELOW) for name in by_name]
    figure.set_figheight(_FILE_INCHES[1] + _INCHES_A_LINE * sum(name.count("\n") + 1 for name in folded))
    figure.legend(by_name.values(), folded, loc="outside lower left", frameon=False, fontsize=7)


# ---------------------------------------------------------------------------------- intervals and cells
Titled = tuple[str, MeanDifference]
"""(title shown on hover, difference)."""


def forest(names: Sequence[str], inks: Sequence[int | None], panels: Mapping[str, Sequence[Titled | None]]) -> str:
    """Return a forest plot as SVG element: differences from the best with their intervals, a line per configuration and
    a panel per metric. ``inks``: the number of each configuration's colour; None: no colour."""
    height = _BOTTOM + _TOP + 2 * _LINE_HEIGHT * len(names)
    with _drawing(_PAGE_WIDTH / 72, height / 72) as figure:
        shown = [_cut(name, _ROW_CHARS) for name in names]
        left = 16 + _NAME_CHAR * max(map(len, shown))
        panel_width = (_PAGE_WIDTH - left) / len(panels)
        for number, (metric, row) in enumerate(panels.items()):
            axes = _axes(figure, left + number * panel_width + 8, _BOTTOM, panel_width - 24, height - _BOTTOM - _TOP)
            _draw_intervals(axes, row, inks)
            axes.set_yticks(range(len(names)), shown if number == 0 else [""] * len(names))
            axes.set_xlabel(printable(metric), labelpad=6)
        return _element(figure, f"differences from the best in {', '.join(panels)}: {', '.join(names)}")


def _draw_intervals(axes: Axes, row: Sequence[Titled | None], inks: Sequence[int | None]) -> None:
    differences = [titled[1].difference for titled in row if titled is not None]
    low, high = span_of([0.0, *differences], log=False) or (0.0, 0.0)
    # longer intervals are cut off: a wide one, of two seeds, would make the others invisible
    room = max(high - low, 1e-300)
    span = (low - room, high + room)
    axes.axvline(0, color=_INK["soft"], linewidth=1)
    for line, (titled, ink) in enumerate(zip(row, inks, strict=True)):
        if titled is None:
            continue
        item, title = titled[1], _title_id(titled[0])
        colour = _INK["soft" if ink is None else f"c{ink}"]
        if item.low is not None and item.high is not None:
            ends = [within(span, end) for end in (item.low, item.high)]
            axes.plot(ends, [line, line], color=colour, gid=title, solid_capstyle="butt")
        fill = colour if item.is_larger else _INK["ground"]  # a hollow dot: not larger than the spread
        dot = [within(span, item.difference)]
        axes.plot(dot, [line], marker="o", color=colour, markerfacecolor=fill, gid=title)
    axes.set_xlim(*span)
    axes.set_ylim(len(row) - 0.5, -0.5)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.spines[["left", "right", "top"]].set_visible(False)


def cells(rows: Sequence[str], columns: Sequence[str], inside: Sequence[Cell], *, about: Sequence[str]) -> str:
    """Draw a table of coloured cells as an SVG element. ``about``: what rows, columns and cells are."""
    # the size of a cell follows from the longest text inside; long names of columns are turned upright
    lines = max((len(cell.lines) for cell in inside), default=1)
    letters = max((len(line) for cell in inside for line in cell.lines), default=1)
    cell_width, cell_height = max(26, 12 + _NAME_CHAR * letters), max(26, 8 + _LINE_HEIGHT * lines)
    names = [[_cut(name, _CELL_CHARS) for name in side] for side in (rows, columns)]
    left, below = 40 + _NAME_CHAR * max(map(len, names[0])), 44.0
    turned = _NAME_CHAR * max(map(len, names[1])) > cell_width  # names of columns
    below += _NAME_CHAR * max(map(len, names[1])) if turned else 0
    width, height = left + cell_width * len(columns) + 8, below + cell_height * len(rows) + 4
    with _drawing(width / 72, height / 72) as figure:
        axes = _axes(figure, left, below, cell_width * len(columns), cell_height * len(rows))
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(rows), 0)
        for cell in inside:
            face = _INK["box" if cell.level is None else f"q{cell.level}"]
            style: Any = {"ec": _INK["ground"], "linewidth": 1, "gid": _title_id(cell.title) if cell.title else None}
            axes.add_patch(Rectangle((cell.column, cell.row), 1, 1, fc=face, **style))
            ink = _INK["text" if not cell.level else "ground"]
            for number, line in enumerate(cell.lines):
                offset = (number - (len(cell.lines) - 1) / 2) * _LINE_HEIGHT / cell_height  # from the middle line
                middle = cell.row + 0.5 + offset + 4 / cell_height
                axes.text(cell.column + 0.5, middle, printable(line), ha="center", color=ink)
        axes.set_xticks([column + 0.5 for column in range(len(columns))], names[1], rotation=90 if turned else 0)
        axes.set_yticks([row + 0.5 for row in range(len(rows))], names[0])
        axes.set_xlabel(printable(about[1]), labelpad=8)
        axes.set_ylabel(printable(about[0]), labelpad=8)
        axes.spines[:].set_visible(False)
        size = {"width": f"{width:.0f}", "height": f"{height:.0f}"}
        return _element(figure, f"{about[2]} by {about[0]} and {about[1]}: {counted(len(inside), 'cell')}", size)


# ---------------------------------------------------------------------------------------------- common
@contextmanager
def _drawing(width: float, height: float, names: Sequence[str] | None = None, **more: Any) -> Iterator[Figure]:
    """Yield a figure of this size in inches, in which no text is parsed as a formula. ``names``: for a file, the texts
    in it, by which its fonts are chosen; None: the figure is for a page."""
    soft, line = _INK["soft"], _INK["line"]
    page = {
        "figure.dpi": 72, "figure.frameon": False, "font.size": 12, "lines.linewidth": 1.8, "axes.facecolor": "none",
        "axes.edgecolor": soft, "axes.labelcolor": soft, "xtick.color": soft, "ytick.color": soft, "grid.color": line,
        "xtick.bottom": False, "ytick.left": False, "xtick.labelsize": 12, "ytick.labelsize": 12,
    }  # fmt: skip
    settings: Any = {"svg.hashsalt": "paceline", "svg.fonttype": "none", "text.parse_math": False}
    settings |= page if names is None else {"font.family": evaluations.drawable(names)[0]}
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a browser has more fonts than matplotlib
        figure = Figure(figsize=(width, height), **more)
        FigureCanvasAgg(figure)
        yield figure


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes with this position and size, in pixels of a page's figure."""
    whole, high = (inches * 72 for inches in figure.get_size_inches())
    return figure.add_axes((left / whole, bottom / high, width / whole, height / high))


def _cut(name: str, most: int) -> str:
    name = printable(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _title_id(title: str) -> str:
    """Return the id by which ``_element`` gives an artist a title, shown on hover."""
    return f"{_TITLE_ID}{printable(title)}"


def _set_ticks(axes: Axes, span: tuple[float, float], *, log: bool, most: int = 5) -> None:
    """Set ticks at round values, labelled with all digits: two may differ only in the last one. On a logarithmic axis,
    set them at powers of ten, if the axis has two."""
    if log:
        axes.set_yscale("log")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()
    has_powers = log and math.floor(math.log10(span[1])) > math.ceil(math.log10(span[0]))
    if log and not has_powers and span[1] / span[0] > 4:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    elif not has_powers:
        axes.yaxis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]))


def _element(figure: Figure, label: str, size: Mapping[str, str] = {}) -> str:
    """Return the figure as an SVG element for the page, which sets colours and fonts. ``label``: a description for
    screen readers. ``size``: width and height; without them it fills the page's width."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    root.attrib = {"role": "img", "aria-label": printable(label), "viewBox": root.attrib["viewBox"], **size}
    for item in root.iter():
        item.tag = item.tag.rpartition("}")[2]  # HTML knows SVG elements without a namespace
        item[:] = [child for child in item if not child.tag.endswith(("}metadata", "}defs"))]
        name = item.attrib.pop("id", "")
        if name.startswith(_TITLE_ID):
            title = ElementTree.Element("title")
            title.text = name.removeprefix(_TITLE_ID)
            item.insert(0, title)
        item.attrib.pop("clip-path", None)
        style = item.attrib.pop("style", "")
        if item.tag == "use":  # a marker (the dot of a single point), whose definition was removed above
            item.tag = "circle"
            item.attrib = {"cx": item.attrib["x"], "cy": item.attrib["y"], "r": "3"}
        if item.tag == "text":  # the page sets the font
            style = "; ".join(re.findall(r"text-anchor: \w+|fill: #\w+", style))
        if style:
            item.set("style", re.sub("#fe..ef", lambda ink: f"var(--{_NAME_BY_INK[ink[0]]})", style))
        if "d" in item.attrib:  # a path: one digit after the point is a tenth of a pixel
            item.set("d", re.sub(r"(\.\d)\d+", r"\1", item.attrib["d"]))
    return re.sub(r"\s*<g />", "", ElementTree.tostring(root, encoding="unicode"))


# -------------------------------------------------------------------------------------------- the page
_MOST_COLUMNS = 8  # metrics of one table, so that a printed page has room for it
_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html(report: Report) -> str:
    """Render the page. The template escapes all texts; the pictures escape theirs."""
    # losses on a logarithmic axis, unless they are negative, as of a likelihood
    log = {
        name: name.endswith("loss") and all(point.mean > 0 for band in bands for point in band.points)
        for name, bands in report.bands.items()
    }
    drawn = [
        {
            "metric": name,
            "log": log[name],
            "svg": Markup(curves(bands, title=name, axis="step", log=log[name], colours=report.colours)),
            "gaps": sum(band.gaps for band in bands),
            "passes": max(band.passes for band in bands),
        }
        for name, bands in report.bands.items()
    ]
    grid, others, first = report.grid, report.groups[1 : 1 + MOST_AGAINST], report.groups[0].first
    names, inks = [f"{one.label}  {one.brief}" for one in others], [report.colours.get(one.label) for one in others]
    # of the best configuration's first run: the evaluation, and the packages of the first host
    pictures = {"Confusion matrix": run_folder.CONFUSION_MATRIX, "Overview": evaluations.OVERVIEW}
    paths = {title: first.folder / name for title, name in pictures.items()}
    png_by_title = {title: path.read_bytes() for title, path in paths.items() if first.counts and path.is_file()}
    recorded = next(iter(first.environments.values()), {}).get("packages")
    packages = recorded.items() if isinstance(recorded, Mapping) else ()
    return _template().render(
        report=report,
        made=time_text(report.unix_time),
        charts=[chart for chart in drawn if chart["svg"]],
        coloured=COLOURS,
        tables=tables,
        against=report.comparison.against[:MOST_AGAINST],
        forest=Markup(forest(names, inks, report.intervals) if report.intervals else ""),
        grid=Markup("" if grid is None else cells(grid.rows, grid.columns, grid.cells, about=grid.about)),
        evaluation={
            title: f"data:image/png;base64,{base64.b64encode(png).decode()}" for title, png in png_by_title.items()
        },
        hosts=hosts(report),
        packages=sorted((str(name), str(value)) for name, value in packages),
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
