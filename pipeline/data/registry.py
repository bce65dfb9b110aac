"""Dataset name → module, imported on use. A new data set is one module here, one line, one YAML file."""

from __future__ import annotations

import importlib
from typing import cast

from pipeline.data.base import DatasetModule
from pipeline.errors import DataError, hint

MODULES = {
    "arrays": "pipeline.data.datasets.arrays",
    "cifar10": "pipeline.data.datasets.cifar10",
    "digits": "pipeline.data.datasets.digits",
    "mnist": "pipeline.data.datasets.mnist",
    "synthetic": "pipeline.data.datasets.synthetic",
}


def module(name: str) -> DatasetModule:
    """The module of a data set. Raises DataError for an unknown name."""
    if name not in MODULES:
        raise DataError(f"dataset={name} is not known; {hint(name, MODULES)}")
    return cast(DatasetModule, importlib.import_module(MODULES[name]))
