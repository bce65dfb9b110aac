"""The data sets of ``dataset=NAME``: one module each, imported when used. docs/datasets.md shows how to add one."""

from __future__ import annotations

from typing import cast

from pipeline.core.options import Options
from pipeline.data.base import DatasetModule, ImageFilesConfig
from trainers.core.config import DatasetConfig

DATASETS = Options("dataset", "pipeline.data.datasets", DatasetConfig, ImageFilesConfig)


def module(name: str) -> DatasetModule:
    """Import the module of a data set. Raises UsageError for an unknown name."""
    return cast(DatasetModule, DATASETS.module(name))
