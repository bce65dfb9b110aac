"""The comparison of a run with its reproduction, for `doit reproduce` and `doit prove`: weights (of a script: output
files), metrics and steps, then possible causes of differences.

Bits are equal only on equal hardware. On other hardware, metrics may differ by as much as another seed makes them."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.tables import counted, first_of
from pipeline.keys.content_key import Difference, differences
from pipeline.reproduction.recipe import Recipe
from pipeline.runs import index, recorded_hardware
from pipeline.runs.folder import RunFolder
from pipeline.runs.provenance import LOCK
from pipeline.runs.result import AlteredError
from trainers.contract import run_folder

_STEPS = ("steps", "epochs")
_ALWAYS_COMPARED = ("weights_sha256", *_STEPS)
_SCRIPT_OUTPUTS = "outputs/"
_UNDECLARED = ("outputs/workdir/", "checkpoints/", "nodes/")  # files of a script that it didn't declare as results
_LOG_ENDINGS = (".jsonl", ".log", "training_args.bin")  # not compared: these and TensorBoard files contain times
_UNIT = "(s|ms|us|secs?|seconds?|minutes?|hours?)"
_LONG_UNIT = f"({_UNIT}|mins?)"  # alone, min is a smallest value
_TIME_NAME = re.compile(
    rf"(^|[/_. -])((run|wall|wall_?clock_?)?times?(_{_LONG_UNIT})?|(duration|elapsed|latency)(_{_LONG_UNIT})?"
    rf"|time_?stamp|eta|throughput|mfu|fps|[stq]ps|speed|(train|eval|test|step|epoch|data|load|total|batch)_{_UNIT}"
    rf"|(\w*_)?per_{_UNIT}|(it|iters?|steps?|tok|tokens?|samples?|images?)/{_UNIT})$"
    r"|(^|/)(dt|wall|ms|secs?|seconds?|minutes?|hours?)(_per_\w+|/\w+)?$",
    re.IGNORECASE,
)
"""Matches names of metrics, fields or columns that are times or rates, which differ between any two runs."""
_MOST_NAMED = 8  # names in a line
_RANKS = ("nnodes", "world_size")  # not compared with trainer.shards, where any number of ranks gives the same weights
_SEEDS = {"seed", "program.args.seed"}
_LEAST_RUNS = 3  # for a spread over seeds
_ACCURACY = "test/accuracy"
_REACH = 2 * math.sqrt(2)  # allowed difference of a metric on other hardware, in standard deviations over seeds
_IGNORED_FACTS = ("hostname", "memory_bytes")  # of a host; they change no result


def is_time(name: str) -> bool:
    """Return True if a metric, field or column is a time or a rate by its name."""
    return _TIME_NAME.search(name) is not None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a comparison."""

    run: str  # the key of the recorded run
    repeated_key: str  # the key of its reproduction
    outcome: tuple[Difference, ...]  # differences in weights, metrics or steps; none if the run was reproduced
    key: tuple[Difference, ...]  # differences of the keys, which may be the cause
    surroundings: tuple[Difference, ...]  # differences of hosts and requirements.lock, which may be the cause
    compared: str = "weights_sha256"  # what was compared: this, or of a script ``outputs`` or ``files``
    # Undeclared files: in a script's working directory, in its checkpoints and on other hosts. They may contain times:
    # if some differ, the other results decide; without other results nothing is decided.
    besides: tuple[str, ...] = ()
    besides_differing: tuple[str, ...] = ()
    times: tuple[str, ...] = ()  # metrics that weren't compared: times and rates, and those that the user named
    nothing: bool = False  # the run left nothing that could be compared
    hardware: str | None = None  # how the hardware differs, so that bits can't be compared; None: it doesn't
    reach: Mapping[str, float] = field(default_factory=dict)  # metric → allowed difference on other hardware

    @property
    def reproduced(self) -> bool:
        return not self.outcome and not self.nothing

    @property
    def within_spread(self) -> bool:
        """True if the run was repeated on other hardware, at least one metric could be judged, and each of them differs
        by no more than is allowed then."""
        return not self.reproduced and self.hardware is not None and bool(self.reach) and not self.far

    @property
    def near(self) -> tuple[Difference, ...]:
        """Metrics whose differences are within the allowance for other hardware."""
        numbers = (int, float)
        both = [one for one in self.outcome if isinstance(one.old, numbers) and isinstance(one.new, numbers)]
        return tuple(one for one in both if abs(one.new - one.old) <= self.reach.get(one.field, -1.0))

    @property
    def far(self) -> tuple[Difference, ...]:
        """Differences that other hardware doesn't explain: steps or ranks, or a metric beyond its allowance."""
        judged = {*_STEPS, *_RANKS, *self.reach}
        return tuple(item for item in self.outcome if item.field in judged and item not in self.near)


def compare(
    recipe: Recipe,
    again: RunFolder,
    ignored: Sequence[str] = (),
    *,
    hardware: str | None = None,
    reach: Mapping[str, float] | None = None,
) -> Verdict:
    """Compare the outcome, the parts of the key, and the hosts' environments, field by field.

    Args:
        again: the reproduction.
        ignored: glob patterns of metrics that aren't compared.
        hardware: how the hardware differs, if that is known; None: it is read from both results.
        reach: metric → allowed difference on other hardware.
    """
    again_result, parts = again.read_result(), again.read_json(run_folder.KEY) or {}
    result = again_result.fields if again_result is not None else {}
    old, new = (_outcome(fields, recipe.parts) for fields in (recipe.result, result))
    is_script = bool(recipe.result.get("program"))
    files = _compare_files(recipe, again, result, [name for name in old if old[name] != new.get(name)])
    times = list[str]()
    if is_script:  # its metrics and files may contain times
        names = {*(recipe.result.get("metrics") or {}), *(result.get("metrics") or {})}
        times = [name for name in sorted(names) if is_time(name) or any(fnmatch(name, glob) for glob in ignored)]
        left_out = {*files.equal, *times}
        old, new = ({name: fields[name] for name in fields if name not in left_out} for fields in (old, new))
    # a script's metric or declared file decides, even if all undeclared files are equal
    decided = bool({*old, *new} - {*_ALWAYS_COMPARED, *_RANKS} or files.equal)
    provenance = again.read_json(run_folder.PROVENANCE) or {}
    # hosts that only one of the two had aren't compared: ``outcome`` has the number of nodes
    nodes = min(len(_hosts(recipe.provenance)), len(_hosts(provenance)))
    before, after = (
        _surroundings(origin, fields, nodes)
        for origin, fields in ((recipe.provenance, recipe.result), (provenance, result))
    )
    return Verdict(
        run=recipe.folder.key,
        compared=("outputs" if decided else "files") if is_script else "weights_sha256",
        repeated_key=again.key,
        times=tuple(times),
        besides=files.besides,
        besides_differing=files.besides_differing,
        nothing=is_script and not decided and (not files.besides or bool(files.besides_differing)),
        outcome=tuple(differences({"config": old}, {"config": new})),
        key=tuple(differences(recipe.parts, parts)),
        hardware=hardware or recorded_hardware.difference(recipe.result, result),
        reach={name: value for name, value in (reach or {}).items() if name in old and name in new},
        surroundings=tuple(differences(before, after)),
    )


class _Files(NamedTuple):
    """How the files of a script compare; empty for Paceline's own trainer."""

    equal: tuple[str, ...] = ()  # result files with other bytes that are equal except for times
    besides: tuple[str, ...] = ()  # undeclared files, see Verdict
    besides_differing: tuple[str, ...] = ()


def _compare_files(recipe: Recipe, again: RunFolder, result: Mapping[str, Any], differing: Sequence[str]) -> _Files:
    """Compare a script's files with those of its reproduction; ``differing``: names of results that differ."""
    if not recipe.result.get("program"):
        return _Files()
    before, after = (
        {name: file["sha256"] for name, file in _files(fields, _UNDECLARED).items()}
        for fields in (recipe.result, result)
    )
    besides = sorted({*before, *after})
    others = [name for name in besides if before.get(name) != after.get(name)]
    equal = _equal_but_times(recipe.folder, again, others)
    return _Files(
        equal=tuple(_equal_but_times(recipe.folder, again, differing)),
        besides=tuple(besides),
        besides_differing=tuple(name for name in others if name not in equal),
    )


def _outcome(result: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be equal: name → value for fields of result.json and metrics, name → sha256 for output files."""
    names = _ALWAYS_COMPARED if "shards" in (parts.get("topology") or {}) else (*_ALWAYS_COMPARED, *_RANKS)
    files = _files(result, (_SCRIPT_OUTPUTS,)) if result.get("program") else {}
    outputs = {name: file["sha256"] for name, file in files.items() if not name.startswith(_UNDECLARED)}
    return {**{name: result.get(name) for name in names}, **outputs, **(result.get("metrics") or {})}


def _equal_but_times(first: RunFolder, second: RunFolder, names: Sequence[str]) -> list[str]:
    """Return the JSON and CSV files of ``names`` that are equal except for times, rates and the run folder's path."""
    equal = []
    for name in names:
        if name.startswith((_SCRIPT_OUTPUTS, *_UNDECLARED)) and name.endswith((".json", ".csv")):
            text = _text_without_times(first, name)
            if text and text == _text_without_times(second, name):
                equal.append(name)
    return equal


def _text_without_times(folder: RunFolder, name: str) -> str | None:
    """Return the text of a JSON or CSV file without times; None if it can't be parsed."""
    try:
        text = (folder.path / name).read_text(encoding="utf-8").replace(str(folder.path.resolve()), "{run}")
        if not name.endswith(".csv"):
            return json.dumps(_drop_times(json.loads(text)), sort_keys=True)
        rows = [*csv.reader(io.StringIO(text))]
        times = {column for column, title in enumerate(rows[0] if rows else ()) if is_time(title.strip())}
        return json.dumps([[cell for column, cell in enumerate(row) if column not in times] for row in rows])
    except (OSError, ValueError, RecursionError, csv.Error):
        return None


def _drop_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_times(item) for name, item in value.items() if not is_time(name)}
    return [_drop_times(item) for item in value] if isinstance(value, list) else value


def _files(result: Mapping[str, Any], tops: tuple[str, ...]) -> dict[str, Any]:
    """Return name → fingerprint of the files below ``tops``, without logs."""
    files = result.get("files") or {}
    named = [name for name in files if name.startswith(tops) and not name.endswith(_LOG_ENDINGS)]
    return {
        name: files[name]
        for name in named
        if "tfevents" not in name and not name.endswith(f"/{run_folder.DEPENDENCIES}")
    }


def _surroundings(provenance: Mapping[str, Any], result: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """Return facts of the first ``nodes`` hosts by node rank, as hosts may have other names here."""
    hosts = _hosts(provenance)[:nodes]
    of_ranks = [*(result.get("nodes") or ()), *({} for _ in hosts)]  # results of earlier versions have no such facts
    by_node = {}
    for rank, host in enumerate(hosts):
        facts = {**host, **of_ranks[rank]}
        by_node[f"node{rank}"] = {name: value for name, value in facts.items() if name not in _IGNORED_FACTS}
    return {"config": {**by_node, LOCK: provenance.get("lock_sha256"), "precision": result.get("precision")}}


def _hosts(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((provenance.get("environments") or {}).values())


# -------------------------------------------------------------------------------------- spread of seeds
def reach_of_seeds(recipe: Recipe, runs_dir: Path) -> dict[str, float]:
    """Return metric → the difference that is allowed on other hardware.

    Other arithmetic moves a training about as far as another seed does. So 2√2 standard deviations over seeds are
    allowed: two values of that spread differ by less in about 95 of 100 cases. The seeds are those of the finished runs
    in ``runs_dir`` that differ in nothing else, at least three including the run itself. With fewer runs, only the test
    accuracy is judged, by the number of test images."""
    by_key: dict[str, Mapping[str, Any]] = {recipe.folder.key: recipe.result.get("metrics") or {}}
    for key, parts in index.finished_parts(runs_dir).items():
        if key not in by_key and {item.field for item in differences(recipe.parts, parts)} <= _SEEDS:
            with suppress(AlteredError):
                result = RunFolder(runs_dir / key).read_result()
                by_key |= {key: result.metrics} if result is not None else {}
    values = defaultdict[str, list[float]](list)
    for name, value in (item for metrics in by_key.values() for item in metrics.items()):
        if isinstance(value, int | float) and math.isfinite(value):
            values[name].append(value)
    reach = {name: _REACH * statistics.stdev(over) for name, over in values.items() if len(over) >= _LEAST_RUNS}
    images = len((recipe.folder.read_json(run_folder.PREDICTIONS) or {}).get("targets") or ())
    if _ACCURACY in values and _ACCURACY not in reach and images:
        # the standard deviation of a share of ``images``, smoothed so that the share is neither 0 nor 1
        accuracy = min(1.0, max(0.0, recipe.result["metrics"][_ACCURACY]))  # a result sealed by somebody may hold more
        share = (accuracy * images + 1) / (images + 2)
        reach[_ACCURACY] = _REACH * math.sqrt(share * (1 - share) / images)
    return reach


# ------------------------------------------------------------------------------------------------- text
def text(verdict: Verdict) -> str:
    """Format the verdict for a terminal: the outcome first, then what may have caused it."""
    lines = []
    if verdict.nothing:
        hint = " (program.outputs=['GLOB'] says which files are results)" if verdict.besides else ""
        lines.append(
            f"NOTHING TO COMPARE {verdict.run}: the script left neither a metric (times aside) nor a file in {{run}} "
            f"(logs aside); it stays unproven{hint}"
        )
    elif verdict.within_spread:
        lines.append(
            f"WITHIN THE SPREAD {verdict.run}: {', '.join(verdict.reach)} no further apart than chance allows; bits "
            f"can't be compared, computed by {verdict.hardware}"
        )
        lines += [f"  {item} (at most {verdict.reach[item.field]:.2g} apart)" for item in verdict.near]
        others = [item.field for item in verdict.outcome if item not in verdict.near]
        lines.append(f"not judged: {', '.join(others)}")
    elif verdict.reproduced:
        lines.append(f"REPRODUCED {verdict.run}: {verdict.compared}, metrics and steps are equal")
    else:
        differ = "differs" if len(verdict.outcome) == 1 else "differ"
        lines.append(f"NOT REPRODUCED {verdict.run}: {counted(len(verdict.outcome), 'value')} {differ}")
        lines += [f"  {item}" for item in verdict.outcome]
        if verdict.hardware is not None:
            beyond = ", ".join(item.field for item in verdict.far)
            why = f"{beyond} differ more than that" if beyond else "finished runs of two more seeds tell by how much"
            lines.append(f"computed by {verdict.hardware}: other bits were to be expected; {why}")
    if verdict.besides:
        differing = verdict.besides_differing
        verb = "differs" if len(differing) == 1 else "differ"
        shown = f"{first_of(differing, _MOST_NAMED)} {verb}, not compared to the bit"
        files = f"{counted(len(verdict.besides), 'file')} of its working directory, checkpoints and other hosts"
        lines.append(f"{files}: {shown if differing else 'equal'}")
    if verdict.times:
        lines.append(f"not compared: {', '.join(verdict.times)}")
    # possible causes
    if verdict.repeated_key != verdict.run:
        lines.append(f"its key is {verdict.repeated_key} here, because of:")
        lines += [f"  {item}" for item in verdict.key]
    else:
        lines.append("its key is the same")
    if verdict.surroundings:
        lines.append("hosts and lock differ in:")
        lines += [f"  {item}" for item in verdict.surroundings]
    return "\n".join(lines)
