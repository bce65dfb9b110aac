"""Where two trainings part: the first step, rank and tensor that differ, and the first operator of a replay.

The ranks of a replay run on this computer, with the run's own code, in a folder of their own: the run's isn't changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import PacelineError
from pipeline.core.processes import process
from pipeline.runs.checkpoints import step_of
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder, variables

KINDS = ("inputs", "buffers", "gradients", "weights", "optimizer")
"""In the order in which several differences of one step are reported: the earlier ones explain the later ones."""

Digests = Mapping[int, Mapping[int, Mapping[tuple[str, str], int]]]
"""Step → rank → (kind, name) → digest."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first digested step that differs: its ``ranks``, the ``kind`` that tells most, and the tensors' names.

    ``equal``: the last digested step before it, at which all is equal; 0 is the start.
    """

    step: int
    equal: int
    ranks: tuple[int, ...]
    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What differed first in a replay.

    ``operator``: torch's name, or what was changed between operators (weights, buffers, inputs, gradients). ``cause``:
    data, randomness, arithmetic, communication, or state: changed by no operator of the step.
    """

    step: int
    ranks: tuple[int, ...]
    operator: str
    module: str
    cause: str


def read(run_dir: Path) -> Digests:
    """Return the digests of a run; of a step that was trained twice the later ones. Raises PacelineError: none."""
    path = run_dir / run_folder.DIGESTS
    steps: dict[int, dict[int, dict[tuple[str, str], int]]] = {}
    names: list[tuple[str, str]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PacelineError(
            f"run {run_dir.name} has no digests",
            hint="train both with trainer.digests=10 (a script: with paceline.digest); docs/diff.md",
        ) from error
    for line in lines:
        try:
            row = json.loads(line)
            if "names" in row:
                names = [(str(kind), str(name)) for kind, name in row["names"]]
            else:
                steps.setdefault(row["step"], {})[row["rank"]] = dict(zip(names, row["digests"], strict=True))
        except (ValueError, KeyError, TypeError) as error:
            raise PacelineError(
                f"{path} is damaged: {line[:60]!r} is no line of digests",
                hint="another copy of the run folder, or the same training once more",
            ) from error
    return steps


def first(one: Digests, other: Digests) -> tuple[Parting | None, tuple[int, ...]]:
    """Return where the digests part, and the steps that were compared.

    Raises:
        PacelineError: no step is in both, or the ranks or the networks aren't the same.
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        raise PacelineError("no step of both has digests", hint="train both with the same trainer.digests=N")
    before = 0
    for step in common:
        if one[step].keys() != other[step].keys():
            counts = f"{len(one[step])} and {len(other[step])} ranks"
            raise PacelineError(f"step {step} has digests of {counts}", hint="compare runs of as many ranks")
        differing: dict[tuple[str, str], list[int]] = {}
        for rank, digests in sorted(one[step].items()):
            theirs = other[step][rank]
            if digests.keys() != theirs.keys():
                name = sorted(digests.keys() ^ theirs.keys())[0]
                raise PacelineError(f"{' '.join(name)} is in one of the two networks only", hint="doit compare A B")
            for key, value in digests.items():
                if value != theirs[key]:
                    differing.setdefault(key, []).append(rank)
        if differing:
            # what fewer ranks have came before it was averaged
            fewest = min(map(len, differing.values()))
            telling = {key: ranks for key, ranks in differing.items() if len(ranks) == fewest}
            kind = next(kind for kind in KINDS if any(key[0] == kind for key in telling))
            names = tuple(key[1] for key in telling if key[0] == kind)
            ranks = {rank for key, of_key in telling.items() if key[0] == kind for rank in of_key}
            parting = Parting(step=step, equal=before, ranks=tuple(sorted(ranks)), kind=kind, names=names)
            return parting, tuple(common)
        before = step
    return None, tuple(common)


def operators(folder: Path) -> list[list[dict[str, Any]]]:
    """Return for each rank the lines that a replay recorded. Raises PacelineError: it recorded none."""
    found: list[list[dict[str, Any]]] = []
    while (path := folder / run_folder.OPERATORS.format(rank=len(found))).exists():
        found.append([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
    if not found:
        raise PacelineError(f"the replay in {folder} recorded nothing")
    return found


def origin(one: Sequence[list[dict[str, Any]]], other: Sequence[list[dict[str, Any]]]) -> Origin | None:
    """Return what differed first, over all ranks; None: the replays are equal."""
    at = [_first_line(mine, theirs) for mine, theirs in zip(one, other, strict=True)]
    places = [place for place in at if place is not None]
    if not places:
        return None
    place = min(places)
    ranks = tuple(rank for rank, found in enumerate(at) if found == place)
    mine, theirs = one[ranks[0]], other[ranks[0]]
    line = theirs[place] if place < len(theirs) else mine[place]
    if "operator" in line:
        cause = "data" if _is_loading(theirs, place) else str(line["cause"])
        return Origin(
            step=line["step"], ranks=ranks, operator=line["operator"], module=line["module"], cause=cause
        )  # fmt: skip
    before = mine[place].get("digests", {}) if place < len(mine) else {}
    name = next((name for name, value in line["digests"].items() if before.get(name) != value), "")
    causes = {"inputs": "data", "gradients": "communication" if len(one) > 1 else "state"}
    return Origin(
        step=line["step"], ranks=ranks, operator=line["kind"], module=name, cause=causes.get(line["kind"], "state")
    )  # fmt: skip


def _first_line(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> int | None:
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return number
    return None if len(one) == len(other) else min(len(one), len(other))


def _is_loading(lines: Sequence[Mapping[str, Any]], place: int) -> bool:
    """Whether the operator prepares the inputs: they are seen before any module computes."""
    for line in lines[place:]:
        if line.get("kind") == "inputs":
            return True
        if line.get("module") or "kind" in line:
            return False
    return False


def parting_line(parting: Parting) -> str:
    """Tell the first difference of the digests in a line."""
    more = f" and {len(parting.names) - 1} more" if len(parting.names) > 1 else ""
    since = f"equal at step {parting.equal}" if parting.equal else "no digested step before it"
    return f"step {parting.step} ({since}), {_ranks(parting.ranks)}: {parting.kind} ({parting.names[0]}{more})"


def origin_line(origin: Origin | None) -> str:
    """Tell the first difference of the replays in a line."""
    if origin is None:
        return (
            "equal: trained again, both come out alike, so the difference came from outside of the code, such as a "
            "fault of the hardware"
        )
    where = f" in {origin.module}" if origin.module else ""
    return f"step {origin.step}, {_ranks(origin.ranks)}: {origin.operator}{where}; {_CAUSES[origin.cause]}"


_CAUSES = {
    "data": "the data differ",
    "randomness": "randomness differs",
    "arithmetic": "arithmetic differs",
    "communication": "communication differs",
    "state": "changed by no operator of this step",
}


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------------- the replay
_LIMIT_S = 3600.0


def replay(folder: RunFolder, work: Path, *, first: int, last: int, ranks: int) -> Path:
    """Train the steps up to ``last`` again in ``work``, and return it with the operators from step ``first`` on.

    Raises:
        PacelineError: the replay failed; the text has the end of what the ranks printed.
    """
    prepare(folder.path, work, first=first)
    code = folder.code if folder.code.is_dir() else Path.cwd()
    environment = {
        **os.environ,
        **_environment(folder),
        "PYTHONPATH": os.pathsep.join([str(code), *filter(None, [os.environ.get("PYTHONPATH")])]),
        variables.OPERATORS: f"{first}-{last}",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m",
        folder.program.entry, "--config", str(work / run_folder.CONFIG),
    ]  # fmt: skip
    done = process.run(command, env=environment, cwd=code, timeout_s=_LIMIT_S)
    if done.code != 0:
        raise PacelineError(
            f"the replay of {folder.key} ended with exit code {done.code}: {done.stderr.strip()[-600:]}",
            hint="--no-replay compares the digests alone",
        )
    return work


def _environment(folder: RunFolder) -> dict[str, str]:
    """Return the variables of the run that decide arithmetic: its number of threads, and those that it was given."""
    plan = folder.read_json(run_folder.PLAN) or {}
    nodes = plan.get("nodes") or [{}]
    given = {str(name): str(value) for name, value in (nodes[0].get("env") or {}).items()}
    return {name: value for name, value in given.items() if not name.startswith("PACELINE_")}


def prepare(run_dir: Path, work: Path, *, first: int) -> None:
    """Make ``work`` a folder in which the training goes on from the newest checkpoint before step ``first``."""
    shutil.rmtree(work, ignore_errors=True)
    (work / run_folder.CHECKPOINTS).mkdir(parents=True)
    shutil.copy(run_dir / run_folder.CONFIG, work)
    for name in (run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS_NOTES):
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, work)
    (work / run_folder.DATA).symlink_to((run_dir / run_folder.DATA).resolve())
    older = [path for path in (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt") if step_of(path) < first]
    if path := max(older, key=step_of, default=None):
        for source in (path, path.with_suffix(".json")):
            shutil.copy(source, work / run_folder.CHECKPOINTS)
