"""Prove that a run survives kills: repeat it, kill the repetition at moments drawn from a seed, compare the results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    resumed_at,
    rows_by_attempt,
    state_kinds,
)
from pipeline.reproduction.kills import Killer, draw_moments, newest_checkpoint
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints, metrics_file
from pipeline.runs.folder import RunFolder
from pipeline.runs.script_attempts import ScriptAttempts
from trainers.contract import run_folder
from trainers.script import workdir

FOLDER_SUFFIX = "-killed"
_INCOMPARABLE = "its results can't be compared to the bit"
_SHOWN = 4  # files in a line
_SOONER = (1.0, 0.7, 0.4)  # factors of the drawn moments; the next one is tried if the kills proved nothing


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of a proof."""

    verdict: Verdict  # the comparison of the results
    evidence: Evidence  # with ``resumed_at`` of the recorded run if ``was_resumed``, else of the repetition
    unproven: str = ""  # why equal results prove nothing, or ''
    was_resumed: bool = False  # the recorded run itself was; an undisturbed repetition differs from there on
    offer: str = ""  # the argument that would give the script its checkpoint, or ''
    culprit: Culprit | None = None  # why the results differ; None if they are equal

    @property
    def proven(self) -> bool:
        return self.is_equal and not self.unproven

    @property
    def is_equal(self) -> bool:
        """True if results, metrics of each step and saved tensors are equal, as far as they can be compared."""
        return self.verdict.reproduced and self.evidence.is_equal


def prove(
    folder: RunFolder, *, root: Path, work: Path, data_dir: Path, kills: int, seed: int, say: Callable[[str], None]
) -> Proof:
    """Repeat a finished run below ``work``, kill it ``kills`` times, and compare.

    Args:
        root: the project.
        kills: 0 repeats it undisturbed; only if that is equal, kills prove something.
        seed: of the moments of the kills.

    Raises PacelineError: the run can't be repeated, or failed for another reason than a kill.
    """
    runs_dir, settings = work / "runs", checkpoints.settings_of(folder.path)
    resumes = settings is not None and settings.resumes
    awaits_checkpoint = True
    steps = {row.step for row in metrics_file.rows(folder.path / run_folder.METRICS)}
    for sooner in _SOONER:
        timed = _repetition(runs_dir) or folder  # a repetition shows best how long one takes now
        moments = draw_moments(timed, kills, seed, sooner=sooner)
        killer = Killer(runs_dir, moments, say, awaits_checkpoint=awaits_checkpoint)
        verdict = reproduce(
            folder, root=root, work=work, data_dir=data_dir, overrides=(), keep=False, say=say,
            train=partial(_train, killer),
        )  # fmt: skip
        again = _repetition(runs_dir) or folder
        starts = first_steps(rows_by_attempt(again.path))
        resumes = resumes or bool(resumed_at(starts))  # also without {resume}, if an attempt has shown it
        awaits_checkpoint = resumes or any(kill.checkpoint for kill in killer.kills)
        unproven = _unproven(killer.kills, starts, steps, resumes=resumes)
        if not kills or not unproven:
            break
        say(f"{unproven}; once more, killed sooner")
    if killer.kills and len(killer.kills) < kills:
        say(f"killed {counted(len(killer.kills), 'time')} of {kills}: it had ended before it was time for the others")
    evidence = gather(folder, again, verdict, killer.kills)
    offer = ScriptAttempts(again.path, settings).resume_offer() if settings is not None else ""
    proof = Proof(verdict=verdict, evidence=evidence, unproven=unproven, offer=offer)
    if verdict.within_spread or (evidence.is_equal and (verdict.reproduced or verdict.nothing)):  # nothing to explain
        return proof
    resumed, differs_at = resumed_at(first_steps(rows_by_attempt(folder.path))), evidence.differs_at
    if not killer.kills and resumed and differs_at is not None and differs_at >= resumed[0]:
        evidence = dataclasses.replace(evidence, resumed_at=resumed)
        proof = dataclasses.replace(proof, evidence=evidence, was_resumed=True)
        # as if the interruption of the recorded run had been a kill of ours
        evidence = dataclasses.replace(evidence, kills=(_interruption(folder.path),))
    return dataclasses.replace(proof, culprit=culprit(evidence))


def _repetition(runs_dir: Path) -> RunFolder | None:
    return next((RunFolder(path.parent) for path in runs_dir.glob(f"*/{run_folder.RESULT}")), None)


def _train(killer: Killer, words: Sequence[str], secrets: Mapping[str, str], *, project: Path, database: Path) -> int:
    while True:
        earlier_kills = len(killer.kills)
        code = train_again(words, secrets, project=project, database=database, meanwhile=killer.kill_if_due)
        if code == 0 or len(killer.kills) == earlier_kills:
            return code
        killer.look_again()


def _unproven(kills: Sequence[Kill], starts: Sequence[int | None], steps: Collection[int], *, resumes: bool) -> str:
    """Return why a repetition proves nothing, or ''.

    ``starts``: ``first_steps`` of the repetition. ``steps``: all steps that the recorded run logged. ``resumes``: the
    script goes on from its checkpoint, by {resume} or by itself.
    """
    if not kills:
        return "it had ended before it could be killed"
    # an attempt that begins at the last of several steps has only evaluated again
    trained_nothing = starts[-1:] == [None] or (len(steps) > 2 and starts[-1:] == [max(steps)])
    if len(starts) > 1 and trained_nothing and any(step is not None for step in starts):
        return "it was killed behind its last checkpoint, with nothing left to train"
    if resumes and not any(kill.checkpoint for kill in kills):
        return "it had saved no checkpoint before any kill, so nothing was resumed"
    return ""


def _interruption(run_dir: Path) -> Kill:
    """Return the interruption of a finished run as a kill; its checkpoint may also be among its outputs."""
    newest = newest_checkpoint(run_dir) or workdir.newest_output(run_dir)
    holds = state_kinds(newest) if newest is not None else frozenset[str]()
    return Kill(after_s=0.0, checkpoint=None if newest is None else str(newest), holds=holds)


def text(proof: Proof) -> str:
    """Format the proof for a terminal, without the differences of the results."""
    run, evidence, culprit = proof.verdict.run, proof.evidence, proof.culprit
    if culprit is None and (not proof.is_equal or proof.unproven):
        return f"NOTHING PROVEN {run}: {proof.unproven if proof.is_equal else _INCOMPARABLE}"
    after = ", ".join(f"{kill.after_s} s" for kill in evidence.kills)
    killed = f"killed {counted(len(evidence.kills), 'time')} (after {after})"
    if culprit is None:
        head = f"PROVEN {run}: {killed}, and {proof.verdict.compared}, metrics and steps are equal"
        return "\n".join([head, *_about_resume(proof)])
    names = ",".join(item.field for item in proof.verdict.outcome if item.field != "steps")
    mend = culprit.mend.replace("[NAME]", f"[{names or 'NAME'}]")
    finding = [f"  culprit  {culprit.finding}", f"  mend     {mend}"]
    if evidence.kills:
        head = f"NOT PROVEN {run}: {killed}, it comes out otherwise"
        return "\n".join([head, *_about_resume(proof), *finding])
    steps = ", ".join(map(str, evidence.resumed_at))
    resumed = f"it was itself resumed, at step {steps}; an undisturbed run differs from step {evidence.differs_at} on"
    return "\n".join([f"NOT PROVEN {run}: {resumed if proof.was_resumed else 'it comes out otherwise'}", *finding])


def _about_resume(proof: Proof) -> list[str]:
    """Return lines about the checkpoint that the repetition resumed from, and about what differs after it."""
    evidence, lines = proof.evidence, list[str]()
    project_copy = re.compile(rf"^{run_folder.WORK}/.*?/code/")
    saved = [project_copy.sub("", kill.checkpoint) for kill in evidence.kills if kill.checkpoint is not None]
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
    if proof.culprit is Culprit.RANDOM and evidence.code.unrestored:
        names = " and ".join(evidence.code.unrestored)
        lines.append(f"  lacks    the code draws from {names}, and never restores its state")
    return lines
