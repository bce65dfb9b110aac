"""Prove that a run survives kills: make it again, kill it at moments drawn from a seed, and compare its results.

Where they differ, the culprit is derived from what is left: the names in the checkpoints, and the first step whose
metrics differ. No checkpoint is loaded: nothing of a file is executed or unpickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickletools
import random
import re
import signal
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeline.cluster.agent.running.processes import find_processes
from pipeline.core.specs import State
from pipeline.core.tables import counted
from pipeline.reproduction.compare import Verdict, is_time
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder
from trainers.script import workdir

FOLDER_SUFFIX = "-killed"
_EARLIEST, _LATEST = 0.1, 0.95  # of the time from the first to the last row of metrics
_WRITTEN_S = 0.5
_SOONER = (1.0, 0.7, 0.4)  # of that moment, where the repetition had ended before it
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d|\d\d:\d\d(:\d\d(\.\d+)?)?|\b1[5-9]\d{8}(\.\d+)?\b"
)  # a date, a time of day, unix time
_SETS_RANDOM = re.compile(
    r"set_rng_state|(?<![_\w])set_?state\(|^\s*(?:import|from)\s+(?:transformers|accelerate|lightning)\b", re.MULTILINE
)


class Culprit(Enum):
    """What makes a killed run come out otherwise: the finding, and the mend."""

    NO_CHECKPOINT = (
        "no checkpoint was found after a kill, and starting over gave other results",
        "save into {checkpoints} (paceline.checkpoints()), and write results anew instead of adding to them",
    )
    NOT_READ = (
        "a checkpoint was found and not read: it began again at its first step",
        "load what {resume} stands for; docs/script-files.md says where it is looked for",
    )
    OPTIMIZER = (
        "optimizer state missing",
        "save optimizer.state_dict() in the checkpoint, and load it",
    )
    RANDOM = (
        "random state not restored (order of data, dropout and augmentation follow from it)",
        "save and restore torch.get_rng_state(), CUDA's, numpy's and random's, or seed by step",
    )
    ORDER = (
        "order of data differs after the resume",
        "go on inside the epoch: skip the batches that were seen, and draw the order from seed and epoch",
    )
    NOT_LOGGED = (
        "metrics of the last step are missing: it went on behind them, and had nothing left to train",
        "evaluate and log once more at the end of the script, whatever was trained before",
    )
    SINCE_RESUME = (
        "a metric of the whole training counts from the resume on: nothing else differs",
        "keep its sum in the checkpoint; program.ignore_metrics=[NAME] leaves it out",
    )
    TIME_OR_PATH = (
        "a time or a path in the output: metrics and tensors are equal",
        "leave times and absolute paths out of results",
    )
    CHANCE = (
        "it isn't deterministic: undisturbed too it comes out otherwise",
        "seed everything that is drawn; torch.use_deterministic_algorithms(True) names operations that aren't",
    )
    UNKNOWN = ("not known from what it left", "compare both folders")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, ``after_s`` seconds after its attempt began.

    ``checkpoint`` (in the run folder) was the newest, and ``holds`` are the kinds of state that it names.
    """

    after_s: float
    checkpoint: str | None
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of it: ``culprit`` is None where the results are equal.

    ``resumed_at``: the first step of each later attempt that logged one; ``differs_at``: the first step whose metrics
    differ; ``started_over``: the last attempt began at the run's first step; ``was_resumed``: the recorded run itself
    was resumed, at ``resumed_at``, and an undisturbed one differs from there on; ``lacks_last``: nothing differs but
    that metrics of the last step are missing; ``only_totals``: nothing differs but metrics that are logged once;
    ``nothing_left``: the last attempt logged nothing, as the kill came behind the last checkpoint; ``not_resumed``: the
    script takes its checkpoint by {resume}, and none was there at any kill;
    ``offer``: the override that would give the script its checkpoint.
    """

    verdict: Verdict
    kills: tuple[Kill, ...]
    resumed_at: tuple[int, ...] = ()
    differs_at: int | None = None
    started_over: bool = False
    was_resumed: bool = False
    lacks_last: bool = False
    only_totals: bool = False
    nothing_left: bool = False
    not_resumed: bool = False
    offer: str = ""
    culprit: Culprit | None = None

    @property
    def proven(self) -> bool:
        return self.verdict.reproduced and bool(self.kills) and not (self.nothing_left or self.not_resumed)


def prove(folder: RunFolder, *, work: Path, kills: int, seed: int, say: Callable[[str], None], **how: Any) -> Proof:
    """Make a finished run again below ``work``, killing it ``kills`` times, and compare.

    Args:
        kills: 0 repeats it undisturbed; with more the undisturbed repetition is known to come out equal.
        seed: of the moments of the kills.
        how: what else ``reproduce`` takes.

    Raises:
        PacelineError: the run can't be repeated, or failed otherwise than by a kill.
    """
    runs_dir, settings = work / "runs", checkpoints.settings_of(folder.path)
    resumes = settings is not None and settings.resumes
    for sooner in _SOONER:
        timed = _made(runs_dir) or folder  # the newest repetition shows best how long one takes now
        first_s, into_s = moments(timed, kills, seed)
        into_s = [at * sooner for at in into_s]
        killing = _Killing(runs_dir, first_s, into_s, say, awaits_checkpoint=resumes or sooner == _SOONER[0])
        verdict = reproduce(folder, work=work, say=say, train=partial(_train, killing), **how)
        again = _made(runs_dir) or folder
        starts = _first_steps(again.path)
        nothing_left = bool(killing.kills) and _nothing_left(starts)
        not_resumed = resumes and bool(killing.kills) and not any(kill.checkpoint for kill in killing.kills)
        if not kills or (killing.kills and not nothing_left and not not_resumed):
            break
        if nothing_left:
            late = "nothing was left to train after it was killed"
        elif not_resumed:
            late = "it had no checkpoint when it was killed, and ended before the next kill"
        else:
            late = "it had ended before it was to be killed"
        say(f"{late}; once more, killed sooner")
    ignored = [*verdict.times]
    before, after = (_by_step(one.path, ignored) for one in (folder, again))
    steps = sorted({*before, *after})
    evidence = Proof(
        verdict=verdict,
        kills=tuple(killing.kills),
        resumed_at=tuple(step for step in starts[1:] if step is not None),
        differs_at=next((step for step in steps if repr(before.get(step)) != repr(after.get(step))), None),
        lacks_last=_lacks_last(before, after),
        only_totals=_only_totals(before, verdict),
        offer=checkpoints.resume_offer(again.path, settings) if settings is not None else "",
        nothing_left=nothing_left,
        not_resumed=not_resumed,
        started_over=bool(before) and len(starts) > 1 and starts[-1] is not None and starts[-1] <= min(before),
    )
    if verdict.reproduced or verdict.nothing or verdict.within_spread:
        return evidence
    are_files = all(item.field.startswith(f"{run_folder.OUTPUTS}/") for item in verdict.outcome)
    files_alone = evidence.differs_at is None and are_files and _differ_by_times(folder, again, verdict)
    is_dense = [*before] == [*range(min(before), max(before) + 1)] if before else False
    restores_random = _restores_random(again.code)
    of = evidence
    resumed_at = tuple(step for step in _first_steps(folder.path)[1:] if step is not None)
    if not killing.kills and resumed_at and evidence.differs_at is not None and evidence.differs_at >= resumed_at[0]:
        evidence = dataclasses.replace(evidence, resumed_at=resumed_at, was_resumed=True)
        of = dataclasses.replace(evidence, kills=(_interruption_of(folder.path),))
    found = culprit(of, files_alone=files_alone, is_dense=is_dense, restores_random=restores_random)
    return dataclasses.replace(evidence, culprit=found)


def _made(runs_dir: Path) -> RunFolder | None:
    return next((RunFolder(path.parent) for path in runs_dir.glob(f"*/{run_folder.RESULT}")), None)


def culprit(evidence: Proof, *, files_alone: bool, is_dense: bool, restores_random: bool) -> Culprit:
    """Return what made the results differ.

    The loss of the first step after a resume depends on weights, order and random state; the optimizer's state shows
    one step later. That is seen where every step is logged (``is_dense``); else by what the checkpoint names.

    Args:
        files_alone: the metrics of all steps are equal, and files differ by times and paths alone.
        restores_random: the run's code sets a random state somewhere.
    """
    saved = [kill for kill in evidence.kills if kill.checkpoint is not None]
    if files_alone:
        return Culprit.TIME_OR_PATH
    if not evidence.kills:
        return Culprit.CHANCE
    if evidence.lacks_last:
        return Culprit.NOT_LOGGED
    if evidence.only_totals:
        return Culprit.SINCE_RESUME
    if not saved:
        return Culprit.NO_CHECKPOINT
    if evidence.started_over:
        return Culprit.NOT_READ
    holds = frozenset.intersection(*(kill.holds for kill in saved))
    behind = {evidence.differs_at - step for step in evidence.resumed_at} if evidence.differs_at is not None else set()
    if is_dense and 1 in behind and 0 not in behind:
        return Culprit.OPTIMIZER
    if OPTIMIZER not in holds and not (is_dense and 0 in behind):
        return Culprit.OPTIMIZER
    if RANDOM not in holds or not restores_random:
        return Culprit.RANDOM
    return Culprit.ORDER if evidence.differs_at is not None else Culprit.UNKNOWN


def moments(folder: RunFolder, kills: int, seed: int) -> tuple[float, list[float]]:
    """Return how long an attempt takes until its first row of metrics, and how far into the training to kill (s)."""
    entries = journal.read(folder.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row.time_s for row in metrics_file.rows(folder.path / run_folder.METRICS) if row.time_s >= begun]
    first, last = (min(rows), max(rows)) if len(rows) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    return first - begun, [
        at * (last - first) for at in sorted(chance.uniform(_EARLIEST, _LATEST) for _ in range(kills))
    ]


class _Killing:
    """The kills of one proof, each in a new attempt and further into the training; the last one waits for a checkpoint.

    An attempt begins where its checkpoint was saved, and without one where the attempt before began.
    """

    def __init__(
        self,
        runs_dir: Path,
        first_s: float,
        into_s: Sequence[float],
        say: Callable[[str], None],
        *,
        awaits_checkpoint: bool,
    ) -> None:
        self._awaits_checkpoint = awaits_checkpoint
        self.kills: list[Kill] = []
        self._runs_dir, self._first_s, self._due, self._say = runs_dir, first_s, [*into_s], say
        self._last = 0.0
        self._began_s = 0.0  # how far into the training this attempt began
        self._seen = 0.0  # unix time when the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def meanwhile(self, command: int) -> None:
        """Kill the ranks, or stop the command (its process id) where they run on other computers, once it is time."""
        if not self._due or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._last:
            return
        begun = entries[-1].time + self._first_s
        if time.time() < begun + max(0.0, self._due[0] - self._began_s):
            return
        if self._awaits_checkpoint and len(self._due) == 1 and not self._has_checkpoint(run_dir):
            return
        self._last = time.time()
        after_s = round(self._last - entries[-1].time, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command, signal.SIGTERM)
        self._due.pop(0)
        self._began_s += _saved_s(run_dir, begun)
        self.kills.append(_kill(run_dir, after_s))
        self._say(f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s")

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if there is a checkpoint, and was one half a second ago: the first isn't still being written."""
        if _newest_checkpoint(run_dir) is None:
            return False
        self._seen = self._seen or time.time()
        return time.time() - self._seen >= _WRITTEN_S

    def look_again(self) -> None:
        """Note the newest checkpoint, which other hosts may have sent only now."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


def _train(
    killing: _Killing, words: Sequence[str], secrets: Mapping[str, str], *, project: Path, database: Path
) -> int:
    """Train as ``reproduce`` does, and give the same command again after each kill; return the last exit code."""
    while True:
        before = len(killing.kills)
        code = train_again(words, secrets, project=project, database=database, meanwhile=killing.meanwhile)
        if code == 0 or len(killing.kills) == before:
            return code
        killing.look_again()


def _saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 without one."""
    newest = _newest_checkpoint(run_dir)
    with suppress(OSError):  # removed meanwhile
        return max(0.0, newest.stat().st_mtime - since) if newest is not None else 0.0
    return 0.0


def _kill(run_dir: Path, after_s: float) -> Kill:
    newest = _newest_checkpoint(run_dir)
    if newest is None:
        return Kill(after_s=after_s, checkpoint=None)
    return Kill(after_s=after_s, checkpoint=str(newest.relative_to(run_dir)), holds=state_kinds(newest))


def _interruption_of(run_dir: Path) -> Kill:
    """Return the interruption of a finished run, with the newest checkpoint that it left, in its outputs perhaps."""
    newest = _newest_checkpoint(run_dir) or workdir.newest_output(run_dir)
    holds = state_kinds(newest) if newest is not None else frozenset[str]()
    return Kill(after_s=0.0, checkpoint=None if newest is None else str(newest), holds=holds)


def _newest_checkpoint(run_dir: Path) -> Path | None:
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return checkpoints.newest_of_script(run_dir, settings)
    return None


def _restores_random(code: Path) -> bool:
    """Whether the code names a call that sets a random state, or a library that does so by itself."""
    sources = (path.read_text(encoding="utf-8", errors="replace") for path in code.rglob("*.py"))
    return any(_SETS_RANDOM.search(source) for source in sources)


# ------------------------------------------------------------------------------------------- metrics by step
def _by_step(run_dir: Path, ignored: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return step → metrics, in order; of a step that was logged twice the later values count."""
    steps: dict[int, dict[str, float]] = {}
    for row in metrics_file.rows(run_dir / run_folder.METRICS):
        values = {name: value for name, value in row.metrics.items() if name not in ignored and not is_time(name)}
        steps[row.step] = {**steps.get(row.step, {}), **values}
    return dict(sorted(steps.items()))


def _lacks_last(one: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]) -> bool:
    """Whether ``other`` has all of ``one`` but for metrics of the last step."""
    if not one or not other or [*one] != [*other]:
        return False
    *before, last = one
    return all(one[step] == other[step] for step in before) and other[last].items() < one[last].items()


def _only_totals(steps: Mapping[int, Mapping[str, float]], verdict: Verdict) -> bool:
    """Whether all that differs are metrics that were logged once, at the last step."""
    if not steps or not verdict.outcome:
        return False
    *before, last = steps.values()
    return all(item.field in last and not any(item.field in metrics for metrics in before) for item in verdict.outcome)


def _first_steps(run_dir: Path) -> list[int | None]:
    """Return the first step that each attempt logged; None where no row of it is left, as it was begun anew."""
    begun = [entry.time for entry in journal.read(run_dir / run_folder.JOURNAL) if entry.state is State.RUNNING]
    rows = metrics_file.rows(run_dir / run_folder.METRICS)
    spans = zip(begun, [*begun[1:], float("inf")], strict=True)
    steps = [[row.step for row in rows if start <= row.time_s < end] for start, end in spans]
    return [min(of_attempt, default=None) for of_attempt in steps]


def _nothing_left(starts: Sequence[int | None]) -> bool:
    """Whether the last one of several attempts logged nothing, in a run that logs metrics: see ``_first_steps``."""
    return len(starts) > 1 and starts[-1] is None and any(step is not None for step in starts)


# --------------------------------------------------------------------------------------------------- files
def _differ_by_times(folder: RunFolder, again: RunFolder, verdict: Verdict) -> bool:
    """Whether each differing file holds equal tensors, or equal text but for times and the run folder's path."""
    for item in verdict.outcome:
        before, after = (_without_times(one.path, item.field) for one in (folder, again))
        if before is None or before != after:
            return False
    return True


def _without_times(run_dir: Path, name: str) -> object:
    """Return what a file holds besides times and paths; None where nothing can be said."""
    if (tensors := tensors_in(run_dir / name)) is not None:
        return tensors
    try:
        text = (run_dir / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return _TIME.sub("TIME", text.replace(str(run_dir.resolve()), "{run}"))


# ---------------------------------------------------------------------------------------------------- text
def _as_script_wrote(checkpoint: str) -> str:
    """Return the path in the project of a file that stands in the script's copy of it."""
    is_in_copy = checkpoint.startswith(f"{run_folder.WORK}/")
    return checkpoint.partition("/code/")[2] or checkpoint if is_in_copy else checkpoint


def text(proof: Proof) -> str:
    """Format the proof for a terminal, the differences left out."""
    run = proof.verdict.run
    if proof.culprit is not None and not proof.kills:
        finding, mend = proof.culprit.value
        why = "it comes out otherwise"
        if proof.was_resumed:
            steps = ", ".join(map(str, proof.resumed_at))
            why = f"it was itself resumed, at step {steps}; an undisturbed run differs from step {proof.differs_at} on"
        return f"NOT PROVEN {run}: {why}\n  culprit  {finding}\n  mend     {_with_names(mend, proof)}"
    if not proof.verdict.reproduced and proof.culprit is None:
        return f"NOTHING PROVEN {run}: its results can't be compared to the bit"
    if not proof.kills:
        return f"NOTHING PROVEN {run}: it had ended before it could be killed"
    if proof.nothing_left and proof.culprit is None:
        return f"NOTHING PROVEN {run}: it was killed behind its last checkpoint each time, with nothing left to train"
    if proof.not_resumed and proof.culprit is None:
        return f"NOTHING PROVEN {run}: it had saved no checkpoint before any kill, so nothing was resumed"
    after = ", ".join(f"{kill.after_s} s" for kill in proof.kills)
    times = counted(len(proof.kills), "time")
    if proof.culprit is None:
        equal = f"{proof.verdict.compared}, metrics and steps are equal"
        lines = [f"PROVEN {run}: killed {times} (after {after}), and {equal}"]
    else:
        lines = [f"NOT PROVEN {run}: killed {times} (after {after}), it comes out otherwise"]
    saved = [_as_script_wrote(kill.checkpoint) for kill in proof.kills if kill.checkpoint is not None]
    if proof.started_over or not saved:
        why = f"{saved[-1]} was there and not read" if saved else "there was no checkpoint"
        lines.append(f"  resume   it starts over: {why}")
    else:
        at = f"at step {', '.join(map(str, proof.resumed_at))}, " if proof.resumed_at else ""
        lines.append(f"  resume   {at}from {saved[-1]}")
    if proof.offer:
        lines.append(f"  try      {proof.offer}")
    if proof.differs_at is not None and proof.culprit is not None:
        lines.append(f"  differs  from step {proof.differs_at} on")
    if proof.culprit is not None:
        finding, mend = proof.culprit.value
        lines += [f"  culprit  {finding}", f"  mend     {_with_names(mend, proof)}"]
    return "\n".join(lines)


def _with_names(mend: str, proof: Proof) -> str:
    """Put the metrics that differ in the place of NAME."""
    names = [item.field for item in proof.verdict.outcome if item.field != "steps"]
    return mend.replace("[NAME]", f"[{','.join(names)}]") if names else mend


# ------------------------------------------------------------- what checkpoints hold, by the names in them
_LARGEST_PICKLE = 64 << 20  # bytes; that of a checkpoint with a million tensors
_LARGEST_HEADER = 64 << 20
_ZIP = b"PK\x03\x04"
OPTIMIZER, RANDOM = "optimizer", "random"
_KINDS = {
    OPTIMIZER: re.compile(r"(?i)optim|exp_avg|momentum|max_exp_avg_sq"),
    # not random, train_size_random_mix and random_erase, arguments that a checkpoint holds as well
    RANDOM: re.compile(
        r"(?i)(?<![a-z])rng|rand(?:om)?_?states?(?![a-z])|(?:python|numpy|np|torch|cuda)[_.]?random$|generator|\bseed_state"
    ),
}


def state_kinds(path: Path) -> frozenset[str]:
    """Return which kinds of state a checkpoint (a file, or a folder of files) names: ``optimizer``, ``random``."""
    names = [*_names(path)]
    return frozenset(kind for kind, pattern in _KINDS.items() if any(map(pattern.search, names)))


def tensors_in(path: Path) -> list[tuple[int, int]] | None:
    """Return size and CRC-32 of each tensor's bytes in a file of ``torch.save``, in order; None for another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [(one.file_size, one.CRC) for one in archive.infolist() if "/data/" in one.filename]
    except (OSError, zipfile.BadZipFile):
        return None


def _names(path: Path) -> Iterator[str]:
    """Yield the texts in a checkpoint that may name a part of it."""
    if path.is_dir():
        for inside in sorted(path.rglob("*")):
            yield inside.name
            if inside.is_file():
                yield from _names(inside)
        return
    try:
        with path.open("rb") as file:
            head = file.read(8)
            file.seek(0)
            if head.startswith(_ZIP):
                with zipfile.ZipFile(path) as archive:
                    for one in archive.infolist():
                        if one.filename.endswith("data.pkl") and one.file_size <= _LARGEST_PICKLE:
                            with archive.open(one) as inner:
                                yield from _of_pickle(inner)
            elif path.suffix == ".safetensors":
                if (length := int.from_bytes(file.read(8), "little")) <= _LARGEST_HEADER:
                    yield from json.loads(file.read(length))
            elif head.startswith(b"\x80"):
                yield from _of_pickle(file)
    except (OSError, ValueError, zipfile.BadZipFile):  # torn, or in no form that is known
        return


def _of_pickle(file: IO[bytes]) -> Iterator[str]:
    """Yield the texts of a pickle: read by its opcodes. Raises ValueError."""
    for _, value, _ in pickletools.genops(file):
        if isinstance(value, str):
            yield value
