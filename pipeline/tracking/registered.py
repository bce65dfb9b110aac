"""What MLflow is told of a published model: its MLmodel file, tags and description. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import UsageError

MODEL_FILE = "data/model.pt2"
EXAMPLE_FILE = "input_example.json"
SERVED_FILE = "serving_input_example.json"
METRIC = "test/accuracy"
_NAME = re.compile(r"[\w.-](?:[\w. -]{0,198}[\w.-])?")
_ALIAS = re.compile(r"[A-Za-z0-9_-]{1,255}")
_OF_A_VERSION = re.compile(r"v[0-9]+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A finished run as a model.

    Attributes:
        key: the run's; ``weights_sha256`` and ``dataset_digest`` are of its result.
        dataset: the name of its data; ``accuracy`` on the test split.
        network: the name of the model's option, ``resnet18``.
        step: the training's last.
        classes: their names, in the order of the logits.
        standing: whether somebody has made the run again, in words.
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
        """The tags by which a model is found again: with the same it is the same."""
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
    """Raises UsageError: MLflow doesn't take them, or an address of the model couldn't hold them."""
    if name is None:
        raise UsageError("which name is the model registered under?", hint="doit publish run=KEY name=NAME alias=ALIAS")
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
    """The file MLmodel, as JSON, which is YAML too. It is that of mlflow.pytorch for a model of torch.export.

    Args:
        about: what the exporter knows of the model: ``shape`` [C, H, W], ``classes`` (how many), ``torch`` and
            ``python`` (versions).
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
        "inputs": _tensor("uint8", [-1, *about["shape"]]),
        "outputs": _tensor("float32", [-1, about["classes"]]),
        "params": None,
    }
    return json.dumps(
        {
            "artifact_path": "model",
            "flavors": flavors,
            "signature": signature,
            "saved_input_example_info": {
                "artifact_path": EXAMPLE_FILE, "serving_input_path": SERVED_FILE, "type": "ndarray"
            },
            "metadata": {**model.tags, "classes": list(model.classes)},
            "model_id": model_id,
            "run_id": run_id,
        },
        indent=2,
    )  # fmt: skip


def environment(about: Mapping[str, Any], *, numpy: str) -> dict[str, str]:
    """The files beside it that say what it needs, by name."""
    requirements = f"torch=={about['torch'].partition('+')[0]}\nnumpy=={numpy}\nmlflow\n"
    python = about["python"]
    python_env = {"python": python, "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    return {"requirements.txt": requirements, "python_env.yaml": json.dumps(python_env, indent=2)}


def _tensor(dtype: str, shape: list[int]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])
