"""The runs of a comparison as read from their folders, the groups of runs that differ only in the seed, and the
difference of two groups' means with its confidence interval.

The interval is B. L. Welch's (Biometrika 34, 1947, 28-35) with the degrees of freedom of F. E. Satterthwaite
(Biometrics Bulletin 2, 1946, 110-114)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.overrides.script_line import line_of
from pipeline.core import documents
from pipeline.core.places import REPRODUCTIONS
from pipeline.core.printable import printable, shell_line
from pipeline.core.redact import hide, without_secrets
from pipeline.core.specs import State
from pipeline.core.tables import counted
from pipeline.keys.content_key import ORDER, canonical_config, flat, is_reordered, names_in_order
from pipeline.reproduction.compare import is_time
from pipeline.runs import acceptance, index, journal, metrics_file
from pipeline.runs.contents import hosts_of, nodes_of, overrides_in, short_field_names, short_value
from pipeline.runs.folder import RunFolder
from pipeline.runs.index import ALTERED, RunRow
from pipeline.runs.result import AlteredError, Result
from pipeline.steps.step_folders import PastStep, past_step
from pipeline.sweep.results import SEEDS, Statistic, statistic
from trainers.contract import run_folder

SPEEDS = ("images_per_s", "train_s")
"""Figures of a result that are no metrics but are compared like metrics."""
_ARGS = "program.args"
_ORDER_OF_ARGS = f"{ORDER}.{_ARGS}"
_PARTS = ("version", "config", "code", "data", "environment", "topology")


@dataclass(frozen=True, kw_only=True)
class ComparedRun(RunRow):
    """One run to compare: what `doit runs` shows, and more of its folder. ``figures`` is empty unless it ``counts``."""

    digest: str  # the full digest of its key
    reservation: str  # why nothing may be claimed about its figures (unproven, accepted, unverified, unfinished), or ''
    folder: Path
    parts: Mapping[str, Any]  # the key's parts: config (canonical), code, data, environment, topology; empty if altered
    failure: str  # the first line of the reason of a failure, or ''
    overrides: tuple[str, ...]
    provenance: Mapping[str, Any]
    planned_nodes: tuple[Mapping[str, Any], ...]  # the nodes in plan.json
    verdict: Mapping[str, Any] | None = None  # the latest result of `doit reproduce`, or None
    weights_sha256: str | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)  # output file → digest, without metrics.jsonl
    alike: tuple[str, ...] = ()  # keys of runs of its group with equal results, which were merged into this one
    made_with: PastStep | None = None  # the user-defined step that made its data, or None

    @property
    def counts(self) -> bool:
        """True if the run's figures count in means: it is finished, or accepted by the user."""
        return self.state in (State.FINISHED, index.ACCEPTED)

    @property
    def repeated(self) -> str:
        """Which runs had equal results and count once together with this one, in words; or ''."""
        return f"{', '.join(self.alike)} came out the same" if self.alike else ""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that decides the run."""
        config = self.parts.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def seed(self) -> Any:
        """The seed: the script's own argument, if it has one; else Paceline's, which a script receives by {seed}."""
        script = self.config.get("program")
        args = script.get("args") if isinstance(script, Mapping) else None
        if isinstance(args, Mapping) and args.get("seed", "{seed}") != "{seed}":
            return args["seed"]
        return self.config.get("seed")

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


def _outputs(result: Result | None) -> dict[str, str]:
    digests = {} if result is None else dict(result.fields.get("outputs_sha256") or {})
    return {name: digest for name, digest in digests.items() if name != run_folder.METRICS}


def command_line(verb: str, words: Sequence[str], runs_dir_words: Sequence[str] = ()) -> str:
    """Return a command to copy, without the ``words`` that set paths: these mean nothing on another computer.
    ``runs_dir_words``: words about paths that are kept."""
    kept = [word for word in words if not word.lstrip("+").startswith("paths.")]
    line = line_of(kept) if verb == "train" else None  # a script's run as the user types it: doit run train.py
    verb, *others = [verb, *kept] if line is None else line
    return shell_line(["doit", verb, *runs_dir_words, *others])


def read(folder: RunFolder) -> ComparedRun:
    """Read a run's folder. Raises OSError: there is no such folder."""
    row = index.row(folder)
    # lists trust metrics.jsonl by its stamp; curves must be the run's own
    if row.state == State.FINISHED:
        why = index.altered_target(folder, folder.read_result(), (run_folder.METRICS,))
        if why:
            note = f"{why}; the command that started it makes it again"
            row = replace(row, state=index.ALTERED, note=note, accuracy=None)
    altered, counts = row.state == index.ALTERED, row.state in (State.FINISHED, index.ACCEPTED)
    key_json = index.intact_parts(folder) if altered else folder.read_json(run_folder.KEY) or {}
    provenance = folder.read_json(run_folder.PROVENANCE) or {}
    config = {} if altered else folder.read_json(run_folder.CONFIG) or {}
    parts = {name: key_json[name] for name in _PARTS if name in key_json}
    decisive = parts["config"] if isinstance(parts.get("config"), dict) else canonical_config(config)
    entries, plan = journal.read(folder.journal), folder.read_json(run_folder.PLAN) or {}
    result = None
    with suppress(AlteredError):
        result = acceptance.result_or_accepted(folder)[0] if counts else None
    speeds = {name: getattr(result, name) for name in SPEEDS if getattr(result, name, None) is not None}
    recorded = provenance.get("hosts")
    shared = {name: value for name, value in vars(row).items() if name not in ("hosts", "figures")}
    return ComparedRun(
        **shared,
        hosts=tuple(map(str, recorded)) if isinstance(recorded, list) else hosts_of(plan),
        figures={} if result is None else {**result.metrics, **speeds},
        digest=str(key_json.get("digest", folder.key)),
        reservation=f"{row.state}: {row.note}" if altered else row.note if counts else f"not finished ({row.state})",
        folder=folder.path,
        parts={
            **parts,
            "config": without_secrets(decisive if isinstance(decisive, dict) else canonical_config(config)),
        },
        failure=printable(hide(entries[-1].first_line)) if entries and not counts else "",
        overrides=tuple(map(hide, overrides_in(provenance))),
        provenance={name: hide(value) if isinstance(value, str) else value for name, value in provenance.items()},
        planned_nodes=tuple(nodes_of(plan)),
        verdict=documents.read_or_none(folder.path.parent / REPRODUCTIONS / folder.key / "verdict.json"),
        weights_sha256=None if result is None else result.fields.get("weights_sha256"),
        outputs=_outputs(result),
        made_with=past_step(folder, config),
    )


# ---------------------------------------------------------------------------------------------- groups
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class MetricSummary:
    """A metric over the runs of a group."""

    finite: Statistic | None  # of the finite values; None: there are none
    nan: int = 0  # number of NaN values
    infinite: int = 0  # number of infinite values


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """The difference of two groups' means of a metric, second minus first, with Welch's interval."""

    metric: str
    difference: float
    low: float | None = None  # the ends of the interval; None if it is ``unknown``
    high: float | None = None
    unknown: str = ""  # why there is no interval, or ''

    @property
    def is_larger(self) -> bool:
        """True if the difference is larger than the spread over seeds: the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed alone."""

    label: str  # a letter (A, B, …, Z, AA)
    words: tuple[str, ...]  # the settings that distinguish the group, as ``name=value``
    runs: tuple[ComparedRun, ...]
    figures: Mapping[str, MetricSummary]

    @property
    def first(self) -> ComparedRun:
        """The representative run: the first finished one, if there is one."""
        return next((run for run in self.runs if run.counts), self.runs[0])

    @property
    def n(self) -> int:
        """The number of runs with figures."""
        return sum(run.counts for run in self.runs)

    @property
    def title(self) -> str:
        """The distinguishing settings with long numbers rounded; ``words`` has the exact values."""
        pairs = (word.partition("=") for word in self.words)
        return " ".join(f"{name}={short_value(value)}" for name, _, value in pairs) or self.first.what

    @property
    def brief(self) -> str:
        """The distinguishing settings in few words: ``lr 0.1, global_batch_size 32``."""
        pairs = dict(word.partition("=")[::2] for word in self.words)
        names = short_field_names([*pairs])
        return ", ".join(f"{names[name]} {short_value(value)}" for name, value in pairs.items()) or self.first.what

    @property
    def reservation(self) -> str:
        """The reason why nothing may be claimed about its figures, or ''."""
        if self.n == 0:
            altered = sum(run.state == ALTERED for run in self.runs)
            return "none of its runs is finished" + (f", {altered} {ALTERED}" if altered else "")
        doubted = [run for run in self.runs if run.counts and run.reservation]
        reasons = dict.fromkeys(run.reservation.partition(":")[0].partition(" (")[0] for run in doubted)
        return f"{len(doubted)} of {counted(self.n, 'run')} {', '.join(reasons)}" if doubted else ""


def grouped(runs: Sequence[ComparedRun]) -> list[Group]:
    """Group runs that differ only in the seed, in the order of their first runs, groups with a finished run first."""
    by_configuration: dict[str, list[ComparedRun]] = {}
    for run in {run.key: run for run in runs}.values():
        by_configuration.setdefault(_text({**run.parts, "config": flat_config(run)}), []).append(run)
    # all groups are compared with the first one, so that must have figures
    members = sorted(by_configuration.values(), key=lambda group: not any(run.counts for run in group))
    differing = differing_fields([group[0] for group in members])
    groups = []
    for number, group in enumerate(map(_merge_equal_runs, members)):
        values: dict[str, list[float]] = {}
        for name, value in (item for run in group if run.counts for item in run.figures.items()):
            values.setdefault(name, []).append(value)
        fields = flat_config(group[0])
        distinguishing = [(name, field_value(fields, name)) for name in differing]
        words = tuple(f"{name}={shown(value)}" for name, value in distinguishing if value is not None)
        figures = {name: summarized(of_runs) for name, of_runs in values.items()}
        groups.append(Group(label=letters(number), words=words, runs=tuple(group), figures=figures))
    return groups


def flat_config(run: ComparedRun) -> dict[str, Any]:
    """Return dotted field → value of the configuration that decides the run, except its seed; empty if unknown."""
    fields = {name: value for name, value in flat(run.config) if name not in SEEDS} if run.config else {}
    # the place of the seed among a script's arguments doesn't count either
    if isinstance(order := fields.pop(_ORDER_OF_ARGS, None), list):
        others = [name for name in order if name != "seed"]
        fields |= {_ORDER_OF_ARGS: others} if others != sorted(others) else {}
    if fields.get(_ARGS, ...) is None:  # no arguments: equal to a run whose only argument is the seed
        del fields[_ARGS]
    return fields


def _merge_equal_runs(group: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Merge a script's runs that are certainly one training made twice, so that a mean counts it once. They have the
    same seed, or one has no seed of its own, and their metrics and files are equal."""
    merged = list[ComparedRun]()
    for run in sorted(group, key=lambda run: run.seed is None):
        twin = next((one for one in merged if run.seed in (None, one.seed) and _have_equal_results(run, one)), None)
        if twin is None:
            merged.append(run)
        else:
            merged[merged.index(twin)] = replace(twin, alike=(*twin.alike, run.key))
    return merged


def _have_equal_results(first: ComparedRun, second: ComparedRun) -> bool:
    if not (first.counts and second.counts and first.config.get("program") and first.outputs == second.outputs):
        return False
    rows, others = (
        [
            (row.step, {name: value for name, value in row.metrics.items() if not is_time(name)})
            for row in metrics_file.rows(run.folder / run_folder.METRICS)
        ]
        for run in (first, second)
    )
    return rows == others and bool(rows or first.outputs.keys() - {run_folder.OUTPUT_DIGESTS})


def differing_fields(runs: Sequence[ComparedRun]) -> list[str]:
    """Return configuration fields that differ between runs with a known configuration, except the seed."""
    configs = [flat_config(run) for run in runs if run.config]
    names = sorted({name for fields in configs for name in fields})
    differing = [name for name in names if len({_text(fields.get(name)) for fields in configs}) > 1]
    return [name for name in differing if not name.startswith(f"{ORDER}.") or is_reordered(name, configs)]


def field_value(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field of ``flat_config``; for ``order.X``, the names in X in their order, as text."""
    if not name.startswith(f"{ORDER}."):
        return fields.get(name)
    return ", ".join(names_in_order(name, fields))


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """Return all metrics of the groups, validation and test figures first."""
    names = {name for group in groups for name in group.figures}
    prefixes = ("val/", "test/", "train/")
    return sorted(names, key=lambda name: (*(not name.startswith(prefix) for prefix in prefixes), name))


def shown(value: Any) -> str:
    """Format a configuration value for a table."""
    return "-" if value is None else printable(value if isinstance(value, str) else _text(value))


def summarized(values: Sequence[float]) -> MetricSummary:
    """Summarize one metric's values, one per run, at least one."""
    finite = [value for value in values if math.isfinite(value)]
    nan = sum(math.isnan(value) for value in values)
    return MetricSummary(
        finite=statistic(finite) if finite else None, nan=nan, infinite=len(values) - len(finite) - nan
    )


def letters(number: int) -> str:
    """Return 0 → A, 25 → Z, 26 → AA."""
    rounds, letter = divmod(number, 26)
    return (letters(rounds - 1) if rounds else "") + chr(ord("A") + letter)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def mean_difference(metric: str, first: Statistic, second: Statistic) -> MeanDifference:
    """Return the difference of two groups' means, with Welch's interval if both have a spread."""
    difference = second.mean - first.mean
    if first.std is None or second.std is None:
        return MeanDifference(metric=metric, difference=difference, unknown="no spread known (n = 1)")
    variances = first.std * first.std / first.n, second.std * second.std / second.n  # of the two means
    variance = sum(variances)
    if variance == 0 or not math.isfinite(variance):
        unknown = "a spread too large to be counted with" if variance else "no spread: all seeds came out the same"
        return MeanDifference(metric=metric, difference=difference, unknown=unknown)
    from scipy.special import stdtrit  # late import: only intervals need scipy

    share = variances[0] / variance
    degrees_of_freedom = 1 / (share * share / (first.n - 1) + (1 - share) * (1 - share) / (second.n - 1))
    half_width = float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)  # by Student's t
    low, high = difference - half_width, difference + half_width
    return MeanDifference(metric=metric, difference=difference, low=low, high=high)
