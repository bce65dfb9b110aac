"""Read a run's folder once for comparisons. The result contains no secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.overrides.torchrun_line import line_of
from pipeline.core import documents
from pipeline.core.places import REPRODUCTIONS
from pipeline.core.printable import printable, shell_line
from pipeline.core.redact import hide, without_secrets
from pipeline.core.specs import State
from pipeline.keys.content_key import canonical_config
from pipeline.runs import acceptance, index, journal
from pipeline.runs.contents import nodes_of, overrides_in
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError, Result
from pipeline.steps.step_folders import PastStep, past_step
from trainers.contract import run_folder

SPEEDS = ("images_per_s", "train_s")
"""Figures of a result that are no metrics but are compared like metrics."""
_PARTS = ("version", "config", "code", "data", "environment", "topology")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run to compare.

    Attributes:
        digest: the full digest of its key.
        state: as shown by `doit runs`; only FINISHED and ACCEPTED runs have figures.
        what: the run in three words.
        reservation: why nothing may be claimed about its figures (unproven, accepted, unverified, unfinished), or ''.
        parts: the key's parts: config (canonical), code, data, environment, topology; empty if altered.
        figures: metrics of the result by name, including NaN and infinite ones, with SPEEDS.
        failure: the first line of the reason of a failure, or ''.
        nodes: those of plan.json.
        verdict: the latest result of `doit reproduce`, or None.
        made_with: the user-defined step that its data comes from, or None.
        nonfinite: a script's metric that was NaN or infinite, and how often, or ''.
    """

    key: str
    digest: str
    state: str
    what: str
    reservation: str
    folder: Path
    parts: Mapping[str, Any]
    figures: Mapping[str, float]
    failure: str
    overrides: tuple[str, ...]
    provenance: Mapping[str, Any]
    nodes: tuple[Mapping[str, Any], ...]
    unix_time: float
    verdict: Mapping[str, Any] | None = None
    weights_sha256: str | None = None
    synthetic: bool = False
    made_with: PastStep | None = None
    nonfinite: str = ""

    @property
    def counts(self) -> bool:
        """True if its figures count in means: it is finished, or accepted by the user."""
        return self.state in (State.FINISHED, index.ACCEPTED)

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that decides the run."""
        config = self.parts.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def seed(self) -> Any:
        """The seed; a script's own seed takes precedence over Paceline's, which it only receives through {seed}."""
        script = self.config.get("program")
        args = script.get("args") if isinstance(script, Mapping) else None
        if isinstance(args, Mapping) and args.get("seed", "{seed}") != "{seed}":
            return args["seed"]
        return self.config.get("seed")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes, by node rank."""
        recorded = self.provenance.get("hosts")
        hosts = recorded if isinstance(recorded, list) else [node.get("host") for node in self.nodes]
        return tuple(map(str, hosts))

    @property
    def environments(self) -> dict[str, Mapping[str, Any]]:
        """The probe's facts about each host, by name."""
        recorded = self.provenance.get("environments")
        pairs = recorded.items() if isinstance(recorded, Mapping) else ()
        return {str(name): facts if isinstance(facts, Mapping) else {} for name, facts in pairs}

    @property
    def command(self) -> str:
        """The command line for the run."""
        return command_line("train", self.overrides)


def verdict_of(folder: RunFolder) -> dict[str, Any] | None:
    """Return the latest result of `doit reproduce`, or None."""
    return documents.read_or_none(folder.path.parent / REPRODUCTIONS / folder.key / "verdict.json")


def command_line(verb: str, words: Sequence[str], place_of_runs: Sequence[str] = ()) -> str:
    """Return a command, for a script as one types it.

    The overrides of paths, which mean nothing elsewhere, are left out, apart from ``place_of_runs``.
    """
    kept = [word for word in words if not word.lstrip("+").startswith("paths.")]
    line = line_of(kept) if verb == "train" else None
    verb, *others = [verb, *kept] if line is None else line
    return shell_line(["doit", verb, *place_of_runs, *others])


def read(folder: RunFolder) -> ComparedRun:
    """Read the folder. Raises OSError: there is no such folder."""
    row = index.row(folder)
    if row.state == State.FINISHED and (
        why := index.altered_target(folder, folder.read_result(), (run_folder.METRICS,))  # its curves
    ):
        row = replace(
            row, state=index.ALTERED, note=f"{why}; the command that started it makes it again", accuracy=None
        )
    altered, counts = row.state == index.ALTERED, row.state in (State.FINISHED, index.ACCEPTED)
    known = index.intact_parts(folder) if altered else folder.read_json(run_folder.KEY) or {}
    provenance = folder.read_json(run_folder.PROVENANCE) or {}
    result = _result(folder) if counts else None
    config = {} if altered else folder.read_json(run_folder.CONFIG) or {}
    entries = journal.read(folder.journal)
    return ComparedRun(
        key=folder.key,
        digest=str(known.get("digest", folder.key)),
        state=row.state,
        what=row.what,
        reservation=_reservation(row),
        folder=folder.path,
        parts=_parts(known, config),
        figures=_figures(result),
        failure=printable(hide(entries[-1].first_line)) if entries and not counts else "",
        overrides=tuple(map(hide, overrides_in(provenance))),
        provenance={name: hide(value) if isinstance(value, str) else value for name, value in provenance.items()},
        nodes=tuple(nodes_of(folder.read_json(run_folder.PLAN) or {})),
        unix_time=row.unix_time,
        verdict=verdict_of(folder),
        weights_sha256=None if result is None else result.fields.get("weights_sha256"),
        synthetic=row.synthetic,
        made_with=past_step(folder, config),
        nonfinite=row.nonfinite,
    )


def _result(folder: RunFolder) -> Result | None:
    try:
        return acceptance.result_or_accepted(folder)[0]
    except AlteredError:
        return None


def _reservation(row: index.RunRow) -> str:
    """Return the reservation in words, for the end of a line."""
    if row.state == index.ALTERED:
        return f"{row.state}: {row.note}"
    if row.state not in (State.FINISHED, index.ACCEPTED):
        return f"not finished ({row.state})"
    return row.note


def _parts(known: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: known[name] for name in _PARTS if name in known}
    recorded = parts.get("config")
    return {**parts, "config": without_secrets(recorded if isinstance(recorded, dict) else canonical_config(config))}


def _figures(result: Result | None) -> dict[str, float]:
    if result is None:
        return {}
    speeds = {name: getattr(result, name) for name in SPEEDS}
    return {**result.metrics, **{name: value for name, value in speeds.items() if value is not None}}
