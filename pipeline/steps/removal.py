"""Find and remove folders and logs of steps that nothing needs any more."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.locks import FileLock
from pipeline.data import trees
from pipeline.data.manifest import STAMPS, origin_of
from pipeline.steps import store
from pipeline.steps.graph import Graph, earlier_of
from pipeline.steps.step import PREFIX

_FOLDER = re.compile(r".+-[0-9a-f]{12}")


def idle(graph: Graph, data_dir: Path) -> tuple[dict[Path, str], dict[Path, str]]:
    """Return the removable paths, and the remaining folders; both with the reason.

    A folder stays if it is up to date, if a data pack, a remaining step or a script's data came from it, or if that
    can't be decided. A folder with a damaged step.json would be recreated, so it is removable, as are logs of failed
    steps.
    """
    steps = store.steps_dir(graph.runs_dir)
    made = {path: record for name in _names(graph) for path, record in earlier_of(graph.runs_dir, name)}
    packed = {path for path in made if any(origin.is_relative_to(path) for origin in _origins(data_dir))}
    stays = {path: why for path, record in made.items() if (why := _why_stays(graph, path, record, path in packed))}
    # A folder that stays keeps the folders it was made from, so repeat until nothing is added.
    while more := {path: why for path in made if path not in stays and (why := _needed_by(path, made, stays))}:
        stays |= more
    going = {path: "nothing needs it" for path in made if path not in stays}
    damaged = (path for path in sorted(steps.glob("*")) if _FOLDER.fullmatch(path.name) and path.is_dir())
    going |= {path: "its step.json is gone or damaged" for path in damaged if store.record_of(path) is None}
    making = {path for path, _ in store.under_way(graph.runs_dir)}
    logs = (path for path in sorted(steps.glob("*.log")) if _FOLDER.fullmatch(path.stem) and path not in making)
    return going | dict.fromkeys(logs, "the log of a failed step"), stays


def remove(path: Path) -> bool:
    """Remove a folder or a log; False if a command is using it. Raises OSError."""
    lock = FileLock(store.lock_of(path.with_suffix("")))
    if not lock.take():
        return False
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        lock.path.unlink(missing_ok=True)
    finally:
        lock.release()
    return True


def _names(graph: Graph) -> set[str]:
    """Return all steps that were ever run, including those no longer declared."""
    folders = store.steps_dir(graph.runs_dir).glob("*/" + store.RECORD)
    return {path.parent.name.rpartition("-")[0] for path in folders if not path.parent.name.startswith(".")}


def _origins(data_dir: Path) -> list[Path]:
    """Return the origins of all data packs, and the link targets of all script data."""
    origins = (origin_of(path.parent) for path in data_dir.glob(f"*/{STAMPS}"))
    return [*(origin for origin in origins if origin is not None), *trees.sources(data_dir)]


def _why_stays(graph: Graph, path: Path, record: dict[str, Any], is_packed: bool) -> str:
    if is_packed:
        return "a data pack was made of it"
    name = str(record["name"])
    if name not in graph.names():
        return ""
    try:
        standing = graph.standing(name)
    except UsageError:
        return "it can't be told whether it is up to date: doit step"
    if standing.key is None:
        return f"it can't be told whether it is up to date: {standing.why[0]}"
    return "it is up to date" if store.folder_of(graph.runs_dir, standing.step, standing.key) == path else ""


def _needed_by(path: Path, made: dict[Path, dict[str, Any]], stays: dict[Path, str]) -> str:
    """Name a remaining step that used this step's outputs; '' if none did."""
    own = {f"{PREFIX}{made[path]['name']}/{name}": sha256 for name, sha256 in made[path]["files"].items()}
    for other in stays:
        data: dict[str, str] = (made[other].get("parts") or {}).get("data") or {}
        if any(own.get(label) == sha256 for label, sha256 in data.items()):
            return f"{other.name} was made of it"
    return ""
