"""Publish a finished run's final weights as an MLflow model, in a separate process.

The node half exports the model from the run's own code (trainers/exporting.py). This module logs and registers it, and
repeats no completed part.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import system_temporary_prefix
from pipeline.core.locks import held
from pipeline.core.places import HOME
from pipeline.core.processes import process
from pipeline.runs.contents import python_path
from pipeline.runs.folder import RunFolder
from pipeline.tracking.description import describe, tensor
from trainers.contract import run_folder

if TYPE_CHECKING:
    from pipeline.tracking.mlflow.store import ModelStore


_EXPORTER = HOME / "trainers" / "exporting.py"
_EXPORTED_FILE, _ABOUT_FILE = "model.pt2", "about.json"  # what it leaves
_EXPORTED = ".exported"
_FOLDER, _EXAMPLE_FILE, _SERVED_FILE = "data", "input_example.json", "serving_input_example.json"
_METRIC = "test/accuracy"
_LOCK = ".publish.lock"
_WAIT_S = 600.0
_EXPORT_S = 1800.0  # a large network on a busy host
_NAME = re.compile(r"[\w.-](?:[\w. -]{0,198}[\w.-])?")
_ALIAS = re.compile(r"[A-Za-z0-9_-]{1,255}")
_OF_A_VERSION = re.compile(r"v[0-9]+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Published:
    """The metadata of a finished run as a model.

    ``network`` is the name of the model's option (``resnet18``), ``accuracy`` on the test split, ``step`` the last one
    of the training; ``classes`` are in the order of the logits; ``standing`` tells whether the run was reproduced.
    """

    key: str
    weights_sha256: str
    dataset_digest: str
    network: str
    dataset: str
    accuracy: float
    step: int
    classes: tuple[str, ...]
    synthetic: bool
    standing: str

    @property
    def identity(self) -> dict[str, str]:
        """Tags that identify a model: equal tags mean the same model."""
        return {"paceline.run_key": self.key, "paceline.weights_sha256": self.weights_sha256}

    @property
    def tags(self) -> dict[str, str]:
        return {
            **self.identity,
            "paceline.dataset_digest": self.dataset_digest,
            "paceline.step": str(self.step),
            "paceline.synthetic": str(self.synthetic).lower(),
            "paceline.standing": self.standing,
        }

    @property
    def description(self) -> str:
        warning = "**Synthetic data: an accuracy on it means nothing.** " if self.synthetic else ""
        return (
            f"{warning}{self.network} on {self.dataset}, test accuracy {self.accuracy:.4f}, run {self.key} after step "
            f"{self.step} ({self.standing}). uint8 images "
            "[n, C, H, W] in, float32 logits [n, classes] out; normalisation is part of the model."
        )


def refuse_names(name: str | None, alias: str | None) -> None:
    """Refuse names that MLflow or an address of the model can't hold. Raises UsageError."""
    if name is None:
        raise UsageError("which name is the model registered under?", hint="doit publish KEY name=NAME alias=ALIAS")
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise UsageError(
            f"name={name!r} can't be registered: letters, digits, '_', '.', '-' and spaces inside make a name, "
            "at most 200, not of dots alone",
            hint=f"name={re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-.')[:200] or 'digits'}",
        )
    if alias is None:
        return
    if not _ALIAS.fullmatch(alias):
        raise UsageError(
            f"alias={alias!r} is no alias: letters of ASCII, digits, '_' and '-' make one", hint="alias=champion"
        )
    if alias.lower() == "latest" or _OF_A_VERSION.fullmatch(alias):
        raise UsageError(f"alias={alias} is reserved by MLflow", hint="alias=champion")


def mlmodel(model: Published, about: Mapping[str, Any], *, model_id: str, run_id: str) -> str:
    """Return the file MLmodel as JSON (which is valid YAML), like mlflow.pytorch writes it for torch.export models.

    ``about`` is the exporter's description: ``shape`` [C, H, W], ``classes`` (count), ``torch``, ``python`` (versions).
    """
    flavors = {
        "pytorch": {"model_data": "data", "pytorch_version": about["torch"], "code": None},
        "python_function": {
            "loader_module": "mlflow.pytorch",
            "data": "data",
            "config": {"device": None},
            "python_version": about["python"],
            "env": {"virtualenv": "python_env.yaml"},
        },
    }
    signature = {
        "inputs": tensor("uint8", [-1, *about["shape"]]),
        "outputs": tensor("float32", [-1, about["classes"]]),
        "params": None,
    }
    return json.dumps(
        {
            "artifact_path": "model",
            "flavors": flavors,
            "signature": signature,
            "saved_input_example_info": {
                "artifact_path": _EXAMPLE_FILE, "serving_input_path": _SERVED_FILE, "type": "ndarray"
            },
            "metadata": {**model.tags, "classes": list(model.classes)},
            "model_id": model_id,
            "run_id": run_id,
        },
        indent=2,
    )  # fmt: skip


def environment(about: Mapping[str, Any], *, numpy: str) -> dict[str, str]:
    """Return the files that declare the model's requirements, by name."""
    requirements = f"torch=={about['torch'].partition('+')[0]}\nnumpy=={numpy}\nmlflow\n"
    python = about["python"]
    python_env = {"python": python, "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    return {"requirements.txt": requirements, "python_env.yaml": json.dumps(python_env, indent=2)}


def publish(
    run_dir: Path, model: Published, *, uri: str, name: str, alias: str | None, run_id: str, pythonpath: str
) -> dict[str, Any]:
    """Publish a run's model as a version of the registered model ``name``, unless it exists already.

    Args:
        run_id: the run in MLflow, fully recorded.
        pythonpath: the ranks' PYTHONPATH after their code.

    Returns:
        ``version``, ``is_new``, ``alias_before`` (the version that had the alias before, or None), and how many of the
        ``checked`` test images ``agreed`` with the run's evaluation (both 0: the model existed before).

    Raises:
        PacelineError: the model can't be exported.
        StoreError: MLflow refused it.
    """
    from pipeline.tracking.mlflow.store import ModelStore  # late import: mlflow takes seconds

    with held(run_dir / _LOCK, timeout_s=_WAIT_S):
        store, about = ModelStore(uri), dict[str, Any]()
        version = store.version(name, model.identity)
        is_new = version is None
        if version is None:
            experiment_id = store.experiment_of(run_id)
            model_id = store.model(experiment_id, run_id, model.identity)
            if model_id is None:
                model_id, about = _sent(store, run_dir, model, experiment_id, run_id, pythonpath)
            store.link_metric(model_id, run_id, _METRIC, describe(run_dir).data)
            version = store.register(name, model_id, run_id, model.tags, model.description)
        store.link_output(version.model_id, run_id, model.step)  # an earlier call may have failed only here
        before = store.set_alias(name, alias, version.number) if alias is not None else None
    counts = {count: about.get(count, 0) for count in ("checked", "agreed")}
    return {"version": version.number, "is_new": is_new, "alias_before": before, **counts}


def _sent(
    store: ModelStore, run_dir: Path, model: Published, experiment_id: str, run_id: str, pythonpath: str
) -> tuple[str, dict[str, Any]]:
    """Export the model and send it; return its id and the exporter's description."""
    with tempfile.TemporaryDirectory(prefix=system_temporary_prefix("model")) as temporary:
        folder = Path(temporary)
        (folder / _FOLDER).mkdir()
        about = export_model(run_dir, folder / _FOLDER, pythonpath)
        model_id = store.begin_model(experiment_id, run_id, re.sub(r"[^\w-]", "_", model.network), model.tags)
        example = about["example"]
        files = {
            **environment(about, numpy=version_of("numpy")),
            "MLmodel": mlmodel(model, about, model_id=model_id, run_id=run_id),
            _EXAMPLE_FILE: json.dumps(example),
            _SERVED_FILE: json.dumps({"inputs": example}),
        }
        for file, content in files.items():
            (folder / file).write_text(content, encoding="utf-8")
        store.complete_model(model_id, folder)
    return model_id, about


def export_model(run_dir: Path, target: Path, pythonpath: str) -> dict[str, Any]:
    """Export the run's network to model.pt2 in the folder ``target``; return the exporter's description.

    Raises:
        PacelineError: torch.export fails, or the network differs from the one that the run evaluated.
    """
    code = os.pathsep.join(filter(None, (str(run_dir / run_folder.CODE), pythonpath)))
    done = process.run(
        [sys.executable, "-P", str(_EXPORTER), str(run_dir), str(target)],
        env={**os.environ, "PYTHONPATH": code, "CUDA_VISIBLE_DEVICES": ""},
        timeout_s=_EXPORT_S,
    )
    if done.code != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.code}"]
        raise PacelineError(f"the network of run {run_dir.name} can't be exported: {last[0]}")
    about = documents.read(target / _ABOUT_FILE)
    (target / _ABOUT_FILE).unlink()
    return about


def exported_file(folder: RunFolder) -> Path:
    """Return the run's network as a torch.export file, created once per weights (runs/.exported).

    Raises:
        PacelineError: as ``export_model``, or the run has no result.
    """
    result = folder.read_result()
    if result is None:
        raise PacelineError(f"run {folder.key} has no result")
    weights = str(result.fields["weights_sha256"])
    target = folder.path.parent / _EXPORTED / f"{folder.key}-{weights[:12]}.pt2"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        export_model(folder.path, Path(temporary), python_path(folder.read_json(run_folder.CONFIG) or {}))
        Path(temporary, _EXPORTED_FILE).replace(target)
    return target
