"""What of a configuration decides its run's key and folder: all that is asked of a run that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.cluster import Cluster, Host
from pipeline.data.request import Inputs
from pipeline.keys.script_files import ScriptFiles

_HOSTS = ("hosts", "spares")  # of a cluster


class Basis(NamedTuple):
    """``resolved`` is the configuration as config.json has it, ``chosen`` are the modules of its options.

    ``cluster`` lacks the launcher's settings, which reach hosts and decide nothing. ``inputs`` are None where the data
    set's source can't be read, and of a ``script``, which takes none of our data sets.
    """

    resolved: Mapping[str, Any]
    chosen: tuple[str, ...]
    cluster: Cluster
    inputs: Inputs | None
    runs_dir: Path
    data_dir: Path
    script: ScriptFiles | None = None


def to_json(basis: Basis) -> dict[str, Any] | None:
    """What ``from_json`` reads; None where files of this computer decide, which may be others tomorrow."""
    if basis.inputs is None or basis.inputs.files or basis.inputs.settings["source"] is not None:
        return None
    hosts = {name: [_flat(host) for host in getattr(basis.cluster, name)] for name in _HOSTS}
    cluster = {**_flat(basis.cluster), **hosts}
    return {
        "resolved": dict(basis.resolved),
        "chosen": [*basis.chosen],
        "cluster": cluster,
        "inputs": basis.inputs._replace(settings=dict(basis.inputs.settings))._asdict(),
        "runs_dir": str(basis.runs_dir),
        "data_dir": str(basis.data_dir),
    }


def from_json(raw: Mapping[str, Any]) -> Basis:
    """The inverse."""
    cluster = raw["cluster"]
    hosts = {name: tuple(Host(**host) for host in cluster[name]) for name in _HOSTS}
    return Basis(
        resolved=raw["resolved"],
        chosen=tuple(raw["chosen"]),
        cluster=Cluster(**{**cluster, **hosts}),
        inputs=Inputs(**{**raw["inputs"], "files": ()}),
        runs_dir=Path(raw["runs_dir"]),
        data_dir=Path(raw["data_dir"]),
    )


def _flat(value: Cluster | Host) -> dict[str, Any]:
    """The fields, without a copy of what they hold and without the launcher's settings."""
    return {item.name: getattr(value, item.name) for item in fields(value) if item.name != "settings"}
