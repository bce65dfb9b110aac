"""Tensors of a finished run. No other module of the controller half imports torch: a notebook may lack it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor as Tensor
from torch.nn import Module as Module

from pipeline.core.errors import PacelineError
from pipeline.execution.exported import exported_file
from pipeline.runs import index
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder


def state_dict(folder: RunFolder) -> dict[str, Tensor]:
    """The final weights. Raises PacelineError: the file isn't what the run has left."""
    path = folder.path / run_folder.FINAL_WEIGHTS
    if why := index.altered_target(folder, folder.read_result(), [run_folder.FINAL_WEIGHTS]):
        raise PacelineError(f"the weights of run {folder.key} aren't those of its result: {why}")
    return cast("dict[str, Tensor]", torch.load(path, map_location="cpu", weights_only=True))


def model(folder: RunFolder) -> Module:
    """The exported network. Raises PacelineError: it can't be exported."""
    program: Any = torch.export.load(exported_file(folder))
    return cast("Module", program.module())
