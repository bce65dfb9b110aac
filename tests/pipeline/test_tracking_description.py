import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.specs import State
from pipeline.tracking.description import describe, mlflow_key, progress
from pipeline.tracking.points import final_points, read_points
from tests.pipeline import tracking_folder as folder


def test_parameters_are_the_flattened_configuration(tmp_path: Path) -> None:
    run = folder.started(
        tmp_path, sizes=[1, 2], none=None, flag=True, tracking={"uri": "http://u:pw@h"}, env={"AWS_SECRET": "x"}
    )
    params = describe(run).params
    assert params["optimizer.lr"] == "0.003"
    assert params["model.name"] == "small_cnn"
    assert params["cluster.hosts.1.name"] == "node1"
    assert (params["sizes"], params["none"], params["flag"]) == ("[1, 2]", "null", "true")
    assert params["tracking.uri"] == "http://***@h"
    assert params["env.AWS_SECRET"] == "***"


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


def test_names_that_become_equal_are_kept_apart(tmp_path: Path) -> None:
    names: dict[str, Any] = {"a=b": 1, "a,b": 2}
    run = folder.started(tmp_path, **names)
    params = describe(run).params
    assert (params["a_b"], params["a_b_"]) == ("1", "2")


def test_a_long_value_says_that_it_was_cut(tmp_path: Path) -> None:
    value = describe(folder.started(tmp_path, text="x" * 7000)).params["text"]
    assert len(value) == 6000
    assert value.endswith("… (7000 characters; the whole is in config.json)")


def test_tags_tell_commit_hosts_overrides_and_key(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.end(run)
    about = describe(run)
    assert about.name == f"quickstart-{folder.KEY}"
    assert about.start_ms == int(folder.T0 * 1000)
    tags = about.tags
    assert tags["paceline.run_key"] == folder.KEY
    assert tags["paceline.hosts"] == "node0, node1"
    assert tags["paceline.overrides"] == "experiment=quickstart"
    assert tags["paceline.dirty"] == "true"
    assert tags["paceline.synthetic"] == "false"
    assert tags["mlflow.source.git.commit"].startswith("c0ffee")
    assert tags["mlflow.source.name"] == "doit train experiment=quickstart"
    assert tags["paceline.weights_sha256"] == "ab" * 32


def test_without_an_experiment_the_name_is_model_and_data(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.write(run / "provenance.json", {"overrides": []})
    assert describe(run).name == f"small_cnn-digits-{folder.KEY}"
    assert describe(run).tags["paceline.hosts"] == "node0, node1"  # from the plan


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
    chunk = read_points(path, 0, 1000)
    assert [(p.key, p.time_ms, p.step) for p in chunk.points] == [
        ("train/loss", 1500, 1),
        ("train/loss", 2000, 2),
        ("val/accuracy", 2000, 2),
    ]
    assert chunk.bad_lines == 1
    assert path.read_bytes()[chunk.end_bytes :] == b'{"t": 3.0, "st'
    assert read_points(path, chunk.end_bytes, 1000).points == ()
    assert len(read_points(path, 0, 1).points) == 1
    path.write_text(json.dumps(lines[1]) + "\n", encoding="utf-8")
    assert len(read_points(path, chunk.end_bytes, 1000).points) == 2  # the file shrank: from its start


def test_final_figures_stand_at_the_last_step(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    assert final_points(run) == []
    folder.end(run, steps=40)
    found = {point.key: (point.value, point.step, point.time_ms) for point in final_points(run)}
    at = int((folder.T0 + 32) * 1000)
    assert found["test/accuracy"] == (0.9, 40, at)
    assert found["test/macro_f1"] == (0.88, 40, at)
    assert found["images_per_s"] == (1234.5, 40, at)
