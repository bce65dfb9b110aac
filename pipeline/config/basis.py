"""What of a configuration decides its run's key and folder: all that is asked of a run that is finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.core.program import SECTION
from pipeline.data.request import Inputs
from pipeline.keys import content_key, script_files
from pipeline.keys.script_files import ScriptFiles

if TYPE_CHECKING:  # a finished run needs neither
    from pipeline.config.step_source import StepSource
    from pipeline.core.cluster import Cluster

_OF_FILES = ("script", "command", "workdir", "inputs", "outputs", "data")  # of the section of a script


class KeyParts(NamedTuple):
    """What of a configuration and its cluster decides the key, besides code and data.

    ``canonical`` and ``topology`` stand in it, ``environment`` are the versions that ``cluster.environment`` tells,
    ``python_path`` are the folders of the ranks' PYTHONPATH, where code is looked for.
    """

    canonical: Mapping[str, Any]
    topology: Mapping[str, Any]
    environment: Mapping[str, str]
    python_path: tuple[str, ...]


def key_parts(resolved: Mapping[str, Any], cluster: Cluster) -> KeyParts:
    """That of a configuration which was just built."""
    from pipeline.keys.canonical import canonical_config  # a finished run remembers what this makes

    topology = content_key.topology(cluster, content_key.shards_of(resolved))
    return KeyParts(canonical_config(resolved), topology, cluster.environment, cluster.python_path)


class Basis(NamedTuple):
    """``resolved`` is the configuration as config.json has it, ``chosen`` are the modules of its options.

    ``inputs`` are None where the data set's source can't be read, and of a ``script``, which takes none of our data
    sets. ``step`` is the one that its data comes from.
    """

    resolved: Mapping[str, Any]
    key_parts: KeyParts
    chosen: tuple[str, ...]
    inputs: Inputs | None
    runs_dir: Path
    data_dir: Path
    script: ScriptFiles | None = None
    step: StepSource | None = None


def to_json(basis: Basis) -> dict[str, Any] | None:
    """What ``from_json`` reads; None where files of this computer decide, or a step, which may be others tomorrow."""
    inputs = basis.inputs
    if basis.script is not None and basis.script.notes:  # what lies at a path in its arguments
        return None
    if basis.step is not None or any((basis.resolved.get("init") or {}).values()):
        return None
    if basis.script is None and (inputs is None or inputs.files or inputs.settings["source"] is not None):
        return None
    return {
        "resolved": dict(basis.resolved),
        "key_parts": basis.key_parts._replace(environment=dict(basis.key_parts.environment))._asdict(),
        "chosen": [*basis.chosen],
        "inputs": inputs._replace(settings=dict(inputs.settings))._asdict() if inputs is not None else None,
        "runs_dir": str(basis.runs_dir),
        "data_dir": str(basis.data_dir),
    }


def from_json(raw: Mapping[str, Any], root: Path) -> Basis:
    """The inverse. Where a script's files lie is looked up again: another may have come to its place.

    Raises:
        UsageError: they aren't there any more.
    """
    told = raw["resolved"].get(SECTION)
    return Basis(
        resolved=raw["resolved"],
        key_parts=KeyParts(**{**raw["key_parts"], "python_path": tuple(raw["key_parts"]["python_path"])}),
        chosen=tuple(raw["chosen"]),
        inputs=_inputs(raw["inputs"]) if raw["inputs"] is not None else None,
        runs_dir=Path(raw["runs_dir"]),
        data_dir=Path(raw["data_dir"]),
        script=script_files.find(root=root, **{name: told[name] for name in _OF_FILES}) if told else None,
    )


def _inputs(told: Mapping[str, Any]) -> Inputs:
    return Inputs(**{**told, "files": (), "names": (), "own": tuple(told["own"])})
