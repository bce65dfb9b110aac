import json
from pathlib import Path

import pytest

from pipeline.core.specs import State
from pipeline.tracking.description import describe, mlflow_key, progress
from pipeline.tracking.points import Point, ReadPosition, final_points, mark_of, nonfinite, read_points
from tests.pipeline import tracking_folder as folder


def test_parameters_are_what_decides_the_result_and_where_it_ran_stands_in_tags(tmp_path: Path) -> None:
    run = folder.started(
        tmp_path, sizes=[1, 2], none=None, flag=True, tracking={"uri": "http://u:pw@h"}, env={"AWS_SECRET": "x"}
    )
    key = {"key": folder.KEY, "topology": {"nnodes": 2, "nproc_per_node": [1, 1], "env": [{}, {}]}}
    folder.write(run / "key.json", key)
    about = describe(run)
    params, tags = about.params, about.tags
    assert params["optimizer.lr"] == "0.003"
    assert params["model.name"] == "small_cnn"
    assert (params["sizes"], params["none"], params["flag"]) == ("[1, 2]", "null", "true")
    assert (params["topology.nnodes"], params["topology.nproc_per_node"]) == ("2", "[1, 1]")
    assert params["env.AWS_SECRET"] == "***"
    assert not [name for name in params if name.startswith(("cluster", "tracking", "paths", "topology.env"))]
    assert tags["tracking.uri"] == "http://***@h"
    assert tags["cluster.hosts"] == '[{"name": "node0"}, {"name": "node1"}]'


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a[0]=b", "a_0_b"),
        ("x,y", "x_y"),
        ("test/accuracy", "test/accuracy"),
        ("/a//../b/", "a/b"),
        ("[]", "_"),
        ("größe", "größe"),
        ("k" * 300, "k" * 250),
    ],
)
def test_names_that_mlflow_refuses_stay_readable(name: str, key: str) -> None:
    assert mlflow_key(name) == key


def test_a_long_value_says_that_it_was_cut(tmp_path: Path) -> None:
    value = describe(folder.started(tmp_path, text="x" * 7000)).params["text"]
    assert len(value) == 6000
    assert value.endswith("… (7000 characters; the whole is in config.json)")


def test_tags_tell_commit_hosts_overrides_and_key(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.end(run)
    about = describe(run)
    assert about.name == "small_cnn digits · 0123"
    assert about.start_ms == int(folder.T0 * 1000)
    tags = about.tags
    assert tags["paceline.run_key"] == folder.KEY
    assert tags["paceline.hosts"] == "node0, node1"
    assert tags["paceline.overrides"] == "experiment=quickstart"
    assert tags["paceline.dirty"] == "true"
    assert tags["paceline.synthetic"] == "false"
    assert tags["mlflow.source.git.commit"].startswith("c0ffee")
    assert tags["mlflow.source.name"] == "doit train experiment=quickstart"
    assert tags["paceline.command"] == "doit train experiment=quickstart"
    assert tags["paceline.weights_sha256"] == "ab" * 32


def test_a_scripts_values_that_were_no_finite_numbers_are_told(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.end(run)
    folder.summary(run, nonfinite={"loss": {"first": "nan", "step": 2, "count": 1200}, "bad": 3})
    tags = describe(run).tags
    assert tags["paceline.nonfinite"] == "loss: NaN at step 2, 1,200 times"
    assert "**Not finite:** `loss` was NaN at step 2, 1,200 times." in tags["mlflow.note.content"]


def test_the_source_holds_no_slash_of_which_mlflow_would_show_only_what_follows(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    words = ["seed=2", "dataset.source=/data/c10.tar.gz", "paths.runs=/tmp/runs", "cluster=two_node", "optimizer=adam"]
    folder.write(run / "provenance.json", {"overrides": words, "command": "/usr/lib/doit/__main__.py train"})
    tags = describe(run).tags
    assert tags["mlflow.source.name"] == "doit train seed=2 optimizer=adam"
    assert tags["paceline.command"] == "__main__.py train"  # not where it is installed
    again = "doit train seed=2 dataset.source=/data/c10.tar.gz cluster=two_node optimizer=adam\n```"
    assert again in tags["mlflow.note.content"]  # whoever repeats it has runs elsewhere
    assert tags["paceline.hosts"] == "node0, node1"  # from the plan


def test_a_trial_is_called_by_what_its_sweep_varies(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.write(run / "provenance.json", {"overrides": ["experiment=quickstart", "optimizer.lr=0.1", "seed=2"]})
    assert describe(run).name == "small_cnn digits lr=0.1 seed=2 · 0123"
    sweep = {"key": "k", "name": "k", "trial": 3, "overrides": ["seed=2"]}
    folder.write(run / "sweeps.json", {"sweeps": [sweep]})
    assert describe(run).name == "seed=2 · 0123"


def test_the_data_set_is_an_input_with_digest_source_and_splits(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    assert describe(run).data is None  # no digest yet
    folder.write(run / "key.json", {"key": folder.KEY, "data": "cd" * 32})
    splits = {"train": [0, 70], "val": [70, 80], "test": [80, 100]}
    manifest = {"count": 100, "num_classes": 10, "channels": 1, "height": 8, "width": 8, "splits": splits}
    folder.write(run / "data/manifest.json", {**manifest, "source": "https://me:pw@h/digits.csv"})
    data = describe(run).data
    assert data is not None
    assert (data.name, data.digest, data.context) == ("digits", "cd" * 6, "train, val, test")
    assert json.loads(data.source) == {"uri": "https://***@h/digits.csv"}
    sizes = {"images": 100, "classes": 10, "train": 70, "val": 10, "test": 20, "sha256": "cd" * 32}
    assert json.loads(data.profile) == sizes
    (features,) = json.loads(json.loads(data.schema)["mlflow_tensorspec"]["features"])
    assert features["tensor-spec"]["shape"] == [-1, 1, 8, 8]


def test_the_page_of_a_failed_run_says_why_and_what_to_type(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    words = ["experiment=quickstart", "optimizer.lr=9 `", "cluster=two_node"]
    environments = {"node0": {"cpu_model": "EPYC", "cpus": 2}, "node1": {"gpu_models": ["H200", "H200"]}}
    folder.write(
        run / "provenance.json",
        {"overrides": words, "hosts": ["node0", "node1"], "environments": environments, "git_commit": "c0ffee" * 7},
    )
    error = "training failed on node1, rank 1: loss is NaN\n  see http://me:pw@h"
    with (run / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"state": "FAILED", "attempt": 1, "time": 1.0, "detail": error}) + "\n")
    note = describe(run, {"train/loss": "NaN at step 7"}).tags["mlflow.note.content"]
    assert note.startswith("**FAILED:**\n\n```\ntraining failed on node1, rank 1: loss is NaN\n  see http://***@h\n```")
    assert "**Not finite:** `train/loss` was NaN at step 7." in note
    assert "digits small_cnn adam, ranks unknown on node0 (EPYC, 2 cores), node1 (2 × H200)" in note
    assert "doit train experiment=quickstart 'optimizer.lr=9 `' cluster=two_node" in note
    assert "- `experiment=quickstart`\n- `` optimizer.lr=9 ` ``\n\nCommit `c0ffeec0ffee`" in note


def test_synthetic_data_shows_in_name_and_description(tmp_path: Path) -> None:
    about = describe(folder.started(tmp_path, dataset="synthetic"))
    assert about.name.endswith("(synthetic data)")
    assert about.tags["paceline.synthetic"] == "true"
    assert "means nothing" in about.tags["mlflow.note.content"]


def test_progress_is_the_last_line_of_the_journal(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    assert (progress(run).state, progress(run).ended) == (State.RUNNING, False)
    folder.journal(run, "FAILED", at=folder.T0 + 9)
    assert (progress(run).ended, progress(run).end_ms) == (True, int((folder.T0 + 9) * 1000))
    folder.journal(run, "PLANNED", "RUNNING", attempt=2)
    assert (progress(run).ended, progress(run).attempt) == (False, 2)


def test_metrics_are_read_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"t": 1.5, "step": 1, "epoch": 0, "metrics": {"train/loss": float("nan"), "note": "no number"}},
        {"t": 2.0, "step": 2, "epoch": 0, "metrics": {"train/loss": 0.5, "val/accuracy": 1}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\nnot json\n{"t": 3.0, "st', encoding="utf-8")
    chunk = read_points(path, ReadPosition(), 1000)
    assert [(p.key, p.time_ms, p.step) for p in chunk.points] == [
        ("train/loss", 1500, 1),
        ("train/loss", 2000, 2),
        ("val/accuracy", 2000, 2),
    ]
    assert path.read_bytes()[chunk.position.end_bytes :] == b'{"t": 3.0, "st'
    assert chunk.is_last
    assert read_points(path, chunk.position, 1000).points == ()
    first = read_points(path, ReadPosition(), 2)  # the second line would make three
    assert (len(first.points), first.is_last) == (1, False)
    assert len(read_points(path, first.position, 1).points) == 2  # a line is never cut
    path.write_text(json.dumps(lines[1]) + "\n", encoding="utf-8")
    assert len(read_points(path, chunk.position, 1000).points) == 2  # the file shrank: from its start
    rows = [{**lines[1], "t": 2.0 + number, "step": 2 + number} for number in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert len(read_points(path, chunk.position, 1000).points) == 18  # it shrank and grew again meanwhile


def test_a_point_is_known_by_its_lap_and_step_where_steps_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [-1, 0, 1, 0, 1, 1]
    rows = [{"t": 1.5, "step": step, "epoch": None, "metrics": {"loss": 1}} for step in steps]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    first = read_points(path, ReadPosition(), 4)
    marks = [point.mark for point in (*first.points, *read_points(path, first.position, 4).points)]
    assert marks == [(0, -1), (0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    assert [mark_of(steps[: end + 1]) for end in range(6)] == [*marks[:4], (1, 1), (2, 1)]


def test_names_that_differ_only_in_what_mlflow_refuses_stay_different_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    names = ["a|b", "a#b", "a_b", *("x" * 250 + end for end in "123")]
    path.write_text(json.dumps({"t": 1, "step": 1, "epoch": None, "metrics": dict.fromkeys(names, 1)}) + "\n")
    keys = [point.key for point in read_points(path, ReadPosition(), 9).points]
    assert keys == ["a_b", "a_b_", "a_b__", "x" * 250, "x" * 249 + "_", "x" * 248 + "__"]


@pytest.mark.parametrize("line", ['{"t": 1, "step": 9223372036854775808', '{"t": 1e300, "step": 1'])
def test_a_step_or_time_that_no_store_keeps_makes_no_sense(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + ', "epoch": null, "metrics": {"a": 1}}\n')
    assert read_points(tmp_path / "metrics.jsonl", ReadPosition(), 9).points == ()


def test_one_off_figures_stand_at_step_0_and_those_of_a_curve_at_its_end(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    assert final_points(run, ReadPosition()) == []
    folder.end(run, steps=40)
    position = ReadPosition(marks={"images_per_s": (0, 30)}, keys={"images_per_s": "images_per_s"})
    found = {point.key: (point.value, point.step, point.time_ms) for point in final_points(run, position)}
    at = int((folder.T0 + 32) * 1000)
    assert found["test/accuracy"] == (0.9, 0, at)
    assert found["test/macro_f1"] == (0.88, 0, at)
    assert found["images_per_s"] == (1234.5, 40, at)
    (run / "metrics.jsonl").write_text('{"t": 1, "step": 9, "epoch": 1, "metrics": {"test/a": 1, "val/a": 1}}\n')
    chunk = read_points(run / "metrics.jsonl", ReadPosition(), 9, tests_once=True)
    assert [point.step for point in chunk.points] == [0, 9]


def test_the_first_value_that_is_no_finite_number_is_named() -> None:
    values = [1.0, float("nan"), float("inf"), float("nan")]
    points = [Point("train/loss", value, 0, step) for step, value in enumerate(values)]
    assert nonfinite([*points, Point("lr", float("-inf"), 0, 8), Point("b", 1.0, 0, 8)]) == {
        "train/loss": "NaN at step 1",
        "lr": "infinite at step 8",
    }
