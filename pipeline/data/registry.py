"""Dataset name → module, imported on use. A new data set is one module here, one line, one YAML file."""

from __future__ import annotations

import importlib
from typing import cast

from pipeline.data.base import DatasetModule
from pipeline.errors import DataError, hint

MODULES = {
    "arrays": "pipeline.data.arrays",
    "cifar10": "pipeline.data.cifar10",
    "digits": "pipeline.data.digits",
    "mnist": "pipeline.data.mnist",
    "synthetic": "pipeline.data.synthetic",
}


def module(name: str) -> DatasetModule:
    """The module of a data set. Raises DataError for an unknown name."""
    if name not in MODULES:
        raise DataError(f"dataset={name} is not known; {hint(name, MODULES)}")
    return cast(DatasetModule, importlib.import_module(MODULES[name]))
