"""What of a configuration decides its run's key and folder: all that is asked of a run that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.cluster import Cluster, Host
from pipeline.core.program import SECTION
from pipeline.data.request import Inputs
from pipeline.keys import script_files
from pipeline.keys.script_files import ScriptFiles

if TYPE_CHECKING:  # most runs name none
    from pipeline.config.step_source import StepSource

_HOSTS = ("hosts", "spares")  # of a cluster
_OF_FILES = ("script", "command", "workdir", "inputs", "outputs", "data")  # of the section of a script


class Basis(NamedTuple):
    """``resolved`` is the configuration as config.json has it, ``chosen`` are the modules of its options.

    ``cluster`` lacks the launcher's settings, which reach hosts and decide nothing. ``inputs`` are None where the data
    set's source can't be read, and of a ``script``, which takes none of our data sets. ``step`` is the one that its
    data comes from.
    """

    resolved: Mapping[str, Any]
    chosen: tuple[str, ...]
    cluster: Cluster
    inputs: Inputs | None
    runs_dir: Path
    data_dir: Path
    script: ScriptFiles | None = None
    step: StepSource | None = None


def to_json(basis: Basis) -> dict[str, Any] | None:
    """What ``from_json`` reads; None where files of this computer decide, or a step, which may be others tomorrow."""
    inputs = basis.inputs
    if basis.step is not None or any((basis.resolved.get("init") or {}).values()):
        return None
    if basis.script is None and (inputs is None or inputs.files or inputs.settings["source"] is not None):
        return None
    hosts = {name: [_flat(host) for host in getattr(basis.cluster, name)] for name in _HOSTS}
    cluster = {**_flat(basis.cluster), **hosts}
    return {
        "resolved": dict(basis.resolved),
        "chosen": [*basis.chosen],
        "cluster": cluster,
        "inputs": inputs._replace(settings=dict(inputs.settings))._asdict() if inputs is not None else None,
        "runs_dir": str(basis.runs_dir),
        "data_dir": str(basis.data_dir),
    }


def from_json(raw: Mapping[str, Any], root: Path) -> Basis:
    """The inverse. Where a script's files lie is looked up again: another may have come to its place.

    Raises:
        UsageError: they aren't there any more.
    """
    cluster, told = raw["cluster"], raw["resolved"].get(SECTION)
    hosts = {name: tuple(Host(**host) for host in cluster[name]) for name in _HOSTS}
    return Basis(
        resolved=raw["resolved"],
        chosen=tuple(raw["chosen"]),
        cluster=Cluster(**{**cluster, **hosts}),
        inputs=_inputs(raw["inputs"]) if raw["inputs"] is not None else None,
        runs_dir=Path(raw["runs_dir"]),
        data_dir=Path(raw["data_dir"]),
        script=script_files.find(root=root, **{name: told[name] for name in _OF_FILES}) if told else None,
    )


def _inputs(told: Mapping[str, Any]) -> Inputs:
    return Inputs(**{**told, "files": (), "names": (), "own": tuple(told["own"])})


def _flat(value: Cluster | Host) -> dict[str, Any]:
    """The fields, without a copy of what they hold and without the launcher's settings."""
    return {item.name: getattr(value, item.name) for item in fields(value) if item.name != "settings"}
