"""Tensors of a finished run. No other module of the controller half imports torch: a notebook may lack it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor as Tensor
from torch.nn import Module as Module

from pipeline.core.errors import PacelineError
from pipeline.runs import index
from pipeline.runs.contents import python_path
from pipeline.runs.folder import RunFolder
from pipeline.tracking.mlflow.publishing import EXPORTED_FILE, export_model
from trainers.contract import run_folder

_EXPORTED = ".exported"


def state_dict(folder: RunFolder) -> dict[str, Tensor]:
    """The final weights. Raises PacelineError: the file isn't what the run has left."""
    path = folder.path / run_folder.FINAL_WEIGHTS
    if why := index.altered_target(folder, folder.read_result(), [run_folder.FINAL_WEIGHTS]):
        raise PacelineError(f"the weights of run {folder.key} aren't those of its result: {why}")
    return cast("dict[str, Tensor]", torch.load(path, map_location="cpu", weights_only=True))


def model(folder: RunFolder) -> Module:
    """The exported network. Raises PacelineError: it can't be exported."""
    path = exported(folder)
    program: Any = torch.export.load(path)
    return cast("Module", program.module())


def exported(folder: RunFolder) -> Path:
    """The run's network as a file of torch.export, made once for its weights. Raises PacelineError."""
    result = folder.read_result()
    if result is None:
        raise PacelineError(f"run {folder.key} has no result")
    target = folder.path.parent / _EXPORTED / f"{folder.key}-{str(result.fields['weights_sha256'])[:12]}.pt2"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        export_model(folder.path, Path(temporary), python_path(folder.read_json(run_folder.CONFIG) or {}))
        Path(temporary, EXPORTED_FILE).replace(target)
    return target
