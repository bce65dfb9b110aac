"""Check whether a run folder holds the finished run of a key. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.core import program as programs
from pipeline.core.tables import first_of
from pipeline.evaluation import stored_report
from pipeline.keys import rank_environment
from pipeline.keys.content_key import ContentKey
from pipeline.runs import acceptance, contents
from pipeline.runs.acceptance import Acceptance
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder
from trainers.core import dependencies

VARIABLES = "variables.json"
"""File of a run folder: digests of the environment variables that ranks of cluster=local inherit from the shell."""
_UNKEYED_SHOWN = 3


def stale_because(
    folder: RunFolder, key: ContentKey, root: Path, *, sealed: bool = True, metrics_pattern: str | None = None
) -> str | None:
    """Return the reason to make the run; None if it is finished and intact.

    Args:
        root: the project.
        sealed: don't count a run that read something outside of its key (program.seal).
        metrics_pattern: program.metrics_pattern, for which the log must have been searched.

    Raises:
        UsageError: a newer Paceline wrote the folder.
    """
    folder.refuse_newer()
    stale = folder.stale_because(key.digest)
    if stale is not None and (accepted := acceptance_of(folder)) is not None:
        return acceptance.stale_because(folder, accepted, key.digest)
    return (
        stale
        or (key_lacks(folder, key) if sealed else None)
        or unread_log(folder, metrics_pattern)
        or stored_report.stale_because(folder, root)
    )


def acceptance_of(folder: RunFolder) -> Acceptance | None:
    """Return the acceptance of another run's result for this key; None if this run has a result."""
    if folder.result.exists():
        return None
    try:
        return acceptance.read(folder)
    except AlteredError:  # a damaged acceptance doesn't count: the run is trained
        return None


def unread_log(folder: RunFolder, metrics_pattern: str | None) -> str | None:
    """Return the reason to search the finished run's log for metrics again; None if there is none."""
    if metrics_pattern is None or metrics_pattern == pattern_before(folder):
        return None
    return "its log wasn't searched for program.metrics_pattern yet (nothing is trained again)"


def pattern_before(folder: RunFolder) -> str | None:
    """Return the program.metrics_pattern of the run's folder; None without one."""
    return _program(folder).get("metrics_pattern")


def key_lacks(folder: RunFolder, key: ContentKey) -> str | None:
    """Return a text that names what the finished run read outside of its key and what changed since; None: nothing.

    Returns None too for an altered result, which ``stale_because`` reports.
    """
    try:
        result = folder.read_result()
    except AlteredError:
        return None
    if result is None:
        return None
    program = _program(folder)
    if program.get("seal") == "off":  # not a part of the key
        return "it was made with program.seal=off, so nobody looked for files that its key lacks"
    others = folder.dependencies_of_other_nodes()
    record = {**(folder.read_json(run_folder.DEPENDENCIES) or {}), **({"nodes": others} if others else {})}
    changed = lacking(folder) or dependencies.changed(record, keyed=key.parts["environment"])
    if changed or not record.get("own_variables"):
        return changed
    return rank_environment.changed_variables(record, folder.read_json(VARIABLES), os.environ)


def lacking(folder: RunFolder) -> str | None:
    """Return a text that names the files that the finished run read and its key lacks; None if it is complete."""
    program = _program(folder)
    field = "program.inputs" if program.get("script") or program.get("command") else "model.inputs"
    return unkeyed([{"unkeyed": folder.unkeyed()}], field)


def _program(folder: RunFolder) -> Mapping[str, Any]:
    """Return the section ``program`` of the run's configuration."""
    return (folder.read_json(run_folder.CONFIG) or {}).get(programs.SECTION) or {}


def unkeyed(nodes: Sequence[Mapping[str, Any]], field: str = "program.inputs") -> str | None:
    """Return a text that names the files that the key lacks; None if it is complete.

    Args:
        nodes: a record of each node (summary.json for node 0), in which ``unkeyed`` maps a path to ``read`` or to how
        the program looked for it.
        field: the setting that these paths belong in.
    """
    kinds = contents.unkeyed(nodes)
    if not kinds:
        return None
    read = [name for name, how in kinds.items() if how == "read"]
    absent = [name for name, how in kinds.items() if how != "read"]
    parts = [f"{_names_were(read)} read"] if read else []
    if absent:
        are = "isn't" if len(absent) == 1 else "aren't"
        parts.append(f"{_names_were(absent)} looked for and {are} in the snapshot")
    return f"its key is not complete: {'; '.join(parts)}; {dependencies.added_to(field, [*read, *absent])}"


def _names_were(names: list[str]) -> str:
    return f"{first_of(names, _UNKEYED_SHOWN)} {'was' if len(names) == 1 else 'were'}"
