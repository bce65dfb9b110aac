"""What MLflow is told of a published model, and the names that it takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cli.commands import records
from pipeline.core.errors import UsageError
from pipeline.runs.folder import RunFolder
from pipeline.tracking import recorder
from pipeline.tracking.mlflow.publishing import Published, environment, mlmodel, publish, refuse_names
from tests.pipeline import tracking_folder as folder
from tests.pipeline.tracking_store import client

MODEL = Published(
    key="0123456789ab",
    weights_sha256="ab" * 32,
    dataset_digest="cd" * 32,
    network="resnet18",
    dataset="cifar10",
    accuracy=0.91234,
    step=190,
    classes=("cat", "dog"),
    synthetic=True,
    standing="reproduced",
)
ABOUT = {"shape": [3, 32, 32], "classes": 2, "torch": "2.15.0+cu132", "python": "3.11.7"}


def test_the_model_file_says_what_goes_in_and_out_and_of_which_run_it_is() -> None:
    told = json.loads(mlmodel(MODEL, ABOUT, model_id="m-1", run_id="r-1"))
    (inputs,), (outputs,) = (json.loads(told["signature"][side]) for side in ("inputs", "outputs"))
    assert inputs["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 3, 32, 32]}
    assert outputs["tensor-spec"] == {"dtype": "float32", "shape": [-1, 2]}
    assert (told["model_id"], told["run_id"]) == ("m-1", "r-1")
    assert told["metadata"]["classes"] == ["cat", "dog"]
    assert told["metadata"]["paceline.weights_sha256"] == "ab" * 32
    assert told["metadata"]["paceline.step"] == "190"


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_a_model_that_is_registered_but_was_never_named_the_runs_outcome_is_that_once_published_again(
    tmp_path: Path, database: Path
) -> None:
    from pipeline.tracking.mlflow.store import ModelStore

    uri = f"sqlite:///{shutil.copy(database, tmp_path / 'mlflow.db')}"
    run_id = str(recorder.record(folder.started(tmp_path), uri, "paceline").run_id)
    store = ModelStore(uri)
    model_id = store.begin_model(store.experiment_of(run_id), run_id, "resnet18", MODEL.tags)
    store.register("digits", model_id, run_id, MODEL.tags, "")
    for _ in range(2):
        publish(tmp_path, MODEL, uri=uri, name="digits", alias=None, run_id=run_id, pythonpath="")
        outputs = client(uri).get_run(run_id).outputs.model_outputs
        assert [(item.model_id, item.step) for item in outputs] == [(model_id, 190)]


def test_a_model_of_synthetic_data_says_so_where_people_look() -> None:
    assert MODEL.tags["paceline.synthetic"] == "true"
    assert MODEL.description.startswith("**Synthetic data")
    assert (
        "resnet18 on cifar10, test accuracy 0.9123, run 0123456789ab after step 190 (reproduced)." in MODEL.description
    )


def test_the_requirements_name_versions_that_an_index_has() -> None:
    assert "torch==2.15.0\nnumpy==2.4.6\n" in environment(ABOUT, numpy="2.4.6")["requirements.txt"]


@pytest.mark.parametrize("name", ["digits", "digits 32x32", "分类.v2", "a", "x" * 200])
def test_names_of_any_language_are_taken(name: str) -> None:
    refuse_names(name, "champion")


@pytest.mark.parametrize(
    ("name", "try_this"),
    [("a/b", "name=a-b"), ("a:1", "name=a-1"), ("it's", "name=it-s"), ("", "name=digits"), (" a", "name=a"),
     ("a\nb", "name=a-b"), ("x" * 201, "name=xxx"), (".", "name=digits"), ("..", "name=digits")],
)  # fmt: skip
def test_a_name_that_an_address_cant_hold_is_refused_with_one_that_works(name: str, try_this: str) -> None:
    with pytest.raises(UsageError, match="can't be registered") as refused:
        refuse_names(name, None)
    hint = str(refused.value.hint)
    assert hint.startswith(try_this)
    refuse_names(hint.removeprefix("name="), None)


@pytest.mark.parametrize(
    ("alias", "why"), [("v1", "reserved"), ("Latest", "reserved"), ("a b", "no alias"), ("", "no alias")]
)
def test_an_alias_that_mlflow_doesnt_take_is_refused(alias: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        refuse_names("digits", alias)


def test_a_name_is_asked_for() -> None:
    with pytest.raises(UsageError, match="which name"):
        refuse_names(None, None)


def test_a_run_of_a_script_is_refused_with_what_takes_a_network_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"program": {"name": "script"}}')
    with pytest.raises(UsageError, match="is that of a script, whose network nobody here knows") as error:
        records.finished_classifier(RunFolder(tmp_path))
    assert "mlflow.pytorch.log_model takes a network of your own" in str(error.value.hint)
