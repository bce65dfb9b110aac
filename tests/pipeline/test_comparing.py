"""`doit compare`: which runs are meant, what differs, and what may be said of their figures."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import compare as comparing
from pipeline.cli.commands import runs
from pipeline.comparing import comparison as tables
from pipeline.comparing.groups import grouped, read
from pipeline.core.errors import UsageError
from pipeline.runs import acceptance, index
from pipeline.runs.folder import RunFolder
from pipeline.sweep.results import with_spread
from tests.pipeline.comparing_folders import config_of, failed, swept, trained
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import key_of

pytestmark = pytest.mark.slow

ACCURACIES = {0.1: (0.90, 0.91, 0.92), 0.01: (0.80, 0.81, 0.82)}


@pytest.fixture
def compared(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> Printed:
    """What `doit compare` says."""
    monkeypatch.setenv("COLUMNS", "160")
    return partial(printed, comparing.compare)


def grid(runs_dir: Path, **more: Any) -> list[RunFolder]:
    """Two learning rates with three seeds each."""
    return [
        trained(runs_dir, seed, lr, accuracy=accuracy, **more)
        for lr, accuracies in ACCURACIES.items()
        for seed, accuracy in enumerate(accuracies)
    ]


def data(compared: Printed, runs_dir: Path, *words: str) -> dict[str, Any]:
    return json.loads(compared(runs_dir, *words, "json=1"))["data"]


def test_runs_that_differ_in_nothing_but_the_seed_are_one_configuration(tmp_path: Path, compared: Printed) -> None:
    folders = grid(tmp_path)
    found = data(compared, tmp_path, *(folder.key for folder in folders))
    assert [(group["label"], group["words"], group["n"]) for group in found["configurations"]] == [
        ("A", ["optimizer.lr=0.1"], 3),
        ("B", ["optimizer.lr=0.01"], 3),
    ]
    figure = found["configurations"][0]["statistics"]["test/accuracy"]
    assert (round(figure["mean"], 6), round(figure["std"], 6), figure["n"]) == (0.91, 0.01, 3)
    assert found["differs"]["configuration"] == [{"name": "optimizer.lr", "values": ["0.1", "0.01"]}]
    assert [found["differs"][part] for part in ("data", "environment", "topology", "hosts")] == [[]] * 4


def test_where_no_key_is_named_the_best_configuration_is_the_first(tmp_path: Path, compared: Printed) -> None:
    worse = [trained(tmp_path, seed, 0.1, accuracy=0.5 + seed / 100) for seed in range(2)]
    for seed in range(2):
        trained(tmp_path, seed, 0.01, accuracy=0.9 + seed / 100)
    chosen = data(compared, tmp_path, "optimizer=sgd")["configurations"]
    assert [(group["label"], group["words"]) for group in chosen] == [
        ("A", ["optimizer.lr=0.01"]),
        ("B", ["optimizer.lr=0.1"]),
    ]
    named = data(compared, tmp_path, worse[0].key, chosen[0]["runs"][0]["key"])
    assert named["configurations"][0]["words"] == ["optimizer.lr=0.1"]
    lines = compared(tmp_path, "optimizer=sgd").splitlines()
    assert lines[2].startswith("metric ")


def test_a_difference_is_claimed_where_welchs_interval_leaves_out_zero(tmp_path: Path, compared: Printed) -> None:
    from scipy import stats  # here: collecting the tests would take every worker a second more

    folders = grid(tmp_path, metrics={"val/loss": 0.5})
    (against,) = data(compared, tmp_path, *(folder.key[:8] for folder in folders))["against_first"]
    said = {item["metric"]: item for item in against["metrics"]}
    expected = stats.ttest_ind(ACCURACIES[0.01], ACCURACIES[0.1], equal_var=False).confidence_interval(0.95)
    assert said["test/accuracy"]["larger_than_spread"] is True
    assert (said["test/accuracy"]["low"], said["test/accuracy"]["high"]) == pytest.approx((expected.low, expected.high))
    assert said["images_per_s"]["larger_than_spread"] is False
    assert (said["val/loss"]["larger_than_spread"], said["val/loss"]["unknown"]) == (
        None,
        "no spread: all seeds came out the same",
    )
    text = compared(tmp_path, *(folder.key for folder in folders))
    assert "B against A: 1 of 4 differences larger than the spread over seeds; 1 within it, 2 without a known" in text
    assert "test/accuracy  -0.1000, from -0.1227 to -0.0773" in text
    assert tables.RULE.split(";")[0] in text.replace("\n    ", " ")


def test_a_failed_run_is_nothing_to_compare_with(tmp_path: Path, compared: Printed) -> None:
    keys = [failed(tmp_path, lr=0.5).key, *(trained(tmp_path, 0, lr, accuracy=lr).key for lr in (0.1, 0.9))]
    words = [word for group in data(compared, tmp_path, *keys)["configurations"] for word in group["words"]]
    assert words == ["optimizer.lr=0.1", "optimizer.lr=0.9", "optimizer.lr=0.5"]


@pytest.mark.parametrize(("args", "seed"), [({"lr": 1}, None), ({"seed": "{seed}"}, 3), ({"seed": 5}, 5)])
def test_the_seed_of_a_script_is_the_one_that_it_was_given(
    tmp_path: Path, compared: Printed, args: dict[str, Any], seed: int | None
) -> None:
    key = trained(tmp_path, 3, program={"args": args}).key
    assert data(compared, tmp_path, key)["configurations"][0]["runs"][0]["seed"] == seed


def test_one_seed_says_that_no_spread_is_known(tmp_path: Path, compared: Printed) -> None:
    keys = [trained(tmp_path, 0, lr, accuracy=lr).key for lr in (0.1, 0.9)]
    assert "B against A: nothing is claimed: no spread known (n = 1)" in compared(tmp_path, *keys)


def test_a_metric_of_a_script_that_was_nan_is_told_and_claims_stay(tmp_path: Path, compared: Printed) -> None:
    told = {
        "nonfinite": {"loss": {"first": "nan", "step": 2, "count": 7}, "lr": {"first": "inf", "step": 1, "count": 1}}
    }
    key = trained(tmp_path, 0, 0.1, accuracy=0.5, summary=told).key
    text = compared(tmp_path, key, trained(tmp_path, 0, 0.9, accuracy=0.9).key)
    assert "loss was NaN at step 2, 7 times (and 1 more metric)" in text
    assert index.row(RunFolder(tmp_path / key)).nonfinite.startswith("loss was NaN")
    assert "runs loss" not in text


@pytest.mark.parametrize(
    ("doubt", "said"),
    [({"summary": {"proven": False}}, "B: 2 of 2 runs unproven"), (None, "B: none of its runs is finished")],
)
def test_nothing_is_claimed_of_runs_in_doubt(
    tmp_path: Path, compared: Printed, doubt: dict[str, Any] | None, said: str
) -> None:
    good = [trained(tmp_path, seed, accuracy=0.9 + seed / 100).key for seed in range(2)]
    bad = [
        failed(tmp_path, seed, 0.2)
        if doubt is None
        else trained(tmp_path, seed, 0.2, accuracy=0.1 + seed / 100, **doubt)
        for seed in range(2)
    ]
    text = compared(tmp_path, *good, *(folder.key for folder in bad))
    assert f"B against A: nothing is claimed ({said})" in text
    if doubt is None:
        assert f"{bad[0].key}  seed 0; not finished (FAILED); training failed on a:0: loss is nan" in text


def test_a_run_that_another_was_accepted_for_is_marked(tmp_path: Path, compared: Printed) -> None:
    base, config = trained(tmp_path), config_of(0, 0.3)
    key = key_of(config)
    folder = RunFolder(tmp_path / key.short)
    folder.path.mkdir()
    (folder.path / "key.json").write_text(json.dumps({"key": key.short, "digest": key.digest, **key.parts}))
    (folder.path / "config.json").write_text(json.dumps(config))
    known = base.read_key()
    assert known is not None
    acceptance.write(folder, acceptance.by_this_user(key, known, []))
    found = data(compared, tmp_path, base.key, key.short)
    assert found["configurations"][1]["runs"][0]["state"] == "ACCEPTED"
    assert found["against_first"][0]["reservation"] == "B: 1 of 1 run accepted, not proven"


def test_nan_is_kept_flagged_and_in_no_mean(tmp_path: Path, compared: Printed) -> None:
    values = (0.3, math.nan, 0.5)
    keys = [trained(tmp_path, seed, metrics={"val/loss": value}).key for seed, value in enumerate(values)]
    assert "val/loss       0.40 ± 0.14 (n 2, 1 NaN)" in compared(tmp_path, *keys)
    (group,) = data(compared, tmp_path, *keys)["configurations"]
    assert group["statistics"]["val/loss"]["nan"] == 1
    assert [run["metrics"]["val/loss"] for run in group["runs"]] == [0.3, "NaN", 0.5]


def test_code_is_shown_as_a_diff_and_environments_by_package(tmp_path: Path, compared: Printed) -> None:
    one = trained(tmp_path)
    two = trained(tmp_path, code=b"SCALE = 2.0\n", torch="2.15.0")
    text = compared(tmp_path, one.key, two.key)
    assert "code, A → B\n  trainers/x.py changed\n" in text
    assert "\n-SCALE = 1.0\n+SCALE = 2.0\n" in text
    assert "\nenvironment  A       B\ntorch        2.14.0  2.15.0\n" in text
    assert "```diff" in compared(tmp_path, one.key, two.key, "markdown=1")


def test_words_choose_as_in_doit_runs_and_a_sweep_by_its_name(tmp_path: Path, compared: Printed) -> None:
    folders = [*grid(tmp_path), failed(tmp_path)]
    swept(tmp_path, folders[:2], ["experiment=quickstart"])

    def keys(*words: str) -> list[str]:
        found = data(compared, tmp_path, *words)["configurations"]
        return [run["key"] for group in found for run in group["runs"]]

    assert keys("sweep=tun") == keys("tun") == [folder.key for folder in folders[:2]]
    assert sorted(keys("experiment=quickstart", "seed=1")) == sorted(folders[at].key for at in (1, 4))
    assert sorted(keys("optimizer.lr=9.0")) == [folders[6].key]
    assert keys(folders[3].key[:7], folders[3].key) == [folders[3].key]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which runs? doit compare takes keys"),
        (("zzz",), "zzz: no such run under"),
        (("seed=77",), "no run under"),
        (
            ("seed=0", "metric=val/acuracy"),
            "metric=val/acuracy: none of these runs has it; did you mean test/accuracy?",
        ),
    ],
)
def test_what_can_not_be_compared_is_said(tmp_path: Path, compared: Printed, words: tuple[str, ...], said: str) -> None:
    trained(tmp_path)
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        compared(tmp_path, *words)


@pytest.mark.parametrize(("width", "tables_of_metrics"), [(60, 2), (40, 3)])
def test_no_line_of_a_table_is_wider_than_the_terminal(
    tmp_path: Path, compared: Printed, monkeypatch: pytest.MonkeyPatch, width: int, tables_of_metrics: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    folders = [*grid(tmp_path), failed(tmp_path), trained(tmp_path, 0, 0.001)]
    text = compared(tmp_path, *(folder.key for folder in folders))
    assert max(map(len, text.splitlines())) <= width
    assert text.count("\nmetric  ") == tables_of_metrics  # the columns that don't fit stand below


def test_scripts_are_compared_by_what_they_are_told(tmp_path: Path, compared: Printed) -> None:
    def script(seed: int, width: int) -> str:
        program = {"name": "script", "script": "train.py", "args": {"width": width, "seed": seed}, "command": []}
        folder = trained(tmp_path, 0, metrics={"score": width + seed / 10}, program=program)
        return folder.key

    found = data(compared, tmp_path, *(script(seed, width) for width in (8, 16) for seed in (0, 1)))
    assert [(group["words"], group["n"]) for group in found["configurations"]] == [
        (["program.args.width=8"], 2),
        (["program.args.width=16"], 2),
    ]
    assert [run["seed"] for group in found["configurations"] for run in group["runs"]] == [0, 1, 0, 1]


def test_the_same_training_counts_once_with_and_without_its_default_seed(tmp_path: Path, compared: Printed) -> None:
    def script(args: dict[str, Any] | None, score: float) -> str:
        program = {"name": "script", "script": "train.py", "args": args, "command": []}
        made = {"program": "script", "outputs_sha256": {"metrics.jsonl": str(args), "outputs.json": "a"}}
        return trained(tmp_path, 0, accuracy=score, summary=made, program=program).key

    untyped, zero = script(None, 0.5), script({"seed": 0}, 0.5)
    keys = [untyped, zero, script({"seed": 1}, 0.5)]
    (group,) = data(compared, tmp_path, *keys)["configurations"]
    assert (group["n"], [(run["key"], run["alike"]) for run in group["runs"]]) == (
        2, [(zero, [untyped]), (keys[2], [])],
    )  # fmt: skip
    text = compared(tmp_path, *keys)
    assert "1 more run came out as another one of them and counts once" in text
    assert f"seed 0; {untyped} came out the same" in text
    assert f"{zero} ({untyped} came out the same)" in compared(tmp_path, *keys, "markdown=1")
    (group,) = data(compared, tmp_path, script({"b": 1, "seed": 0}, 0.6), script({"b": 1}, 0.7))["configurations"]
    assert group["n"] == 2


def test_the_place_of_a_seed_among_arguments_makes_no_other_configuration(tmp_path: Path, compared: Printed) -> None:
    keys = [
        trained(tmp_path, 0, accuracy=number / 10, program={"name": "script", "args": args}).key
        for number, args in enumerate(({"seed": 1, "lr": 0.1}, {"lr": 0.1}, {"lr": 0.1, "seed": 2}))
    ]
    (group,) = data(compared, tmp_path, *keys)["configurations"]
    assert group["n"] == 3


def test_arguments_in_another_order_are_shown_as_the_two_orders(tmp_path: Path, compared: Printed) -> None:
    keys = [
        trained(tmp_path, 0, metrics={"score": 1.0}, program={"name": "script", "args": args}).key
        for args in ({"b": 1, "a": 2}, {"a": 2, "b": 1})
    ]
    text = compared(tmp_path, *keys)
    assert re.search(r"order\.program\.args +b, a +a, b\n", text), text


def test_a_table_for_a_paper_has_a_line_a_configuration_and_a_column_a_metric(
    tmp_path: Path, compared: Printed
) -> None:
    keys = [folder.key for folder in grid(tmp_path, metrics={"val/accuracy": 0.5})]
    assert compared(tmp_path, *keys, "markdown=1", "metric=val/accuracy,test/accuracy").splitlines()[:9] == [
        "| configuration | n | val/accuracy | test/accuracy |",
        "| --- | ---: | ---: | ---: |",
        "| A optimizer.lr=0.1 | 3 | 0.5000 ± 0 | 0.910 ± 0.010 |",
        "| B optimizer.lr=0.01 | 3 | 0.5000 ± 0 | 0.810 ± 0.010 |",
        "",
        "Mean ± sample standard deviation over seeds.",
        "",
        f"- A: {', '.join(keys[:3])}",
        f"- B: {', '.join(keys[3:])}",
    ]


@pytest.mark.parametrize(
    ("mean", "std", "said"),
    [
        (0.98833, 0.00421, "0.9883 ± 0.0042"),
        (1234.5, 21.2, "1,234 ± 21"),
        (3e-5, 1e-6, "3e-05 ± 1e-06"),
        (0.81, 0.00999999999, "0.810 ± 0.010"),
        (0.5, None, "0.5000"),
        (0.5, 0.0, "0.5000 ± 0"),
        (0.5, 7.07e-10, "0.5000 ± 7.07e-10"),
        (0.0, 1.41e308, "0.0000 ± 1.41e+308"),
    ],
)
def test_a_deviation_has_two_digits_and_its_mean_as_many(mean: float, std: float | None, said: str) -> None:
    assert with_spread(mean, std) == said


@pytest.mark.parametrize("name", ["config.json", "key.json"])
def test_an_edited_value_is_not_shown_as_if_it_were_the_runs(
    tmp_path: Path, compared: Printed, printed: Printed, reported: Printed, name: str
) -> None:
    good, bad = trained(tmp_path, 0), trained(tmp_path, 1, 0.2)
    path = bad.path / name
    path.write_text(path.read_text().replace("0.2", "0.777").replace("small_cnn", "vit"))
    text, listed = compared(tmp_path, good.key, bad.key), printed(runs.runs, tmp_path)
    page = reported(tmp_path, good.key, bad.key, "format=markdown")
    for said in (text, listed, page):
        assert "ALTERED" in said
        assert "0.777" not in said
        assert "vit" not in said
    vouched = name == "config.json"  # for what the key was taken of, key.json vouches
    assert ("\noptimizer.lr   0.1  0.2\n" in text, "\nB  ?\n" in text) == (vouched, not vouched)
    assert ("  ?  " in listed, "code, A" in text) == (not vouched, False)
    assert (bad.key in printed(runs.runs, tmp_path, "optimizer.lr=0.1")) == (not vouched)  # it may be meant
    assert bad.key in printed(runs.runs, tmp_path, "optimizer.lr=0.2")
    assert bad.key in compared(tmp_path, "optimizer.lr=0.2")
    assert (bad.key in compared(tmp_path, "optimizer.lr=0.1")) == (not vouched)
    found = index.nearest(tmp_path, index.finished_parts(tmp_path), {**read(good).parts, "data": "e" * 64})
    assert found is not None
    assert found[0] == good.key
    near = index.nearest(tmp_path, index.finished_parts(tmp_path), {**read(bad).parts, "data": "e" * 64})
    assert near is not None
    assert near[0] == good.key, "the other one is nearer, and was edited"


def test_runs_of_a_script_that_was_moved_are_found_by_its_name(
    tmp_path: Path, compared: Printed, printed: Printed
) -> None:
    run, other = (trained(tmp_path, program={"name": "script", "script": name}) for name in ("gone/a.py", "gone/b.py"))
    word = "program.script=gone/a.py"
    for said in (compared(tmp_path, word), printed(runs.runs, tmp_path, word)):
        assert (run.key in said, other.key in said) == (True, False)


def test_a_run_whose_result_was_altered_has_no_figures(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    folder.result.write_text(folder.result.read_text().replace("0.9", "1.0"))
    (group,) = grouped([read(folder)])
    assert (group.runs[0].state, group.figures, group.reservation) == (
        "ALTERED", {}, "none of its runs is finished, 1 ALTERED",
    )  # fmt: skip
