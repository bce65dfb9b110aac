"""Write the description of a run into its folder before a launch: its key, configuration, code and data."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from pipeline.core.files import write_atomic, write_json
from pipeline.keys.content_key import ContentKey
from pipeline.runs.folder import DESCRIBED, RunFolder
from pipeline.runs.result import why_altered
from trainers.contract import run_folder


class RunInputs(NamedTuple):
    """What a run is made from.

    Attributes:
        config: the resolved configuration, for config.json.
        config_yaml: the same as YAML.
        sources: path in the snapshot → file. Exactly the code of the key, so that nothing else can be imported.
        pack_path: the folder of the run's data; None without data.
    """

    key: ContentKey
    config: Mapping[str, Any]
    config_yaml: str
    sources: Mapping[str, Path]
    pack_path: Path | None


def prepare(folder: RunFolder, inputs: RunInputs) -> None:
    """Write key.json, configuration, code snapshot and the link to the data. Raises OSError."""
    _write_key(folder, inputs.key)
    write_config(folder, inputs)
    shutil.rmtree(folder.code, ignore_errors=True)  # files of an earlier snapshot
    for name, source in inputs.sources.items():
        write_atomic(folder.code / name, source.read_bytes())
    _link_data(folder, inputs.pack_path)


def restore(folder: RunFolder, inputs: RunInputs) -> None:
    """Rewrite the altered ones of DESCRIBED in the folder of a finished training, and the link. Raises OSError."""
    _link_data(folder, inputs.pack_path)
    recorded = folder.recorded_files()
    altered = {name for name in DESCRIBED if name not in recorded or why_altered(folder.path / name, recorded[name])}
    if run_folder.KEY in altered:
        _write_key(folder, inputs.key)
    if altered & {run_folder.CONFIG, run_folder.CONFIG_YAML} and (recorded or folder.config_altered(inputs.key)):
        write_config(folder, inputs)
    result = folder.intact_result(inputs.key)
    if run_folder.SUMMARY in altered and result is not None:
        documents.write_sealed(folder.summary, result.summary)


def write_config(folder: RunFolder, inputs: RunInputs) -> None:
    """Write the resolved configuration for ranks (config.json) and for users (config.yaml). Raises OSError."""
    write_json(folder.path / run_folder.CONFIG, inputs.config)
    write_atomic(folder.path / run_folder.CONFIG_YAML, inputs.config_yaml)


def _write_key(folder: RunFolder, key: ContentKey) -> None:
    write_json(folder.path / run_folder.KEY, {"key": key.short, "digest": key.digest, **key.parts})


def _link_data(folder: RunFolder, pack_path: Path | None) -> None:
    if pack_path is None:
        return
    link, target = folder.path / run_folder.DATA, pack_path.resolve()
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    elif link.exists():  # a copy of the run folder whose links were followed
        link.rename(link.with_name(f"{link.name}.bad"))
    link.symlink_to(target, target_is_directory=True)


def set_aside_outputs(folder: RunFolder, attempt: int) -> Path | None:
    """Move the files of a script that had ended into the folder of ``attempt``, which starts it anew.

    Otherwise the script would resume from its last checkpoint, and keep files that may be damaged or made from
    something that the key lacks. Return the place of the files; None if there are none. Raises OSError.
    """
    has_ended = folder.summary.exists() or folder.result.exists()
    paths = [folder.path / name for name in (run_folder.METRICS, *folder.program.folders)]
    if not has_ended or not any(path.is_file() for top in paths for path in (top, *top.rglob("*"))):
        return None
    place = folder.path / run_folder.ATTEMPTS / str(attempt) / "before"
    while place.exists():
        place = place.with_name(f"{place.name}-")
    place.mkdir(parents=True)
    for path in filter(Path.exists, paths):
        path.replace(place / path.name)
    return place
