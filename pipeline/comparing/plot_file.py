"""Curves as a picture for a paper: SVG, PNG or PDF, by matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.comparing.curves import Band, of_several
from pipeline.evaluation import fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
_INCHES = (6.4, 4.0)
_NAMES_INSIDE, _LETTERS_INSIDE, _LETTERS_BELOW, _INCHES_A_LINE = 8, 50, 100, 0.16  # of the legend
_METADATA = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}  # the same curves, the same file
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa3377", "#8a6d00", "#4b8bbe", "#6a3d9a", "#7f4f24")


def picture(bands: Sequence[Band], *, metric: str, axis: str, form: str, log: bool = False) -> bytes:
    """Mean curves with a band of one standard deviation on either side, n in the legend."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families, _ = fonts.drawable([metric, *(band.title for band in bands)])
    with mpl.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none", "font.family": families}):
        figure = Figure(figsize=_INCHES, dpi=200, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for number, band in enumerate(bands):
            _draw(axes, band, _COLOURS[number % len(_COLOURS)])
        axes.set_xlabel(axis)
        axes.set_ylabel(_plain(metric))
        if log:
            axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        _legend(figure, axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, metadata=_METADATA[form])
    return buffer.getvalue()


def _draw(axes: Axes, band: Band, colour: str) -> None:
    """Its pieces between gaps; the first has the name."""
    told = [f"n={band.count}", band.unfinished, f"{band.gaps} gaps" if band.gaps else ""]
    told += [f"last of {band.passes} passes"] if band.passes > 1 else []
    told += [f"{band.below} points at or below 0"] if band.below else []
    name = f"{_plain(band.title)} ({', '.join(filter(None, told))})"
    for part in band.parts:
        across = [point.x for point in part]
        axes.plot(
            across, [point.mean for point in part], color=colour, label=name, marker="." if len(part) == 1 else ""
        )
        for spread in of_several(part):
            low, high = zip(*(point.ends for point in spread), strict=True)
            axes.fill_between([point.x for point in spread], low, high, color=colour, alpha=0.2, linewidth=0)
        name = "_nolegend_"


def _legend(figure: Figure, axes: Axes) -> None:
    """In the axes where it is small, else below them: one that is wider than the axes would leave them no room."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) <= _NAMES_INSIDE and all(len(name) <= _LETTERS_INSIDE for name in names):
        axes.legend(frameon=False, fontsize=9)
        return
    folded = [textwrap.fill(name, _LETTERS_BELOW) for name in names]
    lines = sum(name.count("\n") + 1 for name in folded)
    figure.set_figheight(_INCHES[1] + _INCHES_A_LINE * lines)
    figure.legend(handles, folded, loc="outside lower left", frameon=False, fontsize=7)


def _plain(text: str) -> str:
    """Dollars and a leading underscore mean something to matplotlib."""
    return text.replace("$", r"\$").lstrip("_")
