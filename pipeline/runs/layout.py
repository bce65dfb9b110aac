"""What lies in a run's folder before it is launched: its key, configuration, code, and where its data are."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.files import write_atomic, write_json
from pipeline.keys.content_key import ContentKey
from trainers.contract import run_folder


class Description(NamedTuple):
    """What a run is made of, as its folder tells it.

    ``config`` is resolved (config.json), ``config_yaml`` the same as YAML. ``sources`` are the files of its code by
    their paths in the snapshot, and nothing else: what is not in the key cannot be imported. ``pack_path`` is where its
    data lies.
    """

    key: ContentKey
    config: Mapping[str, Any]
    config_yaml: str
    sources: Mapping[str, Path]
    pack_path: Path | None


def write_key(folder: Path, key: ContentKey) -> None:
    """key.json, which holds all that the key was taken of. Raises OSError."""
    write_json(folder / run_folder.KEY, {"key": key.short, "digest": key.digest, **key.parts})


def write_config(folder: Path, run: Description) -> None:
    """The resolved configuration, for ranks (config.json) and for people (config.yaml). Raises OSError."""
    write_json(folder / run_folder.CONFIG, run.config)
    write_atomic(folder / run_folder.CONFIG_YAML, run.config_yaml)


def write_code(folder: Path, sources: Mapping[str, Path]) -> None:
    """The code snapshot: these files and no other. Raises OSError."""
    shutil.rmtree(folder / run_folder.CODE, ignore_errors=True)
    for name, source in sources.items():
        write_atomic(folder / run_folder.CODE / name, source.read_bytes())


def link_data(folder: Path, pack_path: Path | None) -> None:
    """A link to the data pack, where the run has one. Raises OSError."""
    if pack_path is None:
        return
    link, target = folder / "data", pack_path.resolve()
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    link.symlink_to(target, target_is_directory=True)
