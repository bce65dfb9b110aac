"""Charts of a report: ticks, colours, the graph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.comparing import charts, plot_file, scales
from pipeline.comparing.charts import Line, Node
from pipeline.comparing.curves import Band, Point


@pytest.mark.parametrize(
    ("low", "high", "is_log", "ticks"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.0, 978.0, False, [200, 400, 600, 800]),
        (0.002, 50.0, True, [0.01, 0.1, 1, 10]),
    ],
)
def test_ticks_are_round(low: float, high: float, is_log: bool, ticks: list[float]) -> None:
    assert scales.Scale(low=low, high=high, is_log=is_log).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (1e6, 2e6, ["1e+06", "1.2e+06", "1.4e+06", "1.6e+06", "1.8e+06", "2e+06"]),
        (1.1e-4, 1.4e-4, ["1.1e-04", "1.2e-04", "1.3e-04", "1.4e-04"]),
        (1_234_567, 1_234_569, ["1,234,567", "1,234,567.5", "1,234,568", "1,234,568.5", "1,234,569"]),
        (0, 1500, ["0", "500", "1,000", "1,500"]),
    ],
)
def test_each_tick_says_its_own_value(low: float, high: float, texts: list[str]) -> None:
    assert [scales.text(tick) for tick in scales.Scale(low=low, high=high).ticks()] == texts


def test_letters_can_be_read_on_every_colour_in_the_light_and_in_the_dark() -> None:
    """At least 4.5 : 1, as WCAG 2 asks of text: a configuration's letter stands on its colour in that of the page."""
    style = Path(charts.__file__).with_name("report.html.jinja").read_text().partition("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for told in (light, dark):
        colours = dict(re.findall(r"--(\w+): #([0-9a-f]{3,6});", told))
        for name in ("soft", "bad", "good", "link", *(f"c{at}" for at in range(charts.COLOURS))):
            assert contrast(colours[name], colours["ground"]) >= 4.5, (name, colours[name])


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        pairs = [char * 2 for char in colour] if len(colour) == 3 else re.findall("..", colour)
        parts = [int(pair, 16) / 255 for pair in pairs]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_graph_has_each_box_after_what_it_needs() -> None:
    nodes = [Node(name="a", lines=("a<b>",)), Node(name="b", lines=("b",), needs=("a",))]
    svg = charts.graph(nodes)
    assert "a&lt;b&gt;" in svg
    places = [float(x) for x in re.findall(r'<rect x="([\d.]+)"', svg)]
    assert places == [1, 215]


def test_axes_of_parallel_coordinates_have_room_for_their_names_and_powers_of_ten_are_evenly_apart() -> None:
    axes = [f"optimizer.settings.name_{at}" for at in range(6)]
    lines = [Line(title="t", values=(*[value] * 5, 1.0)) for value in (0.01, 0.1, 1.0)]
    svg = charts.parallel(axes, lines)
    names = re.findall(r'text-anchor="middle">([^<]*)<', svg)
    assert names == [f"…ettings.name_{at}" for at in range(6)]
    ends = [float(y) for y in re.findall(r'points="62,([\d.]+) ', svg)]
    assert ends[1] - ends[0] == pytest.approx(ends[2] - ends[1], abs=0.2)


def test_a_number_among_names_is_written_as_a_number_is() -> None:
    lines = [Line(title="t", values=(value, 1.0)) for value in ("auto", 2.0)]
    assert re.findall(r">([^<]*)</text>", charts.parallel(["cores", "loss"], lines))[1:3] == ["2", "auto"]


def test_values_that_differ_from_nothing_by_less_than_a_float_can_halve_are_drawn() -> None:
    found = scales.around([5e-324] * 3)
    assert found is not None
    assert found.share(5e-324) == 0.5
    assert 0.0 in found.ticks()
    assert scales.around([5e-324], log=True) is None


def test_a_band_ends_where_one_seed_alone_goes_on() -> None:
    """Closed to a point it would show seeds that agree."""
    points = tuple(Point(x=x, mean=5.0 - x, std=1.0 if x < 3 else None, n=2 if x < 3 else 1) for x in range(1, 5))
    band = Band(label="A", title="lr=1", parts=(points,), gaps=0, n=2)
    svg = charts.curves([band], title="loss", axis="step", colours={"A": 0})
    (polygon,) = re.findall(r'<polygon class="band" points="([^"]*)"', svg)
    assert len(polygon.split()) == 4  # two steps, above and below
    assert "(n 1 to 2)" in svg


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_long_names_of_many_curves_leave_the_picture_its_axes() -> None:
    """matplotlib warned on the terminal and gave the layout up."""
    points = tuple(Point(x=x, mean=1 / x, std=None, n=1) for x in range(1, 5))
    title = (
        "model.dropout=0.25 model.hidden=128 model.name=small_cnn model.width=32 optimizer.lr=0.03 trainer.epochs=20"
    )
    bands = [Band(label=name, title=f"{title} {title} {name}", parts=(points,), gaps=0, n=1) for name in "ABCDEFGHIJ"]
    svg = plot_file.picture(bands, metric="val/loss", axis="step", form="svg").decode()
    assert svg.count("optimizer.lr=0.03") == 20
