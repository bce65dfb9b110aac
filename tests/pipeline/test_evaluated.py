"""The confusion matrix and the misclassified images of a page's best run."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.comparing import evaluated, reading
from tests.pipeline.comparing_folders import trained

REPORT = {
    "split": "test", "n": 4, "accuracy": 0.5, "classes": ["cat", "<dog>"], "per_class": {"cat": {}, "<dog>": {}},
    "confusion_matrix": [[1, 2], [0, 1]],
}  # fmt: skip
MANIFEST = {"count": 4, "channels": 1, "height": 2, "width": 2, "splits": {"test": [0, 4]}}


def test_a_page_has_the_matrix_and_the_images_of_the_best_run(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    run = reading.read(folder)
    (folder.path / "evaluation").mkdir(exist_ok=True)
    (folder.path / "evaluation/report.json").write_text(json.dumps(REPORT))
    (folder.path / "predictions.json").write_text(json.dumps({"targets": [0, 0, 0, 1], "predictions": [0, 1, 1, 1]}))
    data = folder.path / "data"
    data.mkdir()
    (data / "manifest.json").write_text(json.dumps(MANIFEST))
    (data / "images.bin").write_bytes(bytes(range(16)))
    found = evaluated.of_run(run)
    assert found is not None
    assert (found.split, found.n) == ("test", 4)
    assert "images by true and predicted: 4 cells" in found.matrix
    assert "&lt;dog&gt;" in found.matrix
    assert "<dog>" not in found.matrix
    assert [(pair.text, pair.count, pair.of) for pair in found.confused] == [("cat taken for <dog>", 2, 3)]
    assert [(one.true, one.predicted) for one in found.pictures] == [("cat", "<dog>")] * 2
    assert all(one.address.startswith("data:image/png;base64,") for one in found.pictures)
    (data / "images.bin").unlink()
    again = evaluated.of_run(run)
    assert again is not None
    assert again.pictures == ()
    (folder.path / "evaluation/report.json").write_text("{}")
    assert evaluated.of_run(run) is None
