"""`doit plot`: curves with their spread, in the terminal and as a picture."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from pipeline.cli.commands import compare
from pipeline.comparing.curves import Curve, band, curve, rows
from pipeline.comparing.groups import grouped, read
from pipeline.core.errors import UsageError
from pipeline.runs.folder import RunFolder
from pipeline.runs.metrics_file import MetricsRow
from tests.pipeline.comparing_folders import failed, trained, write_curve
from tests.pipeline.conftest import Printed


@pytest.fixture
def plotted(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What `doit plot` says in 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    return partial(printed, compare.plot)


def row(step: int, value: float, *, epoch: int | None = 1, time_s: float = 0.0) -> MetricsRow:
    return MetricsRow(time_s=time_s, step=step, epoch=epoch, metrics={"loss": value})


def three_seeds(runs_dir: Path) -> list[RunFolder]:
    return [trained(runs_dir, seed, accuracy=0.8 + seed / 10) for seed in range(3)]


def test_a_terminal_shows_curves_within_its_width_with_n_and_spread(tmp_path: Path, plotted: Printed) -> None:
    folders = [*three_seeds(tmp_path), trained(tmp_path, 0, 0.01, accuracy=0.4)]
    text = plotted(tmp_path, *(folder.key for folder in folders))
    lines = [line for line in text.splitlines() if not line.startswith("still ")]  # a busy machine takes 5 s
    assert max(map(len, lines)) <= 60
    assert lines[0] == "val/accuracy 0.08 to 1, over step 10 to 50"
    assert lines[3:6] == [f"{'▅' * 15:>59}█", f"{'░' * 14:>44}{'█' * 16}", f"{'█' * 30:>60}"]
    assert lines[8:10] == ["█" * 60, "A  optimizer.lr=0.1  n 3, last 0.90 ± 0.10"]
    assert lines[-2:] == [
        "B  optimizer.lr=0.01  n 1, last 0.4000",
        "░ one standard deviation over seeds above the mean",
    ]
    assert "\x1b" not in text  # nobody looks at it in colours


def test_runs_without_a_val_accuracy_show_their_first_metric_that_has_a_curve(tmp_path: Path, plotted: Printed) -> None:
    folder = trained(tmp_path, 0)
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    told = [{**row, "metrics": {"perplexity": row["step"], "loss": row["step"]}} for row in rows]
    told[-1]["metrics"]["final"] = 1.0
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    (folder.path / "result.json").unlink()  # what was altered has no curve
    assert plotted(tmp_path, folder.key).startswith("loss 10 to 50, over step")
    with pytest.raises(
        UsageError, match="metric=val/accuracy: none of these runs has such a curve; valid: final, loss"
    ):
        plotted(tmp_path, folder.key, "metric=val/accuracy")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["svg", "png", "pdf"])
def test_a_picture_of_the_same_curves_is_the_same_file(tmp_path: Path, plotted: Printed, form: str) -> None:
    keys = [folder.key for folder in three_seeds(tmp_path)]
    made = []
    for name in ("a", "b"):
        target = tmp_path / f"{name}.{form}"
        assert plotted(tmp_path, *keys, f"file={target}", "x=minutes", "log=1").strip() == str(target)
        made.append(target.read_bytes())
    assert made[0] == made[1]
    assert made[0][:5] == {"svg": b"<?xml", "png": b"\x89PNG\r", "pdf": b"%PDF-"}[form]
    if form == "svg":
        assert b"(n=3)" in made[0]


def test_a_value_that_is_no_number_is_a_gap_that_is_said(tmp_path: Path, plotted: Printed) -> None:
    run = trained(tmp_path)
    write_curve(run, 0.9, {30: float("nan")})
    said = " ".join(plotted(tmp_path, run.key, "metric=train/loss", "log=1").split())
    assert "n 1, last 0.2000, 1 values are no number: gaps" in said


def test_a_last_value_of_fewer_seeds_says_of_how_many_it_is(tmp_path: Path, plotted: Printed) -> None:
    short, long = three_seeds(tmp_path)[:2]
    for run, most in ((short, 30), (long, 50)):
        lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run.path / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= most))
        (run.path / "result.json").unlink()
    assert "n 2 (2 RUNNING), last 0.9000 (n 1)" in " ".join(plotted(tmp_path, short.key, long.key).split())


def test_steps_that_a_script_counts_anew_are_drawn_over_minutes_and_said_over_steps(
    tmp_path: Path, plotted: Printed
) -> None:
    again = [row(step, 5.0 - at, epoch=at // 3, time_s=6.0 * at) for at, step in enumerate([0, 1, 2, 0, 1, 2])]
    assert curve(again, "loss", "step") == Curve(x=(0.0, 1.0, 2.0), y=(2.0, 1.0, 0.0), passes=2)
    assert curve(again, "loss", "minutes").y == (5.0, 4.0, 3.0, 2.0, 1.0, 0.0)
    assert curve(again, "loss", "epoch") == Curve(x=(0.0, 1.0), y=(3.0, 0.0))
    folder = trained(tmp_path)
    line = json.loads((folder.path / "metrics.jsonl").read_text().splitlines()[0])
    rows = [{**line, "t": line["t"] + at, "step": at % 2} for at in range(4)]
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder.path / "result.json").unlink()
    said = " ".join(plotted(tmp_path, folder.key).split())
    assert "the last of 2 passes over the steps (x=minutes: all)" in said
    assert "over minutes 0 to 0.05" in plotted(tmp_path, folder.key, "x=minutes")


def test_points_at_or_below_0_are_left_out_of_a_logarithmic_axis_and_counted(tmp_path: Path, plotted: Printed) -> None:
    run = trained(tmp_path)
    write_curve(run, 0.9, {30: -1.0, 40: 0.0})
    said = " ".join(plotted(tmp_path, run.key, "metric=train/loss", "log=1").split())
    assert "n 1, last 0.2000, 2 points at or below 0 aren't drawn" in said
    assert "points at or below" not in plotted(tmp_path, run.key, "metric=train/loss")


def test_a_run_that_failed_is_not_drawn_as_if_it_had_finished(tmp_path: Path, plotted: Printed) -> None:
    run = failed(tmp_path)
    write_curve(run, 0.9)
    assert "n 1 (1 FAILED), last 0.9000" in " ".join(plotted(tmp_path, run.key, trained(tmp_path).key).split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("metric=val/acuracy",),
            r"metric=val/acuracy: none of these runs has such a curve; did you mean val/accuracy\?",
        ),
        (("x=hours",), "x=hours is not known; .*valid: epoch, minutes, step"),
        (("file=a.gif",), "file=a.gif must end in .pdf, .png, .svg"),
        (("file=no/such/a.svg",), "file=no/such/a.svg: there is no folder .*/no/such"),
    ],
)
def test_what_can_not_be_drawn_is_said(tmp_path: Path, plotted: Printed, words: tuple[str, ...], said: str) -> None:
    key = trained(tmp_path).key
    with pytest.raises(UsageError, match=said):
        plotted(tmp_path, key, *words)


def test_a_band_is_mean_and_sample_deviation_of_the_runs_that_have_the_step(tmp_path: Path) -> None:
    (group,) = grouped([read(folder) for folder in three_seeds(tmp_path)])
    of_runs = {run.key: rows(run.folder) for run in group.runs}
    last = band(group, of_runs, "val/accuracy", "step").points[-1]
    assert (last.x, last.n, last.mean, last.std) == (50.0, 3, pytest.approx(0.9), pytest.approx(0.1))
    assert [point.x for point in band(group, of_runs, "val/accuracy", "epoch").points] == [1.0, 2.0, 3.0]
    minutes = band(group, of_runs, "val/accuracy", "minutes").points
    assert (minutes[0].x, minutes[-1].x) == (0.0, pytest.approx(40 / 60))


def test_a_step_that_was_made_again_counts_once_and_as_it_was_last() -> None:
    found = [row(1, 3.0), row(2, 2.0), row(2, 1.0), row(1, 2.5)]
    assert curve(found, "loss", "step") == Curve(x=(1.0, 2.0), y=(2.5, 1.0), passes=3)


def test_curves_that_were_edited_are_named_and_not_drawn(tmp_path: Path, plotted: Printed) -> None:
    altered, other = trained(tmp_path, 0), trained(tmp_path, 1)
    lines = (altered.path / "metrics.jsonl").read_text()
    (altered.path / "metrics.jsonl").write_text(lines.replace("0.9", "0.99"))
    said = plotted(tmp_path, altered.key, other.key)
    assert f"left out: {altered.key} is ALTERED: {altered.path}/metrics.jsonl has " in said
    assert "n 1, last 0.9000" in said
    with pytest.raises(UsageError, match="none of these runs has logged a metric"):
        plotted(tmp_path, altered.key)
