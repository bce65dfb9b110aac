"""Pictures: what stands in the SVG elements of a report, and curves as a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.comparing import drawing
from pipeline.comparing.curves import Band, MeanPoint
from pipeline.comparing.groups import MeanDifference
from pipeline.comparing.report import COLOURS, LEVELS, Cell
from tests.pipeline.comparing_folders import HOSTILE
from tests.waiting import HANG_S

pytestmark = pytest.mark.slow
NAME = f"{HOSTILE} $x_1$ _ \x1b[31m 中 \udc80"

# An unraisable one is another test's: what it left open is collected here.
WITHOUT_WARNINGS = pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")


def band(*means: float, title: str = "lr=1", std: float | None = None, label: str = "A") -> Band:
    points = tuple(MeanPoint(x=float(x), mean=mean, std=std, n=1 if std is None else 2) for x, mean in enumerate(means))
    return Band(label=label, title=title, parts=(points,), gaps=0, n=2)


def texts(svg: str) -> list[str]:
    return [item.text or "" for item in ElementTree.fromstring(svg).iter("text")]


@WITHOUT_WARNINGS
def test_a_hostile_name_stands_as_it_is_in_a_picture_that_refers_to_nothing() -> None:
    pictures = [
        drawing.curves([band(1, 2, title=NAME)], title=NAME, axis="step", colours={"A": 0}),
        drawing.forest([NAME, "b"], [0, None], {NAME: [(NAME, MeanDifference(metric=NAME, difference=0.0))] * 2}),
        drawing.cells(
            [NAME], [NAME], [Cell(row=0, column=0, lines=(NAME,), level=0, title=NAME)], about=(NAME, "b", "c")
        ),
    ]
    for svg in pictures:
        assert re.findall(r"<script|<use|<style|url\(|href|https?:|clip-path| id=|#[0-9a-f]{6}", svg) == []
        assert "\x1b" not in svg
        root = ElementTree.fromstring(svg)
        assert HOSTILE[:8] in (root.get("aria-label") or "")
        assert any(HOSTILE[:8] in (title.text or "") for title in root.iter("title"))
        assert {found for found in re.findall(r"(?:fill|stroke): ([^;\"]*)", svg) if found != "none"} <= {
            f"var(--{name})" for name in ("c0", "q0", "soft", "line", "box", "text", "ground")
        }
    assert "var(--c0)" in pictures[0]


@pytest.mark.ci
@pytest.mark.long
def test_a_home_folder_without_write_access_is_nothing_to_a_reader(tmp_path: Path) -> None:
    home = {name: str(tmp_path / "file" / "x") for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    (tmp_path / "file").touch()
    script = "from pipeline.comparing import drawing; print(drawing.cells(['a'], ['b'], [], about=('a', 'b', 'c')))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **home}, capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    assert (done.stdout[:4], done.stderr) == ("<svg", "")


@pytest.mark.parametrize(
    ("means", "log", "ticks"),
    [
        ((0.002, 50.0), True, ["0.01", "0.1", "1", "10"]),
        ((0.16, 2.4), True, ["0.2", "0.5", "1", "2"]),
        ((2.5, 8.5), True, ["4", "6", "8"]),
        ((0.0, 1.0), False, ["0", "0.25", "0.5", "0.75", "1"]),
        ((1.0, 1e308, 2.0), False, ["1", "1.25", "1.5", "1.75", "2"]),
        ((1_234_567, 1_234_569), False, ["1,234,567", "1,234,567.5", "1,234,568", "1,234,568.5", "1,234,569"]),
        ((1.1e-4, 1.4e-4), False, ["0.00011", "0.00012", "0.00013", "0.00014"]),
        ((5e-324, 5e-324), False, []),
    ],
)
@WITHOUT_WARNINGS
def test_ticks_are_round_numbers_and_extreme_values_are_drawn(
    means: tuple[float, ...], log: bool, ticks: list[str]
) -> None:
    found = texts(drawing.curves([band(*means)], title="loss", axis="step", log=log, colours={"A": 0}))
    assert found[found.index("step") + 1 :][: len(ticks)] == ticks
    assert drawing.curves([band(5e-324)], title="loss", axis="step", log=True, colours={}) == ""


def test_letters_can_be_read_on_every_colour_in_the_light_and_in_the_dark() -> None:
    """At least 4.5 : 1, as WCAG 2 asks of text: a configuration's letter stands on its colour in that of the page."""
    style = Path(drawing.__file__).with_name("report.html.jinja").read_text().partition("</style>")[0]
    light, dark = style.split("@media screen and (prefers-color-scheme: dark)")
    for told in (light, dark):
        colours = dict(re.findall(r"--(\w+): #([0-9a-f]{3,6});", told))
        for name in ("soft", "bad", "good", "link", *(f"c{at}" for at in range(COLOURS))):
            assert contrast(colours[name], colours["ground"]) >= 4.5, (name, colours[name])
        for at in range(LEVELS):  # lines on the page, and text on them
            assert contrast(colours[f"q{at}"], colours["ground"]) >= 3, at
            assert contrast(colours[f"q{at}"], colours["ground" if at else "text"]) >= 4.5, at


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        pairs = [char * 2 for char in colour] if len(colour) == 3 else re.findall("..", colour)
        parts = [int(pair, 16) / 255 for pair in pairs]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_difference_is_a_dot_with_an_interval_which_is_full_where_it_leaves_out_0() -> None:
    near = "B near", MeanDifference(metric="accuracy", difference=-0.01, low=-0.9, high=0.9)
    far = "C far", MeanDifference(metric="accuracy", difference=-0.1, low=-0.12, high=-0.08)
    svg = drawing.forest(["B lr 1", "C lr 2", "D lr 3"], [1, 2, None], {"accuracy": [near, far, None]})
    assert [text for text in texts(svg) if "lr" in text] == ["B lr 1", "C lr 2", "D lr 3"]
    assert re.findall(r'<circle [^>]*style="fill: ([^;]*)', svg) == ["var(--ground)", "var(--c2)"]
    widths = [
        float(b) - float(a)
        for a, b in re.findall(r"<title>[BC] [^<]*</title><path d=\"M ([\d.]+) \S+\s+L ([\d.]+)", svg)
    ]
    assert widths[0] / widths[1] == pytest.approx(0.3 / 0.04, rel=0.01)  # that of B is cut off


def test_a_band_ends_where_one_seed_alone_goes_on() -> None:
    """Closed to a point it would show seeds that agree."""
    points = tuple(MeanPoint(x=x, mean=5.0 - x, std=1.0 if x < 3 else None, n=2 if x < 3 else 1) for x in range(1, 5))
    found = Band(label="A", title="lr=1", parts=(points,), gaps=0, n=2)
    svg = drawing.curves([found], title="loss", axis="step", colours={"A": 0})
    (polygon,) = re.findall(r'd="([^"]*z) " style="[^"]*opacity', svg)
    assert polygon.count("L") == 3  # two steps, below and above
    assert "(n=1 to 2)" in svg
