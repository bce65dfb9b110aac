from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.commands import records
from pipeline.core.errors import PacelineError, UsageError
from pipeline.evaluation import report as evaluations
from pipeline.evaluation.__main__ import serve
from pipeline.evaluation.report import evaluate
from pipeline.execution.stored_report import format_report, make, most_confused
from pipeline.runs.folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run_folder(tmp_path: Path, *, classes: list[str] | None = None, **predictions: Any) -> Path:
    (tmp_path / "data").mkdir(exist_ok=True)
    manifest = {"classes": classes or ["cat", "dog", "frog"], "synthetic": False}
    (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    outcome = {"split": "test", "targets": [0, 0, 1, 1, 2], "predictions": [0, 1, 1, 1, 2], **predictions}
    (tmp_path / "predictions.json").write_text(json.dumps(outcome))
    (tmp_path / "summary.json").write_text(json.dumps({"weights_sha256": "ab", "dataset_digest": "cd"}))
    return tmp_path


def test_the_report_holds_the_figures_of_each_class(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    report = evaluate(run, {})
    assert json.loads((run / "evaluation" / "report.json").read_text()) == report
    assert (report["accuracy"], report["n"], report["split"]) == (0.8, 5, "test")
    assert report["confusion_matrix"] == [[1, 1, 0], [0, 2, 0], [0, 0, 1]]  # rows = true class
    assert report["per_class"]["cat"] == {"precision": 1.0, "recall": 0.5, "f1-score": 2 / 3, "support": 2}
    assert report["per_class"]["dog"]["precision"] == pytest.approx(2 / 3)
    assert report["macro avg"]["recall"] == pytest.approx(2.5 / 3)
    assert report["weighted avg"]["recall"] == pytest.approx(0.8)
    assert (report["classes"], report["synthetic"]) == (["cat", "dog", "frog"], False)
    assert (report["weights_sha256"], report["dataset_digest"]) == ("ab", "cd")


def test_a_name_that_no_font_here_has_is_a_number_in_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    faces = {"DejaVu Sans": set(map(ord, "düog")), "Some": {ord("猫")}, "Other": set[int]()}
    monkeypatch.setattr(evaluations, "characters_of", faces.__getitem__)
    monkeypatch.setattr(evaluations, "installed_families", faces.keys)
    assert evaluations.drawable(["dog", "ü"]) == (["DejaVu Sans"], ["dog", "ü"])
    assert evaluations.drawable(["ü", "猫", "猫蛙"]) == (["DejaVu Sans", "Some"], ["ü", "猫", "#2"])


def test_equal_class_names_are_kept_apart(tmp_path: Path) -> None:
    report = evaluate(run_folder(tmp_path, classes=["a", "b", "a"]), {})
    assert list(report["per_class"]) == ["a (0)", "b", "a (2)"]


def test_the_trials_of_a_sweep_are_answered_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path)
    asked = [{"id": 1, "run_dir": str(run), "made_of": {"a": 1}}, {"id": 2, "run_dir": f"{run}/no", "made_of": {}}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(line)}\n" for line in asked)))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    monkeypatch.setattr("os.nice", lambda _: 0)
    assert serve() == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"id": 1, "error": None}
    assert "predictions.json is missing" in second["error"]
    assert json.loads((run / "evaluation" / "report.json").read_text())["made_of"] == {"a": 1}
    assert (run / "evaluation" / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
@pytest.mark.long
def test_the_picture_is_a_png_and_equal_for_equal_figures(tmp_path: Path) -> None:
    run = run_folder(tmp_path, classes=[f"$class_{n} {'x' * n}" for n in range(10)], targets=[0], predictions=[1])
    evaluate(run, {})
    picture = run / "evaluation" / "confusion_matrix.png"
    first = picture.read_bytes()
    width, height = struct.unpack(">II", first[16:24])
    assert first.startswith(b"\x89PNG")
    assert 500 < height < 4000
    assert 500 < width < 4000
    evaluate(run, {})
    assert picture.read_bytes() == first


def test_the_table_is_compact_and_says_synthetic(tmp_path: Path) -> None:
    report = evaluate(run_folder(tmp_path), {})
    lines = format_report(report).splitlines()
    assert lines[0] == "test accuracy 0.8000 on 5 images"
    assert lines[2] == "cat              1.0000  0.5000  0.6667        2"
    assert lines[7:] == ["most confused", "  cat taken for dog  1 of 2"]
    assert format_report({**report, "synthetic": True}).startswith("SYNTHETIC DATA: this accuracy means nothing\n")


def test_the_pairs_that_are_confused_most_often_come_first(tmp_path: Path) -> None:
    report = evaluate(run_folder(tmp_path, targets=[0, 0, 1, 1, 2, 2], predictions=[1, 0, 2, 2, 1, 2]), {})
    said = [tuple(pair.values()) for pair in most_confused(report)]
    assert said == [("dog", "frog", 2, 2), ("cat", "dog", 1, 2), ("frog", "dog", 1, 2)]
    right = evaluate(run_folder(tmp_path, targets=[0, 1, 2], predictions=[0, 1, 2]), {})
    assert most_confused(right) == []
    assert "confused" not in format_report(right)


@pytest.mark.parametrize(
    ("predictions", "message"),
    [
        ({"predictions": [0]}, "must be lists of one length, not 5 and 1"),
        ({"targets": None}, "not no list and 5"),
        ({"targets": [], "predictions": []}, "the test split is empty"),
        ({"predictions": [0, 1, 1, 1, 3]}, r"3 is no class; the data has 0\.\.2"),
        ({"targets": [0, 0, 1, 1, -1]}, "-1 is no class"),
        ({"targets": [0, 0, 1, 1, True]}, "True is no class"),
    ],
)
def test_inconsistent_predictions_are_refused(tmp_path: Path, predictions: dict[str, Any], message: str) -> None:
    run = run_folder(tmp_path, **predictions)
    with pytest.raises(PacelineError, match=message):
        evaluate(run, {})
    assert not (run / "evaluation").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("predictions.json", None, "is missing: there is nothing to evaluate yet"),
        ("predictions.json", '{"targets": [1', "is cut off or no JSON"),
        ("data/manifest.json", None, r"manifest\.json is missing"),
        ("data/manifest.json", "[]", r"holds \[\], not an object"),
    ],
)
def test_a_missing_or_torn_file_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    run = run_folder(tmp_path)
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    with pytest.raises(PacelineError, match=message) as error:
        evaluate(run, {})
    assert "\n  try: " in str(error.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "kill -9 $$",
            r"ended by SIGKILL \(by a user, or by the system where memory is short\)\n  try: the same command",
        ),
        ("exit 3", "exit code 3$"),
        ("echo no room >&2; exit 1", "no room$"),
    ],
)
def test_how_the_process_has_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PacelineError, match=f"the evaluation report of 0123456789ab failed: {said}"):
        make(RunFolder(tmp_path / "0123456789ab"), ROOT)


def test_a_run_of_a_script_is_refused_where_a_classifier_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"program": {"name": "script"}}')
    with pytest.raises(UsageError, match="is that of a script, whose network nobody here knows"):
        records.finished_classifier(RunFolder(tmp_path))
