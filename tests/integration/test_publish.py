"""`doit publish`: a finished run becomes a registered model of a real store, once, and predicts as it was evaluated."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import Project

_LOAD = """
import json, sys, warnings
import mlflow, numpy, torch
from pathlib import Path
run, folder = Path(sys.argv[1]), sys.argv[2]
mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
told = json.loads((run / "data/manifest.json").read_text())
start = told["splits"]["test"][0]
shape = (told["count"], told["channels"], told["height"], told["width"])
images = numpy.fromfile(run / "data/images.bin", dtype=numpy.uint8).reshape(shape)[start : start + 10]
address = "models:/digits@champion"
client = mlflow.MlflowClient()
version = client.get_model_version_by_alias("digits", "champion")
model = client.get_logged_model(version.source.removeprefix("models:/"))
place = mlflow.artifacts.download_artifacts(address)
pyfunc = mlflow.pyfunc.load_model(address)
torches = [mlflow.pytorch.load_model(address), torch.export.load(f"{place}/data/model.pt2").module()]
print(json.dumps({
    "pyfunc": pyfunc.predict(images).argmax(1).tolist(),
    "one": pyfunc.predict(images[:1]).argmax(1).tolist(),
    "torch": [loaded(torch.from_numpy(images)).argmax(1).tolist() for loaded in torches],
    "example": list(mlflow.models.Model.load(place).load_input_example(place).shape),
    "inputs": str(pyfunc.metadata.signature.inputs),
    "tags": model.tags, "status": str(model.status), "run_id": model.source_run_id,
    "metrics": {point.key: [point.value, point.step, point.dataset_name] for point in model.metrics},
    "outputs": [[item.model_id == model.model_id, item.step] for item in
                client.get_run(version.run_id).outputs.model_outputs],
    "history": len(client.get_metric_history(version.run_id, "test/accuracy")),
    "versions": [item.version for item in client.search_model_versions("name='digits'")],
}))
"""


def _loaded(project: Project) -> dict[str, Any]:
    """What somebody with torch and mlflow alone sees of the model."""
    argv = [sys.executable, "-I", "-c", _LOAD, str(project.only_run()), str(project.folder)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=project.folder, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.ci
@pytest.mark.long
def test_a_run_is_published_once_and_the_model_says_what_its_evaluation_said(finished: Project, database: Path) -> None:
    shutil.copy(database, finished.folder)
    result = finished.result()
    words = ("publish", f"run={result['key']}", "name=digits")
    first = finished.doit(*words, "alias=champion")
    assert first.returncode == 0, first.stdout
    assert f"{result['key']} registered as digits version 1 (not made again yet)" in first.stdout
    assert "100 of 100 test images come out as in the run's evaluation" in first.stdout
    again = finished.doit(*words, "alias=champion")
    assert "was there already, registered as digits version 1" in again.stdout, again.stdout
    seen = _loaded(finished)
    evaluated = json.loads((finished.only_run() / "predictions.json").read_text())["predictions"][:10]
    assert seen["pyfunc"] == evaluated
    assert seen["one"] == evaluated[:1]
    assert seen["torch"] == [evaluated, evaluated]
    assert seen["example"] == [1, 1, 8, 8]
    assert "uint8" in seen["inputs"]
    assert seen["tags"].items() >= {
        "paceline.run_key": result["key"],
        "paceline.weights_sha256": result["weights_sha256"],
        "paceline.dataset_digest": result["dataset_digest"],
        "paceline.step": str(result["steps"]),
    }.items()  # fmt: skip
    assert seen["status"] == "READY"
    assert seen["metrics"] == {"test/accuracy": [result["metrics"]["test/accuracy"], 0, "digits"]}
    assert seen["outputs"] == [[True, result["steps"]]]
    assert seen["history"] == 1
    assert seen["versions"] == [1]


@pytest.mark.ci
@pytest.mark.long
def test_a_run_that_is_missing_unfinished_or_altered_and_a_server_that_is_down_are_told(finished: Project) -> None:
    missing = finished.doit("publish", "run=000000", "name=digits")
    assert (missing.returncode, "no such run" in missing.stdout) == (3, True), missing.stdout
    key = finished.result()["key"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        down = finished.doit(
            "publish", f"run={key}", "name=digits", f"tracking.uri=http://127.0.0.1:{taken.getsockname()[1]}"
        )
    assert (down.returncode, "is not published: it isn't recorded in MLflow" in down.stdout) == (1, True), down.stdout
    final = finished.only_run() / "checkpoints" / "final.pt"
    final.write_bytes(final.read_bytes()[:-1] + b"x")
    altered = finished.doit("publish", f"run={key}", "name=digits")
    assert altered.returncode == 1
    assert "no longer says what its files are (checkpoints/final.pt" in altered.stdout, altered.stdout
    (finished.only_run() / "result.json").unlink()
    unfinished = finished.doit("publish", f"run={key}", "name=digits")
    assert (unfinished.returncode, "isn't finished, so it has no final weights" in unfinished.stdout) == (3, True)
