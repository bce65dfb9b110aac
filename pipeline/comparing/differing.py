"""Differences between groups of runs, part by part, and which figures differ by more than seeds do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.comparing.groups import (
    Group,
    MeanDifference,
    difference,
    differing_fields,
    field_value,
    flat_config,
    metrics_of,
    shown,
)
from pipeline.comparing.reading import ComparedRun
from pipeline.core.files import sha256_bytes
from pipeline.core.redact import hide
from pipeline.core.tables import file_size
from pipeline.keys.content_key import flat
from pipeline.runs.folder import leads_out
from trainers.contract import run_folder

PARTS = ("configuration", "data", "environment", "topology", "hosts")
_OF_HOST = ("cpus", "cpu_model", "gpus", "gpu_models", "gpu_driver", "torch", "python")  # facts shown per host
_DIGEST = 12  # characters shown


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """A field and its value in each group."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """A code file that was ``added``, ``removed`` or ``changed``; ``diff`` holds the lines of a unified diff."""

    path: str
    change: str
    diff: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Against:
    """A group compared with the first group.

    ``code`` are the differing files; ``differences`` are those of means that both groups have, unless ``reservation``
    (usually '') forbids claims.
    """

    label: str
    code: tuple[FileChange, ...]
    differences: tuple[MeanDifference, ...]
    reservation: str = ""

    def difference(self, metric: str) -> MeanDifference | None:
        return next((one for one in self.differences if one.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of groups of runs. ``parts`` maps each of PARTS to the fields that differ."""

    groups: tuple[Group, ...]
    metrics: tuple[str, ...]
    against: tuple[Against, ...]
    parts: Mapping[str, tuple[FieldRow, ...]] = field(default_factory=dict)


def compare(groups: Sequence[Group], wanted: Sequence[str] = ()) -> Comparison:
    """Compare every group with the first; ``wanted`` selects metrics (empty: all). Reads code snapshots."""
    firsts = [group.first for group in groups]
    fields = differing_fields(firsts)
    parts = {
        "configuration": _rows(fields, [flat_config(run) for run in firsts]),
        "data": _differing(
            [{"digest": str(data)[:_DIGEST]} if (data := run.parts.get("data")) else {} for run in firsts]
        ),
        "environment": _differing([_flat(run, "environment") for run in firsts]),
        "topology": _differing([_flat(run, "topology") for run in firsts]),
        "hosts": _differing([_hosts(group) for group in groups]),
    }
    metrics = tuple(name for name in metrics_of(groups) if not wanted or name in wanted)
    against = tuple(_against(groups[0], group, metrics) for group in groups[1:])
    return Comparison(groups=tuple(groups), metrics=metrics, against=against, parts=parts)


def _against(first: Group, group: Group, metrics: Sequence[str]) -> Against:
    compared = []
    for name in metrics:
        one, two = first.figures.get(name), group.figures.get(name)
        if one is not None and two is not None and one.over is not None and two.over is not None:
            compared.append(difference(name, one.over, two.over))
    doubts = "; ".join(f"{item.label}: {item.reservation}" for item in (first, group) if item.reservation)
    code = code_changes(first.first, group.first)
    return Against(label=group.label, code=code, differences=tuple(compared), reservation=doubts)


# ---------------------------------------------------------------------------------------------- parts
def _flat(run: ComparedRun, part: str) -> dict[str, Any]:
    value = run.parts.get(part)
    return dict(flat(value)) if isinstance(value, Mapping) and value else {}


def _hosts(group: Group) -> dict[str, Any]:
    """Collect the hosts of a group's runs and their properties, each value once."""
    # Dictionaries serve as ordered sets: values appear in the order of the runs.
    facts_by_name: dict[str, dict[str, None]] = {}
    for run in group.runs:
        if run.hosts:
            facts_by_name.setdefault("names", {})[", ".join(run.hosts)] = None
        for facts in run.environments.values():
            for name in _OF_HOST:
                if facts.get(name) not in (None, "", []):
                    facts_by_name.setdefault(name, {})[hide(shown(facts[name]))] = None
        if run.provenance.get("git_commit"):
            dirty = " with changes" if run.provenance.get("git_dirty") else ""
            facts_by_name.setdefault("commit", {})[f"{str(run.provenance['git_commit'])[:10]}{dirty}"] = None
    return {name: "; ".join(values) for name, values in facts_by_name.items()}


def _differing(known: Sequence[Mapping[str, Any]]) -> tuple[FieldRow, ...]:
    """Return the fields that differ between groups with known values."""
    recorded = [values for values in known if values]
    names = sorted({name for values in recorded for name in values})
    return _rows([name for name in names if len({repr(values.get(name)) for values in recorded}) > 1], known)


def _rows(names: Sequence[str], known: Sequence[Mapping[str, Any]]) -> tuple[FieldRow, ...]:
    """Return a row per field; a group without known values (altered) shows question marks."""
    return tuple(
        FieldRow(name=name, values=tuple(shown(field_value(values, name)) if values else "?" for values in known))
        for name in names
    )


# ----------------------------------------------------------------------------------------------- code
def code_changes(first: ComparedRun, second: ComparedRun) -> tuple[FileChange, ...]:
    """Return the code files that differ between two runs' snapshots; empty if a run's code is unknown."""
    if "code" not in first.parts or "code" not in second.parts:
        return ()
    before, after = (code if isinstance(code := run.parts["code"], Mapping) else {} for run in (first, second))
    same_rules = first.parts.get("version") == second.parts.get("version")
    changes = []
    for path in sorted(before.keys() | after.keys()):
        if same_rules and before.get(path) == after.get(path):
            continue
        old, new = _lines(first, path, before), _lines(second, path, after)
        if old != new or same_rules:
            change = "added" if path not in before else "removed" if path not in after else "changed"
            diff = difflib.unified_diff(old, new, f"{first.key}/{path}", f"{second.key}/{path}", lineterm="")
            changes.append(FileChange(path=path, change=change, diff=tuple(diff)))
    return tuple(changes)


def _lines(run: ComparedRun, path: str, known: Mapping[str, Any]) -> list[str]:
    """Return the lines of a snapshot file; empty if the run has no such file or the snapshot lost it.

    Of a file that is no text, its size and digest are one line.
    """
    place = run.folder / run_folder.CODE / path
    if path not in known or leads_out(place, run.folder):  # an altered key.json may contain any path
        return []
    try:
        content = place.read_bytes()
        if b"\0" in content:
            return [f"(no text: {file_size(len(content))}, sha256 {sha256_bytes(content)[:12]})"]
        return [hide(line) for line in content.decode(errors="replace").splitlines()]
    except OSError:
        return ["(the run's folder has this file no more)"]
