"""Prove that a run survives kills: make it again, kill it at moments drawn from a seed, and compare its results.

Each kill meets a new attempt. Where the results differ, the culprit is derived from what is left (``culprits.py``).
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.cluster.agent.running.processes import find_processes
from pipeline.core.specs import State
from pipeline.core.tables import counted, first_of
from pipeline.reproduction.compare import Verdict
from pipeline.reproduction.culprits import (
    STATES,
    Culprit,
    Evidence,
    Kill,
    culprit,
    first_steps,
    gather,
    logged_steps,
    resumed_at,
    state_kinds,
)
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder
from trainers.script import workdir

FOLDER_SUFFIX = "-killed"
_SHOWN = 4  # files in a line
_SOONER = (1.0, 0.7, 0.4)  # factors of the drawn moments; the next is tried if the repetition proved nothing


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of it.

    Attributes:
        unproven: why equal results prove nothing, as words that follow the run's key; empty: they do.
        evidence: ``resumed_at`` in it is the recorded run's if ``was_resumed``.
        was_resumed: the recorded run itself was resumed, and an undisturbed one differs from there on.
        offer: the override that would give the script its checkpoint.
        culprit: None where the results are equal.
    """

    verdict: Verdict
    evidence: Evidence
    unproven: str = ""
    was_resumed: bool = False
    offer: str = ""
    culprit: Culprit | None = None

    @property
    def proven(self) -> bool:
        return self.is_equal and not self.unproven

    @property
    def is_equal(self) -> bool:
        """True if results, metrics of each step and saved tensors are equal, as far as they can be compared."""
        return self.verdict.reproduced and self.evidence.is_equal


def prove(folder: RunFolder, *, work: Path, kills: int, seed: int, say: Callable[[str], None], **how: Any) -> Proof:
    """Make a finished run again below ``work``, killing it ``kills`` times, and compare.

    Args:
        kills: 0 repeats it undisturbed. Call it with more only once an undisturbed repetition has come out equal.
        seed: of the moments of the kills.
        how: what else ``reproduce`` takes.

    Raises:
        PacelineError: the run can't be repeated, or failed otherwise than by a kill.
    """
    runs_dir, settings = work / "runs", checkpoints.settings_of(folder.path)
    resumes = settings is not None and settings.resumes
    for sooner in _SOONER:
        timed = _repetition(runs_dir) or folder  # the newest repetition shows best how long one takes now
        first_s, into_s = moments(timed, kills, seed)
        into_s = [at * sooner for at in into_s]
        killing = Killing(runs_dir, first_s, into_s, say, awaits_checkpoint=resumes or sooner == _SOONER[0])
        verdict = reproduce(folder, work=work, say=say, train=partial(_train, killing), **how)
        again = _repetition(runs_dir) or folder
        starts = first_steps(again.path)
        unproven = _unproven(killing.kills, starts, logged_steps(folder.path), resumes=resumes)
        if not kills or not unproven:
            break
        say(f"{unproven}; once more, killed sooner")
    if killing.kills and len(killing.kills) < kills:
        say(f"killed {counted(len(killing.kills), 'time')} of {kills}: it had ended before it was time for the others")
    evidence = gather(folder, again, verdict, killing.kills)
    offer = checkpoints.resume_offer(again.path, settings) if settings is not None else ""
    proof = Proof(verdict=verdict, evidence=evidence, unproven=unproven, offer=offer)
    if verdict.within_spread or (evidence.is_equal and (verdict.reproduced or verdict.nothing)):  # nothing to compare
        return proof
    resumed = resumed_at(folder.path)
    if not killing.kills and resumed and evidence.differs_at is not None and evidence.differs_at >= resumed[0]:
        evidence = dataclasses.replace(evidence, resumed_at=resumed)
        proof = dataclasses.replace(proof, evidence=evidence, was_resumed=True)
        # the culprit is sought as if the interruption of the recorded run had been our kill
        evidence = dataclasses.replace(evidence, kills=(_interruption(folder.path),))
    return dataclasses.replace(proof, culprit=culprit(evidence))


def _repetition(runs_dir: Path) -> RunFolder | None:
    return next((RunFolder(path.parent) for path in runs_dir.glob(f"*/{run_folder.RESULT}")), None)


def _train(killing: Killing, words: Sequence[str], secrets: Mapping[str, str], *, project: Path, database: Path) -> int:
    """Train as ``reproduce`` does, and give the same command again after each kill; return the last exit code."""
    while True:
        before = len(killing.kills)
        code = train_again(words, secrets, project=project, database=database, meanwhile=killing.kill_if_due)
        if code == 0 or len(killing.kills) == before:
            return code
        killing.look_again()


def _unproven(kills: Sequence[Kill], starts: Sequence[int | None], steps: Collection[int], *, resumes: bool) -> str:
    """Return why a repetition proves nothing; empty if it does.

    Args:
        starts: the first step that each attempt logged, as of ``first_steps``.
        steps: those that the run logged; an attempt that begins at the last of several has only evaluated again.
        resumes: the script takes its checkpoint by {resume}.
    """
    if not kills:
        return "it had ended before it could be killed"
    trained_nothing = starts[-1:] == [None] or (len(steps) > 2 and starts[-1:] == [max(steps)])
    if len(starts) > 1 and trained_nothing and any(step is not None for step in starts):
        return "it was killed behind its last checkpoint, with nothing left to train"
    if resumes and not any(kill.checkpoint for kill in kills):
        return "it had saved no checkpoint before any kill, so nothing was resumed"
    return ""


def _interruption(run_dir: Path) -> Kill:
    """Return the interruption of a finished run, with the newest checkpoint that it left, in its outputs perhaps."""
    newest = newest_checkpoint(run_dir) or workdir.newest_output(run_dir)
    holds = state_kinds(newest) if newest is not None else frozenset[str]()
    return Kill(after_s=0.0, checkpoint=None if newest is None else str(newest), holds=holds)


def _as_script_wrote(checkpoint: str) -> str:
    """Return the path in the project of a file that stands in the script's copy of it."""
    is_in_copy = checkpoint.startswith(f"{run_folder.WORK}/")
    return checkpoint.partition("/code/")[2] or checkpoint if is_in_copy else checkpoint


def text(proof: Proof) -> str:
    """Format the proof for a terminal, the differences left out."""
    run, evidence = proof.verdict.run, proof.evidence
    mend = [] if proof.culprit is None else _finding(proof, proof.culprit)
    if proof.culprit is not None and not evidence.kills:
        why = "it comes out otherwise"
        if proof.was_resumed:
            steps = ", ".join(map(str, evidence.resumed_at))
            why = (
                f"it was itself resumed, at step {steps}; an undisturbed run differs from step {evidence.differs_at} on"
            )
        return "\n".join([f"NOT PROVEN {run}: {why}", *mend])
    if not proof.is_equal and proof.culprit is None:
        return f"NOTHING PROVEN {run}: its results can't be compared to the bit"
    if proof.unproven and proof.culprit is None:
        return f"NOTHING PROVEN {run}: {proof.unproven}"
    after = ", ".join(f"{kill.after_s} s" for kill in evidence.kills)
    killed = f"killed {counted(len(evidence.kills), 'time')} (after {after})"
    if proof.culprit is None:
        lines = [f"PROVEN {run}: {killed}, and {proof.verdict.compared}, metrics and steps are equal"]
    else:
        lines = [f"NOT PROVEN {run}: {killed}, it comes out otherwise"]
    saved = [_as_script_wrote(kill.checkpoint) for kill in evidence.kills if kill.checkpoint is not None]
    if evidence.reads_nothing or not saved:
        why = f"{saved[-1]} was there and not read" if saved else "there was no checkpoint"
        lines.append(f"  resume   it starts over: {why}")
    else:
        at = f"at step {', '.join(map(str, evidence.resumed_at))}, " if evidence.resumed_at else ""
        lines.append(f"  resume   {at}from {saved[-1]}")
    if proof.offer:
        lines.append(f"  try      {proof.offer}")
    if evidence.differs_at is not None and proof.culprit is not None:
        lines.append(f"  differs  from step {evidence.differs_at} on")
    if evidence.tensors_differ:
        lines.append(f"  differs  tensors of {first_of(evidence.tensors_differ, _SHOWN)}")
    if proof.culprit in STATES and (lacks := evidence.lacks):
        lines.append(f"  lacks    {saved[-1]} holds no state of: {', '.join(lacks)}")
    return "\n".join([*lines, *mend])


def _finding(proof: Proof, culprit: Culprit) -> list[str]:
    """Return the lines with the culprit and its mend, in which the metrics that differ take the place of NAME."""
    finding, mend = culprit.value
    names = [item.field for item in proof.verdict.outcome if item.field != "steps"]
    mend = mend.replace("[NAME]", f"[{','.join(names)}]") if names else mend
    return [f"  culprit  {finding}", f"  mend     {mend}"]


# --------------------------------------------------------------------------------------------------------- kills
_EARLIEST, _LATEST = 0.1, 0.95  # of the time from the first to the last row of metrics
_WRITTEN_S = 0.5


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


class Killing:
    """The kills of one proof, each in a new attempt and further into the training.

    An attempt begins where its checkpoint was saved, and without one where the attempt before began.

    Args:
        first_s: how long an attempt takes until its first row of metrics.
        into_s: how far into the training to kill, ascending.
        awaits_checkpoint: the last kill waits until there is a checkpoint.
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
        self.kills: list[Kill] = []
        self._runs_dir, self._first_s, self._say = runs_dir, first_s, say
        self._left_s = [*into_s]
        self._awaits_checkpoint = awaits_checkpoint
        self._killed_at = 0.0  # unix time of the last kill
        self._began_s = 0.0  # how far into the training this attempt began
        self._saved_at = 0.0  # unix time when the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command_pid: int) -> None:
        """Kill the ranks, or stop the command where they run on other computers, once it is time."""
        if not self._left_s or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at = entries[-1].time
        trains_from = started_at + self._first_s
        if time.time() < trains_from + max(0.0, self._left_s[0] - self._began_s):
            return
        if self._awaits_checkpoint and len(self._left_s) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command_pid, signal.SIGTERM)
        self._left_s.pop(0)
        self._began_s += _saved_s(run_dir, trains_from)
        self.kills.append(_kill(run_dir, after_s))
        self._say(f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s")

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if there is a checkpoint, and was one half a second ago: the first isn't still being written."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def look_again(self) -> None:
        """Note the newest checkpoint, which other hosts may have sent only now."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


def _saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 without one."""
    newest = newest_checkpoint(run_dir)
    with suppress(OSError):  # removed meanwhile
        return max(0.0, newest.stat().st_mtime - since) if newest is not None else 0.0
    return 0.0


def _kill(run_dir: Path, after_s: float) -> Kill:
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return Kill(after_s=after_s, checkpoint=None)
    return Kill(after_s=after_s, checkpoint=str(newest.relative_to(run_dir)), holds=state_kinds(newest))


def newest_checkpoint(run_dir: Path) -> Path | None:
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return checkpoints.newest_of_script(run_dir, settings)
    return None
