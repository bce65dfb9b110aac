"""The contents of a run folder before a launch: key, configuration, code, and a link to the data."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.errors import PacelineError
from pipeline.core.files import write_atomic, write_json
from pipeline.core.tables import first_of
from pipeline.keys.content_key import ContentKey
from trainers.contract import run_folder

_LINK = "data"
_WRITTEN_IN = (".", "attempts", "attempts/*", "evaluation", "work", "work/*", "work/*/above", "work/*/above/above")


def refuse_links(run_dir: Path) -> None:
    """Refuse links in the folder, except to the data, because writes would follow them. Raises PacelineError."""
    for path in (path for pattern in _WRITTEN_IN for path in sorted(run_dir.glob(f"{pattern}/*"))):
        if path.is_symlink() and path != run_dir / _LINK:
            raise PacelineError(
                f"{path} is a link to {path.readlink()}, where what is written into the run folder would land; a run "
                f"folder has no link but {_LINK}",
                hint=f"rm {shlex.quote(str(path))}, or what it leads to in its place, then the same command",
            )


def leads_out(path: Path, run_dir: Path) -> bool:
    """Whether a link at ``path`` or above it leads out of the run folder; the link to the data pack may."""
    top = os.path.realpath(run_dir / _LINK if path.parent == run_dir / _LINK else run_dir)
    return not Path(os.path.realpath(path)).is_relative_to(top)


def not_read(paths: Iterable[Path], run_dir: Path) -> str:
    """Return the message about files that ``leads_out`` is true for."""
    names = first_of([path.relative_to(run_dir).as_posix() for path in paths], 3)
    return f"{names}: a link leads out of the run folder, so it is not read"


class Description(NamedTuple):
    """What a run is made of.

    ``config`` is resolved (config.json), ``config_yaml`` the same as YAML. ``sources`` are exactly the files of its
    code by their paths in the snapshot, so nothing outside of the key can be imported. ``pack_path`` is the place of
    its data.
    """

    key: ContentKey
    config: Mapping[str, Any]
    config_yaml: str
    sources: Mapping[str, Path]
    pack_path: Path | None


def write_description(folder: Path, run: Description) -> None:
    """Write key.json, the configuration and the code. Raises OSError."""
    write_key(folder, run.key)
    write_config(folder, run)
    shutil.rmtree(folder / run_folder.CODE, ignore_errors=True)  # exactly the key's files
    for name, source in run.sources.items():
        write_atomic(folder / run_folder.CODE / name, source.read_bytes())


def write_key(folder: Path, key: ContentKey) -> None:
    """Write key.json, with everything that the key was computed from. Raises OSError."""
    write_json(folder / run_folder.KEY, {"key": key.short, "digest": key.digest, **key.parts})


def write_config(folder: Path, run: Description) -> None:
    """Write the resolved configuration for ranks (config.json) and for users (config.yaml). Raises OSError."""
    write_json(folder / run_folder.CONFIG, run.config)
    write_atomic(folder / run_folder.CONFIG_YAML, run.config_yaml)


def link_data(folder: Path, pack_path: Path | None) -> None:
    """Link to the data pack, if the run has one. Raises OSError."""
    if pack_path is None:
        return
    link, target = folder / "data", pack_path.resolve()
    if link.is_symlink():
        if link.readlink() == target:
            return
        link.unlink()
    link.symlink_to(target, target_is_directory=True)
