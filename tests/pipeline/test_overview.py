from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pipeline.evaluation import report as evaluations
from pipeline.evaluation.report import Mistake, evaluate, images, worst_mistakes

pytestmark = pytest.mark.slow


def run_folder(tmp_path: Path) -> Path:
    """Six images of 2 × 2 in three colours, the last four of them the test split; image n has the value 10 n."""
    data = tmp_path / "data"
    data.mkdir()
    manifest = {"count": 6, "channels": 3, "height": 2, "width": 2, "classes": ["cat", "$dog$"], "synthetic": False}
    (data / "manifest.json").write_text(json.dumps({**manifest, "splits": {"train": [0, 2], "test": [2, 6]}}))
    (data / "images.bin").write_bytes(b"".join(bytes([10 * n] * 4 + [1] * 4 + [2] * 4) for n in range(6)))
    outcome = {"split": "test", "targets": [0, 0, 1, 1], "predictions": [0, 1, 1, 0]}
    (tmp_path / "predictions.json").write_text(json.dumps(outcome))
    lines = [{"t": 1.0, "step": n, "epoch": 1, "metrics": {"train/loss": 1.0 / n, "val/accuracy": 0.5}} for n in (1, 2)]
    lines.append({"t": 1.0, "step": 3, "epoch": 1, "metrics": {"train/loss": float("nan"), "val/loss": 1.0}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "torn")
    return tmp_path


def test_the_mistakes_are_of_the_most_frequent_confusions_in_turn() -> None:
    targets, predictions = [0, 0, 0, 0, 1, 2], [1, 1, 1, 0, 2, 2]
    assert worst_mistakes(targets, predictions, 3) == [Mistake(0, 0, 1), Mistake(4, 1, 2), Mistake(1, 0, 1)]
    assert len(worst_mistakes(targets, predictions, 99)) == 4
    assert worst_mistakes([1], [1], 9) == []


def test_the_images_of_the_mistakes_are_those_of_the_split(tmp_path: Path) -> None:
    data = run_folder(tmp_path) / "data"
    (found,) = images(data, "test", [Mistake(1, 0, 1)])
    assert (found.size, found.getpixel((0, 0))) == ((2, 2), (30, 1, 2))
    (data / "images.bin").write_bytes(b"encoded")
    assert images(data, "test", [Mistake(1, 0, 1)]) == []


@pytest.mark.parametrize("without", ["", "metrics.jsonl", "data/images.bin"])
def test_the_picture_is_a_png_equal_for_equal_runs_and_does_without_what_is_gone(tmp_path: Path, without: str) -> None:
    run = run_folder(tmp_path)
    if without:
        (run / without).unlink()
    evaluate(run, {})
    made = (run / evaluations.OVERVIEW).read_bytes()
    assert made.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", made[16:24])
    assert (width, height) == (1100, 400 if without == "data/images.bin" else 750)
    if not without:
        evaluate(run, {})
        assert (run / evaluations.OVERVIEW).read_bytes() == made
