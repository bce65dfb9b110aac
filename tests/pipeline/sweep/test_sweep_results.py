"""Figures over seeds, the best configuration, and the command that repeats it."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline.live import views
from pipeline.sweep.results import TrialResult, as_json, best, direction_of, groups, statistic, text


def trial(number: int, *chosen: str, state: str = "FINISHED", detail: str = "", **values: float) -> TrialResult:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return TrialResult(
        number=number, key=f"key{number}", state=state, chosen=chosen, overrides=("experiment=x", *chosen),
        values=named, detail=detail,
    )  # fmt: skip


TRIALS = [
    trial(0, "optimizer.lr=0.1", "seed=0", val__accuracy=0.90, val__loss=0.5),
    trial(1, "optimizer.lr=0.1", "seed=1", val__accuracy=0.92, val__loss=0.4),
    trial(2, "optimizer.lr=0.1", "seed=2", val__accuracy=0.97, val__loss=0.3),
    trial(3, "optimizer.lr=0.3", "seed=0", val__accuracy=0.94, val__loss=0.2),
    trial(4, "optimizer.lr=0.3", "seed=1", state="FAILED", detail="loss is nan"),
]


def test_seeds_are_taken_together_with_mean_standard_deviation_and_n() -> None:
    first, second = groups(TRIALS)
    found = first.statistics["val/accuracy"]
    assert (found.n, found.mean, found.std) == (3, pytest.approx(0.93), pytest.approx(0.0360555))
    assert (second.n, second.statistics["val/accuracy"].std) == (1, None)
    assert statistic([1.0, 3.0]).std == pytest.approx(2**0.5)  # n - 1


def test_the_best_is_the_best_mean_and_a_loss_is_better_when_it_is_less() -> None:
    found = groups(TRIALS)
    assert [best(found, by)[0].chosen for by in ("val/accuracy", "val/loss")] == [("optimizer.lr=0.3",)] * 2  # type: ignore[index]
    assert best(found, "no/such") is None
    assert {direction_of(name) for name in ("val/loss", "train_s", "latency_ms", "test/WER", "time")} == {"minimize"}
    assert {direction_of(name) for name in ("test/accuracy", "images_per_s", "val/f1_macro", "mAP")} == {"maximize"}
    assert {direction_of(name) for name in ("margin", "timesteps", "memory_mb", "accuracy_loss")} == {None}


def test_a_star_stands_where_it_is_known_what_is_better_and_the_means_differ() -> None:
    rows = [trial(n, f"optimizer.lr={n}", latency_ms=9.0 - n, margin=n, train_s=2.0) for n in range(2)]
    said = text(rows, 2, by="margin")
    assert "optimizer.lr=0  1/1  9.0000      0.0000  2.0000\n" in said
    assert "optimizer.lr=1  1/1  8.0000 *    1.0000  2.0000" in said
    assert "best by" not in said
    aimed = text(rows, 2, by="margin", goals={"margin": "minimize"})
    assert "optimizer.lr=0  1/1  0.0000 *  9.0000" in aimed
    assert "best by margin: optimizer.lr=0; trial 0" in aimed


def test_the_text_has_spread_and_n_the_command_and_what_failed() -> None:
    said = text(TRIALS, 5)
    assert "4 of 5 trials finished, 2 configurations" in said
    assert "optimizer.lr=0.1  3/3  0.930 ± 0.036" in said
    assert "doit train experiment=x optimizer.lr=0.3 seed=0" in said
    assert said.endswith("\n\nFAILED: loss is nan\n  trial 4  key4  optimizer.lr=0.3 seed=1")


def test_a_script_whose_metrics_have_names_of_their_own_has_columns_too() -> None:
    rows = [
        trial(n, f"program.args.lr={lr}", loss=loss, acc=0.5, a=1, b=2, c=3, train_s=9)
        for n, (lr, loss) in enumerate([(1, 0.25), (2, 0.75)])
    ]
    said = text(rows, 2)
    assert "configuration      n    loss      acc     a       b       train_s" in said
    assert "program.args.lr=1  1/1  0.2500 *  0.5000  1.0000" in said
    assert "program.args.lr=2  1/1  0.7500    0.5000  1.0000" in said


def test_the_metric_that_a_search_aims_at_has_a_column_beside_the_usual_ones() -> None:
    rows = [
        trial(n, f"optimizer.lr={n}", val__accuracy=0.5, val__top5_accuracy=value) for n, value in enumerate([0.9, 0.8])
    ]
    said = text(rows, 2, "val/top5_accuracy", {"val/top5_accuracy": "maximize"})
    assert "configuration   n    val/top5_accuracy  val/accuracy" in said
    assert "optimizer.lr=0  1/1  0.9000 *           0.5000" in said


def test_a_figure_that_four_places_have_no_room_for_keeps_three_digits() -> None:
    rows = [trial(n, f"program.args.lr={n}", loss=loss) for n, loss in enumerate([2.1e-5, 3e-10])]
    assert "2.1e-05" in text(rows, 2)
    assert "3e-10 *" in text(rows, 2)
    assert views.figure("loss", 2.123e-5) == "loss 2.123e-05"
    assert views.figure("loss", 0.0) == "loss 0.0000"


def test_the_same_as_data() -> None:
    data = as_json(TRIALS, 5)
    assert (data["best"]["key"], data["best"]["direction"]) == ("key3", "maximize")
    rows = [trial(n, f"optimizer.lr={n}", loss=1.0 + n) for n in range(2)]
    assert as_json(rows, 2, "loss")["best"]["direction"] == "minimize"
    best_margin = as_json([trial(0, margin=1.0)], 1, "margin", {"margin": "minimize"})["best"]
    assert best_margin["direction"] == "minimize"
    assert [(item["n"], item["of"]) for item in data["configurations"]] == [(3, 3), (1, 2)]


def test_a_run_that_a_search_chose_twice_counts_once() -> None:
    twice = [*TRIALS[:2], dataclasses.replace(TRIALS[0], number=9)]
    (group,) = groups(twice)
    assert (group.n, group.statistics["val/accuracy"].mean) == (2, pytest.approx(0.91))


def test_a_searchs_long_numbers_are_rounded_in_the_table_and_whole_in_the_command() -> None:
    lines = text([trial(0, "optimizer.lr=0.044303752452182654", val__accuracy=0.5)], 1).splitlines()
    assert lines[3].startswith("optimizer.lr=0.0443  1/1")
    assert lines[5] == "best by val/accuracy: optimizer.lr=0.0443; trial 0 (key0)"
    assert lines[6] == "  doit train experiment=x optimizer.lr=0.044303752452182654"


def test_the_seeds_of_a_script_are_taken_together_too() -> None:
    rows = [trial(n, f"program.args.seed={n}", "program.args.lr=1", loss=1.0 + n) for n in range(3)]
    said = text(rows, 3, by="loss")
    assert "program.args.lr=1  3/3  2.0 ± 1.0" in said
    assert "best by loss: program.args.lr=1; trial 0" in said


def test_a_trial_with_a_metric_that_was_no_number_is_named_below_the_table() -> None:
    """Its last number may be the best of all."""
    rows = [trial(n, f"optimizer.lr={n}", detail="loss was NaN at step 4" if n else "", loss=1.0) for n in range(8)]
    said = text(rows, 8).splitlines()
    assert said[-6:-4] == ["trial 1 (key1): loss was NaN at step 4", "trial 2 (key2): loss was NaN at step 4"]
    assert said[-1] == "2 more trials like these"
