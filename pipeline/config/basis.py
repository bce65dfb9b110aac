"""What of a configuration decides its run's key and folder: all that is asked of a run that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.cluster import Cluster, Host
from pipeline.data.datasets import DATASETS
from trainers.core.config import DatasetConfig


class Basis(NamedTuple):
    """``resolved`` is the configuration as config.json has it, ``chosen`` are the modules of its options.

    ``cluster`` lacks the launcher's settings, which reach hosts and decide nothing.
    """

    resolved: Mapping[str, Any]
    chosen: tuple[str, ...]
    cluster: Cluster
    dataset: DatasetConfig
    runs_dir: Path
    data_dir: Path


def to_json(basis: Basis) -> dict[str, Any]:
    """What ``from_json`` reads."""
    cluster = {**_flat(basis.cluster), "hosts": [_flat(host) for host in basis.cluster.hosts]}
    return {
        "resolved": dict(basis.resolved),
        "chosen": [*basis.chosen],
        "cluster": cluster,
        "runs_dir": str(basis.runs_dir),
        "data_dir": str(basis.data_dir),
    }


def from_json(raw: Mapping[str, Any]) -> Basis:
    """Imports the data set's module, which finding its pack needs too. Raises UsageError: there is no such module."""
    resolved, cluster = raw["resolved"], raw["cluster"]
    section = resolved["dataset"]
    return Basis(
        resolved=resolved,
        chosen=tuple(raw["chosen"]),
        cluster=Cluster(**{**cluster, "hosts": tuple(Host(**host) for host in cluster["hosts"])}),
        dataset=DATASETS.imported_settings(section["name"])(**section),
        runs_dir=Path(raw["runs_dir"]),
        data_dir=Path(raw["data_dir"]),
    )


def _flat(value: Cluster | Host) -> dict[str, Any]:
    """The fields, without a copy of what they hold and without the launcher's settings."""
    return {item.name: getattr(value, item.name) for item in fields(value) if item.name != "settings"}
