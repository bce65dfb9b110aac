"""Prove that a run survives kills: make it again, kill it at moments drawn from a seed, and compare its results.

Where they differ, the culprit is derived from what is left (``culprits.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.core.tables import counted, first_of
from pipeline.reproduction.checkpoint_names import state_kinds
from pipeline.reproduction.compare import Verdict
from pipeline.reproduction.culprits import (
    STATES,
    Culprit,
    Evidence,
    culprit,
    first_steps,
    gather,
    logged_steps,
    resumed_at,
)
from pipeline.reproduction.kills import Kill, Killing, moments, newest_checkpoint
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints
from pipeline.runs.folder import RunFolder
from trainers.contract import run_folder
from trainers.script import workdir

FOLDER_SUFFIX = "-killed"
_SHOWN = 4  # files in a line
_SOONER = (1.0, 0.7, 0.4)  # of the drawn moments, where a repetition proved nothing at those before


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
        kills: 0 repeats it undisturbed; with more the undisturbed repetition is known to come out equal.
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
    if verdict.within_spread or (evidence.is_equal and (verdict.reproduced or verdict.nothing)):
        return proof
    resumed = resumed_at(folder.path)
    if not killing.kills and resumed and evidence.differs_at is not None and evidence.differs_at >= resumed[0]:
        evidence = dataclasses.replace(evidence, resumed_at=resumed)
        proof = dataclasses.replace(proof, evidence=evidence, was_resumed=True)
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
