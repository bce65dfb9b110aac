"""The place where two trainings diverge (`doit diff`): the first step, ranks and tensor whose digests differ, then the
first torch operator whose results differ.

Digests of tensors are recorded while a run trains with trainer.digests. For the operator, a few steps of both runs are
trained again here with each run's own code (a *replay*), which records the results of every operator."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import PacelineError
from pipeline.core.processes import process
from pipeline.runs.checkpoints import step_of
from pipeline.runs.contents import nodes_of
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder, variables

KINDS = ("inputs", "buffers", "gradients", "weights", "optimizer")
"""The kinds of tensors of a step, in the order of computation: the first kind that differs explains the later ones."""

Tensor = tuple[str, str]
"""A tensor of a step: its kind, and its name in the network."""
Digests = Mapping[int, Mapping[int, Mapping[Tensor, int]]]
"""Step → rank → tensor → digest."""


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first digested step at which tensors differ."""

    step: int
    equal: int  # the digested step before it, at which all tensors are equal; 0: there is none
    ranks: tuple[int, ...]
    kind: str  # of the tensors in ``names``, one of KINDS
    # the tensors that differ on the fewest ranks: averaging spreads a difference to all ranks
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The first difference of two replays: an operator's results, or a tensor that differs without one."""

    step: int
    ranks: tuple[int, ...]
    operator: str  # torch's name; if a tensor differs without an operator, its kind (one of KINDS)
    module: str  # the module that called the operator; or the name of the tensor
    cause: str  # one of _CAUSES


class Recorded(NamedTuple):
    """A line of a replay: an operator with its results, or the tensors of one ``kind``."""

    step: int
    operator: str  # '' for the tensors of a kind
    module: str
    cause: str
    kind: str
    digests: tuple[tuple[str, int], ...]  # (name, digest); the name is '' for results of an operator


def read(run_dir: Path) -> Digests:
    """Return the digests of a run; for a step that was trained twice, the later ones. Raises PacelineError: none."""
    path = run_dir / run_folder.DIGESTS
    steps: dict[int, dict[int, dict[Tensor, int]]] = {}
    tensors: list[Tensor] = []
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
            if "names" in row:  # the tensors of all following lines
                tensors = [(str(kind), str(name)) for kind, name in row["names"]]
            else:
                steps.setdefault(row["step"], {})[row["rank"]] = dict(zip(tensors, row["digests"], strict=True))
        except (ValueError, KeyError, TypeError) as error:
            raise PacelineError(
                f"{path} is damaged: {line[:60]!r} is no line of digests",
                hint="another copy of the run folder, or the same training once more",
            ) from error
    return steps


def first_difference(first: Digests, second: Digests) -> tuple[FirstDifference | None, tuple[int, ...]]:
    """Return the first difference of two runs' digests (None: they are equal), and the steps that both have. Raises
    PacelineError: no step is in both, or the ranks or the networks aren't the same."""
    common_steps = sorted(first.keys() & second.keys())
    if not common_steps:
        raise PacelineError("no step of both has digests", hint="train both with the same trainer.digests=N")
    equal = 0
    for step in common_steps:
        if ranks_by_tensor := _differing_ranks(step, first[step], second[step]):
            fewest = min(map(len, ranks_by_tensor.values()))
            earliest = {tensor: ranks for tensor, ranks in ranks_by_tensor.items() if len(ranks) == fewest}
            first_kind = min((kind for kind, _ in earliest), key=KINDS.index)
            tensors = [tensor for tensor in earliest if tensor[0] == first_kind]
            ranks = sorted({rank for tensor in tensors for rank in earliest[tensor]})
            names = tuple(name for _, name in tensors)
            difference = FirstDifference(step=step, equal=equal, ranks=tuple(ranks), kind=first_kind, names=names)
            return difference, tuple(common_steps)
        equal = step
    return None, tuple(common_steps)


def _differing_ranks(
    step: int, first: Mapping[int, Mapping[Tensor, int]], second: Mapping[int, Mapping[Tensor, int]]
) -> dict[Tensor, list[int]]:
    """Return tensor → ranks on which it differs at a step. ``first``, ``second``: rank → tensor → digest."""
    if first.keys() != second.keys():
        counts = f"{len(first)} and {len(second)} ranks"
        raise PacelineError(f"step {step} has digests of {counts}", hint="compare runs of as many ranks")
    differing: dict[Tensor, list[int]] = {}
    for rank, digests in sorted(first.items()):
        if digests.keys() != second[rank].keys():
            kind, name = min(digests.keys() ^ second[rank].keys())
            raise PacelineError(f"{kind} {name} is in one of the two networks only", hint="doit compare A B")
        for tensor, digest in digests.items():
            if digest != second[rank][tensor]:
                differing.setdefault(tensor, []).append(rank)
    return differing


def recorded(folder: Path) -> list[list[Recorded]]:
    """Return the lines that a replay recorded, for each rank in order. Raises PacelineError: it recorded none."""
    ranks: list[list[Recorded]] = []
    while (path := folder / run_folder.OPERATORS.format(rank=len(ranks))).exists():
        ranks.append([])
        for raw in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            digests = raw["digests"]
            named = digests.items() if isinstance(digests, dict) else [("", digest) for digest in digests]
            operator, module, cause, kind = (str(raw.get(name, "")) for name in ("operator", "module", "cause", "kind"))
            ranks[-1].append(Recorded(raw["step"], operator, module, cause, kind, tuple(named)))
    if not ranks:
        raise PacelineError(f"the replay in {folder} recorded nothing")
    return ranks


def origin(first: Sequence[Sequence[Recorded]], second: Sequence[Sequence[Recorded]]) -> Origin | None:
    """Return the first difference of two replays, given by the lines of each rank; None: they are equal."""
    # the index of the first differing line on each rank; all ranks record the same operators in the same order
    first_differing = [
        next((index for index, (line, other) in enumerate(zip_longest(*pair)) if line != other), None)
        for pair in zip(first, second, strict=True)
    ]
    differing = [index for index in first_differing if index is not None]
    if not differing:
        return None
    earliest = min(differing)
    ranks = tuple(rank for rank, index in enumerate(first_differing) if index == earliest)
    lines, other_lines = first[ranks[0]], second[ranks[0]]
    line = other_lines[earliest] if earliest < len(other_lines) else lines[earliest]
    if line.operator:
        cause = "data" if _prepares_inputs(other_lines, earliest) else line.cause
        return Origin(step=line.step, ranks=ranks, operator=line.operator, module=line.module, cause=cause)
    # a tensor differs although the operators before it don't
    digests_of_first = dict(lines[earliest].digests) if earliest < len(lines) else {}
    name = next((name for name, digest in line.digests if digests_of_first.get(name) != digest), "")
    causes = {"inputs": "data", "gradients": "communication" if len(first) > 1 else "state"}
    cause = causes.get(line.kind, "state")
    return Origin(step=line.step, ranks=ranks, operator=line.kind, module=name, cause=cause)


def _prepares_inputs(lines: Sequence[Recorded], index: int) -> bool:
    """Return True if the operator at ``index`` prepares the inputs: they are recorded before any module computes."""
    for line in lines[index:]:
        if line.kind == "inputs":
            return True
        if line.module or line.kind:
            return False
    return False


def difference_line(difference: FirstDifference) -> str:
    """Describe the first difference of the digests in a line."""
    more = f" and {len(difference.names) - 1} more" if len(difference.names) > 1 else ""
    since = f"equal at step {difference.equal}" if difference.equal else "no digested step before it"
    tensors = f"{difference.kind} ({difference.names[0]}{more})"
    return f"step {difference.step} ({since}), {_ranks(difference.ranks)}: {tensors}"


def origin_line(origin: Origin | None) -> str:
    """Describe the first difference of the replays in a line."""
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
    """Train steps up to ``last`` again in ``work``, recording operators from step ``first`` on; return ``work``. Raises
    PacelineError: the replay failed; its text ends with what the ranks printed last."""
    prepare(folder.path, work, first=first)
    code = folder.code if folder.code.is_dir() else Path.cwd()
    nodes = nodes_of(folder.read_json(run_folder.PLAN) or {})
    planned = (nodes[0].get("env") or {}) if nodes else {}
    environment = {
        **os.environ,
        # the first node's variables (threads, cluster.env) without Paceline's own, which are about the old attempt
        **{str(name): str(value) for name, value in planned.items() if not str(name).startswith("PACELINE_")},
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


def prepare(run_dir: Path, work: Path, *, first: int) -> None:
    """Make ``work`` a run folder in which the training goes on from the newest checkpoint before step ``first``."""
    shutil.rmtree(work, ignore_errors=True)
    (work / run_folder.CHECKPOINTS).mkdir(parents=True)
    shutil.copy(run_dir / run_folder.CONFIG, work)
    for name in (run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS_NOTES):
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, work)
    (work / run_folder.DATA).symlink_to((run_dir / run_folder.DATA).resolve())
    older = [path for path in (run_dir / run_folder.CHECKPOINTS).glob("step-*.pt") if step_of(path) < first]
    if newest := max(older, key=step_of, default=None):
        for path in (newest, newest.with_suffix(".json")):
            shutil.copy(path, work / run_folder.CHECKPOINTS)
