"""Prove that a run survives kills: repeat it, kill the repetition at moments drawn from a seed, compare the results."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    resumed_at,
    state_kinds,
)
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
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
    evidence: Evidence  # its ``resumed_at`` is that of the recorded run if ``was_resumed``, else that of the repetition
    # why equal results prove nothing, as words that follow the run's key; '' if they prove something
    unproven: str = ""
    # the recorded run itself was resumed, and an undisturbed repetition differs from there on
    was_resumed: bool = False
    offer: str = ""  # the override that would give the script its checkpoint, or ''
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

    ``root``: the project. ``kills``: 0 repeats it undisturbed. Call it with more only once an undisturbed repetition
    was equal. ``seed``: of the moments of the kills. Raises PacelineError: the run can't be repeated, or failed for
    another reason than a kill.
    """
    runs_dir, settings = work / "runs", checkpoints.settings_of(folder.path)
    resumes = settings is not None and settings.resumes
    for sooner in _SOONER:
        timed = _repetition(runs_dir) or folder  # the newest repetition shows best how long one takes now
        moments = draw_moments(timed, kills, seed, sooner=sooner)
        killer = Killer(runs_dir, moments, say, awaits_checkpoint=resumes or sooner == _SOONER[0])
        verdict = reproduce(
            folder, root=root, work=work, data_dir=data_dir, overrides=(), keep=False, say=say,
            train=partial(_train, killer),
        )  # fmt: skip
        again = _repetition(runs_dir) or folder
        steps = {row.step for row in metrics_file.rows(folder.path / run_folder.METRICS)}
        unproven = _unproven(killer.kills, first_steps(again.path), steps, resumes=resumes)
        if not kills or not unproven:
            break
        say(f"{unproven}; once more, killed sooner")
    if killer.kills and len(killer.kills) < kills:
        say(f"killed {counted(len(killer.kills), 'time')} of {kills}: it had ended before it was time for the others")
    evidence = gather(folder, again, verdict, killer.kills)
    offer = checkpoints.resume_offer(again.path, settings) if settings is not None else ""
    proof = Proof(verdict=verdict, evidence=evidence, unproven=unproven, offer=offer)
    if verdict.within_spread or (evidence.is_equal and (verdict.reproduced or verdict.nothing)):  # nothing to explain
        return proof
    resumed, differs_at = resumed_at(folder.path), evidence.differs_at
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

    ``starts``: the first step that each attempt of the repetition logged, see ``first_steps``. ``steps``: the logged
    steps of the run; an attempt that begins at the last of several has only evaluated again. ``resumes``: the script
    takes its checkpoint by {resume}.
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
    """Return the interruption of a finished run as a kill with the newest checkpoint, also of its outputs."""
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
    mend = culprit.value[1].replace("[NAME]", f"[{names or 'NAME'}]")
    finding = [f"  culprit  {culprit.value[0]}", f"  mend     {mend}"]
    if evidence.kills:
        head = f"NOT PROVEN {run}: {killed}, it comes out otherwise"
        return "\n".join([head, *_about_resume(proof), *finding])
    steps = ", ".join(map(str, evidence.resumed_at))
    resumed = f"it was itself resumed, at step {steps}; an undisturbed run differs from step {evidence.differs_at} on"
    return "\n".join([f"NOT PROVEN {run}: {resumed if proof.was_resumed else 'it comes out otherwise'}", *finding])


def _about_resume(proof: Proof) -> list[str]:
    """Return lines about the checkpoint that the repetition resumed from, and about what differs after it."""
    evidence, lines = proof.evidence, list[str]()
    # of a file in the script's copy of the project, the path in the project
    copied = re.compile(rf"^{run_folder.WORK}/.*?/code/")
    saved = [copied.sub("", kill.checkpoint) for kill in evidence.kills if kill.checkpoint is not None]
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
        lines.append(
            f"  lacks    the code draws from {' and '.join(evidence.code.unrestored)}, and never restores its state"
        )
    return lines


# ----------------------------------------------------------------------------------------------- kills
_EARLIEST, _LATEST = 0.1, 0.95  # of the time from the first to the last row of metrics
_WRITTEN_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When to kill."""

    first_row_s: float  # how long an attempt takes until its first row of metrics
    into_s: tuple[float, ...]  # ascending seconds of training, counted from that row, over all attempts


def draw_moments(timed: RunFolder, kills: int, seed: int, *, sooner: float = 1.0) -> Moments:
    """Draw the moments of so many kills from a seed, within the training time of the finished run ``timed``.

    ``sooner``: factor of the drawn moments.
    """
    entries = journal.read(timed.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row.time_s for row in metrics_file.rows(timed.path / run_folder.METRICS) if row.time_s >= begun]
    first, last = (min(rows), max(rows)) if len(rows) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    shares = sorted(chance.uniform(_EARLIEST, _LATEST) for _ in range(kills))
    return Moments(first_row_s=first - begun, into_s=tuple(share * (last - first) * sooner for share in shares))


class Killer:
    """Kills the only run below ``runs_dir`` once in each attempt, further and further into the training.

    An attempt goes on where its checkpoint was saved; without a checkpoint it trains what the attempt before it did.
    ``awaits_checkpoint``: the last kill waits until there is a checkpoint.
    """

    def __init__(
        self, runs_dir: Path, moments: Moments, say: Callable[[str], None], *, awaits_checkpoint: bool
    ) -> None:
        self.kills: list[Kill] = []
        self._runs_dir, self._moments, self._say = runs_dir, moments, say
        self._remaining_s = [*moments.into_s]
        self._awaits_checkpoint = awaits_checkpoint
        self._killed_at = 0.0  # unix time of the last kill
        self._began_s = 0.0  # seconds of training before this attempt
        self._saved_at = 0.0  # unix time at which the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command_pid: int) -> None:
        """Once it is time, kill the ranks, or stop the command if they run on other computers."""
        if not self._remaining_s or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at = entries[-1].time
        trains_from = started_at + self._moments.first_row_s
        if time.time() < trains_from + max(0.0, self._remaining_s[0] - self._began_s):
            return
        if self._awaits_checkpoint and len(self._remaining_s) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command_pid, signal.SIGTERM)
        self._remaining_s.pop(0)
        self._began_s += saved_s(run_dir, trains_from)
        self.kills.append(_kill(run_dir, after_s))
        self._say(f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s")

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if there is a checkpoint that was seen half a second ago, so that it is completely written."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def look_again(self) -> None:
        """Add the newest checkpoint to the last kill, if other hosts have sent one only after it."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _kill(self.run_dir, self.kills[-1].after_s)


def saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 without a later one."""
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
    """Return the newest checkpoint of a run in its folder, or None."""
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return checkpoints.newest_of_script(run_dir, settings)
    return None
