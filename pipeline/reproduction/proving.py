"""The proof that a run survives kills (`doit prove`): repeat it, kill the repetition at moments drawn from a seed, and
compare the results. If they differ, ``culprits`` finds out why.

Kills prove something only if a repetition resumed from a checkpoint that lay within the training."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    rows_by_attempt,
    state_kinds,
)
from pipeline.reproduction.reproduce import reproduce, train_again
from pipeline.runs import checkpoints, journal, metrics_file
from pipeline.runs.folder import RunFolder
from pipeline.runs.script_attempts import ScriptAttempts
from trainers.contract import run_folder
from trainers.script import workdir
from trainers.script.metrics.printed import parse_line, text_of_rank_0

FOLDER_SUFFIX = "-killed"
_INCOMPARABLE = "its results can't be compared to the bit"
_SHOWN = 4  # files in a line
_SHARE_FACTORS = (1.0, 0.7, 0.4)  # of the drawn moments; the next, sooner ones are tried if the kills proved nothing


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The result of a proof."""

    verdict: Verdict  # the comparison of the results
    evidence: Evidence  # with ``resumed_at`` of the recorded run if ``was_resumed``, else of the repetition
    unproven: str = ""  # why equal results prove nothing, or ''
    was_resumed: bool = False  # the recorded run itself was resumed; an undisturbed repetition differs from there on
    offer: str = ""  # advice: the argument that would give the script its checkpoint; or ''
    culprit: Culprit | None = None  # why the results differ; None if they are equal

    @property
    def proven(self) -> bool:
        return self.is_equal and not self.unproven

    @property
    def is_equal(self) -> bool:
        """True if results, metrics of each step and saved tensors are equal, as far as they can be compared."""
        return self.verdict.reproduced and self.evidence.is_equal


def prove(
    folder: RunFolder,
    *,
    root: Path,
    work: Path,
    data_dir: Path,
    kills: int,
    seed: int,
    say: Callable[[str], None],
    overrides: Sequence[str] = (),
) -> Proof:
    """Repeat a finished run below ``work``, kill it ``kills`` times, and compare.

    Args:
        root: the project.
        kills: 0 repeats the run undisturbed; only if that gives equal results, kills prove something.
        seed: from which the moments of the kills are drawn.
        overrides: new values for settings, as ``reproduce`` takes them.

    Raises PacelineError: the run can't be repeated, or failed for another reason than a kill.
    """
    runs_dir, settings = work / "runs", checkpoints.settings_of(folder.path)
    resumes = settings is not None and settings.resumes
    awaits_checkpoint = True  # at first it isn't known whether the script saves any
    steps = {row.step for row in metrics_file.rows(folder.path / run_folder.METRICS)}
    for factor in _SHARE_FACTORS:
        timed = _repetition(runs_dir) or folder  # the repetition before shows best how long one takes now
        moments = draw_moments(timed, kills, seed, factor=factor)
        killer = Killer(runs_dir, moments, say, awaits_checkpoint=awaits_checkpoint)
        verdict = reproduce(
            folder, root=root, work=work, data_dir=data_dir, overrides=overrides, keep=False, say=say,
            train=partial(_train, killer),
        )  # fmt: skip
        again = _repetition(runs_dir) or folder
        starts = first_steps(rows_by_attempt(again.path))
        resumes = resumes or bool(resumed_at(starts))  # a script may resume by itself, without {resume}
        awaits_checkpoint = resumes or any(kill.checkpoint for kill in killer.kills)
        unproven = _unproven(killer.kills, starts, steps, resumes=resumes)
        evidence = gather(folder, again, verdict, killer.kills)
        if not kills or not unproven or not evidence.is_equal:  # a difference says enough, whenever it was killed
            break
        say(f"{unproven}; once more, killed sooner")
    if killer.kills and len(killer.kills) < kills:
        say(f"killed {counted(len(killer.kills), 'time')} of {kills}: it had ended before it was time for the others")
    offer = ScriptAttempts(again.path, settings).resume_offer() if settings is not None else ""
    proof = Proof(verdict=verdict, evidence=evidence, unproven=unproven, offer=offer)
    # Nothing to explain: on other hardware metrics differ no more than is allowed (``within_spread``); or steps and
    # tensors are equal, and the results are equal or the run left none to compare (``nothing``).
    if verdict.within_spread or (evidence.is_equal and (verdict.reproduced or verdict.nothing)):
        return proof
    # The recorded run itself may have been resumed. If a repetition without kills differs from it only from the step of
    # that resume on, the resume is at fault.
    resumed, differs_at = resumed_at(first_steps(rows_by_attempt(folder.path))), evidence.differs_at
    if not killer.kills and resumed and differs_at is not None and differs_at >= resumed[0]:
        evidence = dataclasses.replace(evidence, resumed_at=resumed)
        proof = dataclasses.replace(proof, evidence=evidence, was_resumed=True)
        # the culprit is found as if this command had interrupted the recorded run
        evidence = dataclasses.replace(evidence, kills=(_interruption(folder.path),))
    return dataclasses.replace(proof, culprit=culprit(evidence))


def _repetition(runs_dir: Path) -> RunFolder | None:
    """Return the finished repetition, if there is one."""
    return next((RunFolder(path.parent) for path in runs_dir.glob(f"*/{run_folder.RESULT}")), None)


def _train(killer: Killer, words: Sequence[str], secrets: Mapping[str, str], *, project: Path, database: Path) -> int:
    """Train with kills, and start the same command again after each; return the exit code of the last one."""
    while True:
        earlier_kills = len(killer.kills)
        code = train_again(words, secrets, project=project, database=database, meanwhile=killer.kill_if_due)
        if code == 0 or len(killer.kills) == earlier_kills:
            return code
        killer.update_last_kill()


def _unproven(kills: Sequence[Kill], starts: Sequence[int | None], steps: Collection[int], *, resumes: bool) -> str:
    """Return why a killed repetition proves nothing, or ''.

    ``starts``: the first step that each attempt of the repetition logged, None for an attempt that logged none
    (``first_steps``). ``steps``: all steps that the recorded run logged. ``resumes``: the script resumes from its
    checkpoint, by {resume} or by itself. The lists in the comments are examples of ``starts`` with steps 0, 10, 20, 30.
    """
    if not kills:
        return "it had ended before it could be killed"
    # [0]: a single attempt, although there was a kill. [None] goes on to the last question: nothing was logged
    if len(starts) == 1 and starts != [None]:
        return "it was killed when its training had ended, so no attempt followed"
    # [0, None]: the last attempt logged nothing. [0, 30]: it began at the last step, so it has only evaluated again; of
    # two steps in all it may have trained the second. [None, None]: a script without metrics, which shows neither.
    trained_nothing = starts[-1:] == [None] or (len(steps) > 2 and starts[-1:] == [max(steps)])
    if len(starts) > 1 and trained_nothing and any(step is not None for step in starts):
        return "it was killed behind its last checkpoint, with nothing left to train"
    # [0, 0] without a checkpoint: it started over, which tests nothing of a script that could have resumed
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
        return "\n".join([head, *_about_resume(proof), *_not_compared(proof.verdict)])
    names = ",".join(item.field for item in proof.verdict.outcome if item.field != "steps")
    # the advice of one culprit has [NAME] in the place of the metrics that differ: program.ignore_metrics=[NAME]
    mend = culprit.mend.replace("[NAME]", f"[{names or 'NAME'}]")
    finding = [f"  culprit  {culprit.finding}", f"  mend     {mend}"]
    if evidence.kills:
        head = f"NOT PROVEN {run}: {killed}, it comes out otherwise"
        return "\n".join([head, *_about_resume(proof), *finding])
    steps = ", ".join(map(str, evidence.resumed_at))
    resumed = f"it was itself resumed, at step {steps}; an undisturbed run differs from step {evidence.differs_at} on"
    return "\n".join([f"NOT PROVEN {run}: {resumed if proof.was_resumed else 'it comes out otherwise'}", *finding])


def _not_compared(verdict: Verdict) -> list[str]:
    """Return a line about files that differ and are no results, such as logs and checkpoints that hold a time."""
    names = verdict.besides_differing
    differ = "differs" if len(names) == 1 else "differ"
    return [f"  besides  {first_of(names, _SHOWN)} {differ}, not compared to the bit"] if names else []


def _about_resume(proof: Proof) -> list[str]:
    """Return lines about the checkpoint that the repetition resumed from, and about what differs after it."""
    evidence, lines = proof.evidence, list[str]()
    # a script's checkpoint is shown as it lies in the project, not in the copy that the script runs in
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


# ------------------------------------------------------------------------------- kills
# Kills come at shares of the training. How far a run is shows in log lines and metrics that name an epoch or step;
# only without any, time decides, because a busy computer trains more slowly than when the run was made.
_EARLIEST, _LATEST = 0.1, 0.95  # shares of the training between which kills are drawn
_FEWEST_POSITIONS = 3  # with fewer, time decides
_WRITTEN_S = 0.5  # after this time a checkpoint is written completely
_LAST_ROWS_BYTES = 1 << 14

_Position = tuple[float, int]
"""(epoch, step) of a line with metrics."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """When to kill, and how the finished run went.

    Attributes:
        shares: the shares of the training, from 0 to 1 over all attempts, at which to kill, ascending.
        positions: the positions of all lines of the finished run, ascending; () if they can't be seen while it runs.
        are_rows: the positions are those of rows in metrics.jsonl, not of printed lines.
        first_row_s: seconds from the begin of an attempt to its first row of metrics.
        trained_s: seconds from the first row to the last one.
    """

    shares: tuple[float, ...]
    positions: tuple[_Position, ...] = ()
    are_rows: bool = False
    first_row_s: float
    trained_s: float


def draw_moments(timed: RunFolder, kills: int, seed: int, *, factor: float = 1.0) -> Moments:
    """Draw moments from a seed, within the training of the finished run ``timed``; ``factor`` multiplies the shares."""
    entries = journal.read(timed.journal)
    begun = max((entry.time for entry in entries if entry.state is State.RUNNING), default=0.0)
    ended = max((entry.time for entry in entries if entry.state is State.FINISHED), default=begun)
    rows = [row for row in metrics_file.rows(timed.path / run_folder.METRICS) if row.time_s >= begun]
    times = [row.time_s for row in rows]
    # without two rows it isn't known when the training began: half of the attempt is left to the start (imports, data)
    first, last = (min(times), max(times)) if len(times) > 1 else ((begun + ended) / 2, ended)
    chance = random.Random(seed)
    # one kill in each of ``kills`` equal parts: a state that changes late shows only after a late kill
    between = (_LATEST - _EARLIEST) / max(1, kills)
    shares = [(_EARLIEST + (number + chance.random()) * between) * factor for number in range(kills)]
    printed_by_log = [[*_printed_in(log)] for log in (timed.path / run_folder.ATTEMPTS).glob("*/*.log")]
    printed = [position for positions in printed_by_log for position in positions]
    # printed metrics reach metrics.jsonl only at the end of an attempt
    positions = {(0.0, row.step) for row in rows} if not printed else {one for one in printed if one is not None}
    shows_progress = len(positions) >= _FEWEST_POSITIONS and not any(map(_begins_anew, printed_by_log))
    return Moments(
        shares=tuple(shares),
        positions=tuple(sorted(positions)) if shows_progress else (),
        are_rows=not printed,
        first_row_s=first - begun,
        trained_s=last - first,
    )


def _begins_anew(positions: Sequence[_Position | None]) -> bool:
    """Whether epochs begin again within one attempt, as in each fold of a cross-validation."""
    epochs = [position[0] for position in positions if position is not None and position[0]]  # 0: perhaps unnamed
    return any(later < earlier for earlier, later in itertools.pairwise(epochs))


class Killer:
    """Kills the only run below ``runs_dir`` once in each attempt, at the moments' shares of the training.
    ``awaits_checkpoint``: the last kill waits until there is a checkpoint."""

    def __init__(
        self, runs_dir: Path, moments: Moments, say: Callable[[str], None], *, awaits_checkpoint: bool
    ) -> None:
        self.kills: list[Kill] = []
        self._runs_dir, self._moments, self._say = runs_dir, moments, say
        self._remaining = [*moments.shares]
        self._awaits_checkpoint = awaits_checkpoint
        self._progress = _Progress(moments, 0)
        self._killed_at = 0.0  # unix time of the last kill
        self._saved_s = 0.0  # seconds of training that checkpoints of earlier attempts contain
        self._saved_at = 0.0  # unix time at which the first checkpoint was seen

    @property
    def run_dir(self) -> Path | None:
        return next((path.parent for path in self._runs_dir.glob(f"*/{run_folder.JOURNAL}")), None)

    def kill_if_due(self, command_pid: int) -> None:
        """Kill the ranks if it is time; if they run on other computers, stop the command instead."""
        if not self._remaining or (run_dir := self.run_dir) is None:
            return
        entries = journal.read(run_dir / run_folder.JOURNAL)
        # only an attempt that has begun after the last kill
        if not entries or entries[-1].state is not State.RUNNING or entries[-1].time <= self._killed_at:
            return
        started_at, attempt = entries[-1].time, entries[-1].attempt
        trains_from = started_at + self._moments.first_row_s
        if self._share(run_dir, attempt, trains_from) < self._remaining[0]:
            return
        if self._awaits_checkpoint and len(self._remaining) == 1 and not self._has_checkpoint(run_dir):
            return
        self._killed_at = time.time()
        after_s = round(self._killed_at - started_at, 1)
        pids = find_processes(journal.attempt_prefix(run_dir.name, run_dir))
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
        if not pids:
            os.kill(command_pid, signal.SIGTERM)
        self._remaining.pop(0)
        self._saved_s += saved_s(run_dir, trains_from)
        self.kills.append(_describe_kill(run_dir, after_s))
        how = f"killed after {after_s} s ({len(pids)} processes)" if pids else f"stopped after {after_s} s"
        self._say(f"{how}; an ERROR below this line is the kill's")

    def _share(self, run_dir: Path, attempt: int, trains_from: float) -> float:
        """Return the share of the training that is done. ``trains_from``: unix time at which the first row is due."""
        if self._moments.positions:
            if self._progress.attempt != attempt:
                self._progress = _Progress(self._moments, attempt)
            return self._progress.share(run_dir)
        trained_s = time.time() - trains_from  # in this attempt
        return (self._saved_s + trained_s) / max(self._moments.trained_s, 1e-3) if trained_s >= 0.0 else 0.0

    def _has_checkpoint(self, run_dir: Path) -> bool:
        """Return True if a checkpoint has been there for half a second."""
        if newest_checkpoint(run_dir) is None:
            return False
        self._saved_at = self._saved_at or time.time()
        return time.time() - self._saved_at >= _WRITTEN_S

    def update_last_kill(self) -> None:
        """Add the newest checkpoint to the last kill, if another host has sent one only after the kill."""
        if self.kills and self.kills[-1].checkpoint is None and self.run_dir is not None:
            self.kills[-1] = _describe_kill(self.run_dir, self.kills[-1].after_s)


class _Progress:
    """Follows how far an attempt is, by the positions in its lines."""

    def __init__(self, moments: Moments, attempt: int) -> None:
        self.attempt = attempt
        self._moments = moments
        self._read_bytes: dict[Path, int] = {}
        self._positions_passed = 0  # of the finished run's positions
        self._last_passed_at = 0.0  # monotonic time at which the last one was seen
        self._between_s = moments.trained_s / max(1, len(moments.positions) - 1)  # from one position to the next

    def share(self, run_dir: Path) -> float:
        """Return the share of the training that is done. Between two positions, it grows with time."""
        seen = self._logged_in_attempt(run_dir) if self._moments.are_rows else self._printed_in_attempt(run_dir)
        passed = max((bisect_right(self._moments.positions, position) for position in seen), default=0)
        now = time.monotonic()
        if passed > self._positions_passed:
            if self._positions_passed:
                self._between_s = (now - self._last_passed_at) / (passed - self._positions_passed)
            self._positions_passed, self._last_passed_at = passed, now
        if not self._positions_passed:
            return 0.0
        to_next = min(1.0, (now - self._last_passed_at) / self._between_s) if self._between_s > 0.0 else 1.0
        return (self._positions_passed + to_next) / len(self._moments.positions)

    def _printed_in_attempt(self, run_dir: Path) -> Iterator[_Position]:
        """Yield the positions in lines of the logs that are new since the last call."""
        for log in (run_dir / run_folder.ATTEMPTS / str(self.attempt)).glob("*.log"):
            with suppress(OSError), log.open("rb") as file:
                file.seek(self._read_bytes.get(log, 0))
                whole, end, _ = file.read().rpartition(b"\n")  # the last line may still be written
                self._read_bytes[log] = self._read_bytes.get(log, 0) + len(whole) + len(end)
                yield from (one for one in _printed_positions(whole.split(b"\n")) if one is not None)

    def _logged_in_attempt(self, run_dir: Path) -> Iterator[_Position]:
        """Yield the steps of the last rows that this attempt wrote."""
        with suppress(OSError):
            rows = metrics_file.rows(run_dir / run_folder.METRICS, tail_bytes=_LAST_ROWS_BYTES)
            yield from ((0.0, row.step) for row in rows if row.attempt_number == self.attempt)


def _printed_in(log: Path) -> Iterator[_Position | None]:
    """Yield ``_printed_positions`` of a whole log. Raises OSError."""
    with log.open("rb") as file:
        yield from _printed_positions(line.rstrip(b"\n") for line in file)


def _printed_positions(lines: Iterable[bytes]) -> Iterator[_Position | None]:
    """Yield the position of each line of rank 0 with metrics; None for a line that names no epoch and no step."""
    for line in lines:
        parsed = parse_line(text_of_rank_0(line.decode(errors="replace")))
        if parsed.metrics:
            yield parsed.position


def saved_s(run_dir: Path, since: float) -> float:
    """Return the seconds from ``since`` (unix time) to the newest checkpoint; 0 if none was saved later."""
    newest = newest_checkpoint(run_dir)
    with suppress(OSError):  # removed meanwhile
        return max(0.0, newest.stat().st_mtime - since) if newest is not None else 0.0
    return 0.0


def _describe_kill(run_dir: Path, after_s: float) -> Kill:
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return Kill(after_s=after_s, checkpoint=None)
    return Kill(after_s=after_s, checkpoint=str(newest.relative_to(run_dir)), holds=state_kinds(newest))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest checkpoint in a run folder, or None."""
    settings = checkpoints.settings_of(run_dir)
    if settings is None:
        return max((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"), default=None)
    with suppress(OSError):  # removed meanwhile
        return ScriptAttempts(run_dir, settings).newest_checkpoint()
    return None
