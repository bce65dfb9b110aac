"""Start a rendered plan, follow it to the end of every node, and leave no process behind.

While the nodes run, their events go to the log files, metrics.jsonl, the stall watch, and by ``emit`` to whoever
listens. New checkpoints are fetched meanwhile, so that even the loss of rank 0's disk costs only the steps since then.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pipeline.cluster import starts
from pipeline.cluster.agent.node import newest_write_ms
from pipeline.cluster.agent.requests import ExamineOrder
from pipeline.cluster.attempt.failures import HeldTracebacks, is_worth_showing
from pipeline.cluster.attempt.silent_hosts import SilentHosts
from pipeline.cluster.attempt.stall_watch import StallWatch
from pipeline.cluster.events import (
    AllSucceeded,
    CheckpointSaved,
    Doing,
    Emit,
    Event,
    HostNote,
    LogLine,
    MetricsLine,
    NodeAnswers,
    NodeExit,
    NodeLost,
    NodeSilent,
    Notice,
    ShownLine,
    Verdict,
)
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec
from pipeline.core.errors import TrainingError
from pipeline.core.files import write_json
from pipeline.core.processes import threads
from pipeline.core.processes.signals import Interruptible
from pipeline.core.specs import LaunchPlan, Outputs
from pipeline.runs import checkpoints, journal, ranks
from pipeline.runs.checkpoints import cut_to_newest_checkpoint, newest_step
from pipeline.runs.metrics_file import cut_torn_line
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, NodeExamination
from trainers.contract.host_facts import HostFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher, LiveStreams

STOP_S = 8.0  # limit for all nodes to stop: agents need 3 s (TERM, KILL), and 10 s in all are promised
RANK_ROWS_S = 2.0  # between two writes of the ranks' state for `doit status`
_POLL_S = 0.5
_COLLECT_AGAIN_S = 2.0


class RunningAttempt:
    """One plan from its start to the end of all nodes. Call ``run`` once, then read the attributes."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        spec: AttemptSpec,
        facts: list[HostFacts],
        emit: Emit,
        signals: Interruptible,
    ) -> None:
        self._launcher, self.plan, self._pack, self._facts = launcher, plan, spec.pack, facts
        self._run_dir, self._emit, self._signals = spec.run_dir, emit, signals
        self.log_dir = spec.run_dir / run_folder.ATTEMPTS / str(plan.attempt)
        self.ends: dict[str, NodeExit | NodeLost] = {}  # host → how its part ended
        self._tracebacks = HeldTracebacks(self._show_line)
        self._watch = StallWatch(
            hosts={node.address: node.host for node in plan.nodes},
            stall_s=plan.stall_s,
            collective_timeout_s=plan.collective_timeout_s,
        )
        self._notes: list[str] = []  # about ranks and connections, for `doit status`
        self.verdict: Verdict | None = None  # on a stall
        self.gone: tuple[str, ...] = ()  # lost hosts that a new connection didn't reach either
        self.unstopped = ""  # message about hosts that could not be stopped
        self.silent = SilentHosts(plan, emit, replaceable=spec.replaceable)
        self._fetch = CheckpointFetch(
            launcher, plan, spec.run_dir, lambda: emit(CheckpointSaved()), self._report_not_fetched
        )
        self._files = ExitStack()  # closes the logs and metrics.jsonl
        self._logs: dict[str, IO[str]] = {}
        self._lines_to_skip: dict[str, int] = {}  # host → lines of its log that another command has shown
        self._metrics: IO[str] | None = None  # metrics.jsonl; None: the ranks write it here themselves
        self._metrics_at = 0  # bytes of metrics.jsonl that are here at the start
        self._checked_at = self._rows_at = 0.0  # monotonic: last check of the run folder, last write of rank rows
        self._followed = False

    @property
    def ended_well(self) -> bool:
        """True if all nodes have ended with exit code 0."""
        return len(self.ends) == self.plan.nnodes and not self._has_failed

    @property
    def _has_failed(self) -> bool:
        ended_badly = (isinstance(end, NodeLost) or end.code != 0 for end in self.ends.values())
        return self.verdict is not None or any(ended_badly)

    def _show_line(self, line: LogLine) -> None:
        self._emit(ShownLine(line=line))

    def _show(self, text: str) -> None:
        """Show a remark of the controller among the lines of the first host."""
        self._show_line(LogLine(host=self.plan.nodes[0].host, rank=None, text=text))

    def run(self, *, started_elsewhere: bool = False) -> None:
        """Run the plan (``started_elsewhere``: only follow it) to the end of all nodes. Raises HostError, Killed."""
        with self._files:
            self._open(started_elsewhere=started_elsewhere)
            try:
                if not started_elsewhere:
                    self._emit(Doing(what=self._launcher.starting))  # a function: its answer changes while it starts
                    self._launcher.start(self.plan, self._pack, self._facts, self._run_dir)
                    for note in self._launcher.notes():
                        self._emit(HostNote(text=note))
                self._follow()
            except BaseException:
                self._signals.hold()
                self._stop_unended()
                self._finish(keep_final=False)
                raise
        self._signals.hold()
        if not self.ended_well:
            self._stop_unended()
        else:
            self._tracebacks.release()
            self._report_slow_ranks()
            self._emit(AllSucceeded())
        self._finish(keep_final=self.ended_well)

    def _open(self, *, started_elsewhere: bool) -> None:
        """Open the logs, which hosts send from the beginning: lines that another command has shown are skipped."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for node in self.plan.nodes:
            path = self.log_dir / f"{node.host}.log"
            if started_elsewhere and path.exists():
                self._lines_to_skip[node.host] = path.read_bytes().count(b"\n")
            mode = "w" if started_elsewhere else "a"
            # line by line: of a command that is killed, the next one reads what earlier attempts printed
            self._logs[node.host] = self._files.enter_context(path.open(mode, buffering=1, encoding="utf-8"))
        if not self._launcher.capabilities.shares_run_dir:
            self._open_metrics(started_elsewhere=started_elsewhere)

    def _open_metrics(self, *, started_elsewhere: bool) -> None:
        """Open metrics.jsonl so that it continues exactly where the ranks continue."""
        path = self._run_dir / run_folder.METRICS
        if started_elsewhere:
            cut_torn_line(path)  # the command that wrote it may have been killed within a line
        else:
            script = checkpoints.script_attempts(self._run_dir, checkpoints.settings_of(self._run_dir))
            if script is not None and (kept := script.set_aside(self.plan.attempt)) is not None:
                self._show(kept)
            for warning in cut_to_newest_checkpoint(self._run_dir):
                self._show(f"warning: {warning}")
        self._metrics = self._files.enter_context(path.open("a", encoding="utf-8"))
        self._metrics_at = path.stat().st_size

    def _follow(self) -> None:
        """Handle events until every node has ended. After the first failure stop the others, and wait up to STOP_S."""
        self._followed = True
        self._emit(self.plan)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        following = self._launcher.follow(self.plan, events.put, metrics_at=self._metrics_at)
        deadline: float | None = None
        prune_is_known = self._launcher.capabilities.shares_run_dir  # rank 0 sees the file itself
        try:
            while len(self.ends) < self.plan.nnodes and (deadline is None or time.monotonic() < deadline):
                self._handle_event(events)
                self._signals.check()
                self._check_folder()
                # the sweep gives this trial up: rank 0 ends it at the next epoch
                if not prune_is_known and (self._run_dir / run_folder.PRUNE).exists():
                    following.prune()
                    prune_is_known = True
                if deadline is None:
                    self._check_for_stall(following)
                is_over = deadline is not None or self._has_failed
                for end in self.silent.lost(following.examine, self.ends, is_over=is_over):
                    self._record_end(end)
                # the first failure: find out whether lost hosts are reachable, and stop all others
                if deadline is None and self._has_failed:
                    lost = [
                        end.host for end in self.ends.values() if isinstance(end, NodeLost) and not end.is_explained
                    ]
                    self.silent.ask_about(following.examine, lost)
                    following.stop()
                    deadline = time.monotonic() + STOP_S
        except BaseException:  # such as Ctrl-C: stop all, and record the ends that come in time
            self._signals.hold()
            following.stop()
            deadline = time.monotonic() + STOP_S
            while len(self.ends) + len(self.silent) < self.plan.nnodes and time.monotonic() < deadline:
                self._handle_event(events, quiet=True)
            raise
        finally:
            following.close()

    def _check_for_stall(self, following: LiveStreams) -> None:
        """If no rank moves any more, set ``verdict``, which ends the run, and report which rank holds the others up."""
        now = time.monotonic()
        slow_network, stall = self._watch.check_network(now), self._watch.check(now)
        for request in (slow_network, stall):
            if isinstance(request, ExamineOrder):
                following.examine(request)
        if isinstance(slow_network, Verdict):
            self._show_verdict(slow_network)
        if isinstance(stall, Verdict):
            self.verdict = stall
            self._emit(stall)
            self._show_verdict(stall)
            self._rows_at = 0.0  # write now
            self._write_rank_rows()

    def _show_verdict(self, verdict: Verdict) -> None:
        self._notes.append(verdict.text)
        self._show_line(LogLine(host=verdict.host, rank=verdict.rank, text=verdict.text))

    def _report_not_fetched(self, error: OSError) -> None:
        why, host = error.strerror or error, self.plan.nodes[0].host
        self._show(f"WARNING: checkpoints can't be written to {self._run_dir} ({why}); they stay on {host}")

    def _collect(self, *, final: bool) -> bool:
        """Fetch the outputs; True if that succeeded. Raises TrainingError, OSError: only for final outputs."""
        try:
            fetched = self._collect_final() if final else self._launcher.collect(self.plan, self._run_dir, final=False)
            for note in self._launcher.notes():
                self._show(f"WARNING: {note}")
            return fetched
        except OSError as error:
            if final:
                raise
            self._report_not_fetched(error)
            return False

    def _collect_final(self) -> bool:
        """Fetch the final outputs, again and again for lease_s if the host doesn't answer. Raises TrainingError."""
        until, is_reported = time.monotonic() + self.plan.lease_s, False
        while True:
            try:
                return self._launcher.collect(self.plan, self._run_dir, final=True)
            except TrainingError as error:
                if error.cause != "outputs" or time.monotonic() > until:
                    raise
                if not is_reported:
                    self._emit(Notice(text=f"{error.what}; it is tried again for {self.plan.lease_s:g} s"))
                is_reported = True
            self._signals.release()  # Ctrl-C loses nothing: the same command fetches the outputs
            time.sleep(_COLLECT_AGAIN_S)
            self._signals.hold()

    def _write_rank_rows(self) -> None:
        """Write the state of the ranks for `doit status`."""
        now = time.monotonic()
        if now - self._rows_at >= RANK_ROWS_S and self._watch.newest_beats:
            self._rows_at = now
            with suppress(OSError):  # other writes report a full disk or a removed folder
                usages = {host: node.usage for host, node in self._watch.nodes.items() if node.usage is not None}
                ranks.write(self.log_dir, ranks.rows_of(self._watch.newest_beats.values()), self._notes, usages)

    def _report_slow_ranks(self) -> None:
        slow = ranks.slow(ranks.rows_of(self._watch.newest_beats.values()))
        for note in slow:
            self._show(note)
        self._notes += slow
        self._rows_at = 0.0
        self._write_rank_rows()

    def _check_folder(self) -> None:
        """Raise TrainingError if the run folder no longer belongs to this attempt. Agents check a shared folder."""
        now = time.monotonic()
        if self._launcher.capabilities.shares_run_dir or now - self._checked_at < _POLL_S:
            return
        self._checked_at = now
        if not self._folder_is_ours():
            raise TrainingError(
                f"training failed: the run's folder {self._run_dir} was removed, or was taken by another command, "
                "while the run was going on",
                hint="the same command again",
            )
        starts.renew(self.plan.run_id, self._run_dir)

    @property
    def existing_log_dir(self) -> Path | None:
        """The folder of the logs; None if the run folder was removed."""
        return self.log_dir if (self._run_dir / run_folder.CONFIG).exists() else None

    def _folder_is_ours(self) -> bool:
        return journal.known_attempts(self._run_dir)[-1:] == [self.plan.run_id]

    def _handle_event(self, events: queue.SimpleQueue[Event], *, quiet: bool = False) -> None:
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            return
        self._emit(event)
        match event:
            case LogLine():
                self._take_line(event, quiet=quiet)
            case MetricsLine():
                if self._metrics is not None:
                    self._metrics.write(event.text + "\n")
                    self._metrics.flush()
            case NodeBeat():
                self._watch.take_beat(event)
                self._write_rank_rows()
                saved = event.saved  # a step, for scripts a time
                # ranks write to a shared run folder directly: "fetching" only copies from there to the mirror
                if self._launcher.capabilities.shares_run_dir:
                    whole, folder = self.plan.outputs.whole, self._run_dir
                    saved = newest_write_ms(str(folder)) if whole else newest_step(folder)
                if saved:
                    self._fetch.offer(saved)
            case NodeExamination(peers=()):
                self._watch.take_examination(event)
            case NodeExamination() | NodeSilent() | NodeAnswers():
                self.silent.take(event)
            case NodeExit() | NodeLost():
                self._record_end(event)

    def _take_line(self, line: LogLine, *, quiet: bool) -> None:
        rank = "-" if line.rank is None else line.rank
        self._logs[line.host].write(f"{rank} | {line.text}\n")
        self._lines_to_skip[line.host] = self._lines_to_skip.get(line.host, 0) - 1
        if is_worth_showing(line) and not quiet and self._lines_to_skip[line.host] < 0:
            self._tracebacks.add(line)

    def _record_end(self, end: NodeExit | NodeLost) -> None:
        self.silent.forget(end.host)
        self.ends[end.host] = end
        self._watch.remove(end.host)
        kind = {"event": type(end).__name__}
        if self._folder_is_ours():  # don't make a removed folder again
            write_json(self.log_dir / f"{end.host}.exit.json", {**kind, **dataclasses.asdict(end)})

    def _stop_unended(self) -> None:
        """Stop nodes whose end isn't known, by a new request, which also refuses a start that is still on its way."""
        ended = {host for host, end in self.ends.items() if isinstance(end, NodeExit)}
        if len(ended) == self.plan.nnodes:
            return
        why_unstopped = self._launcher.stop(self.plan.run_key, self._run_dir, start=self.plan.run_id)
        lost = {host for host, end in self.ends.items() if isinstance(end, NodeLost)}
        self.gone = tuple(host for host, why in why_unstopped.items() if host in lost and not why.startswith(NOT_ENDED))
        self.unstopped = "".join(
            f"\n{host}{_not_stopped(why, self.plan.lease_s)}"
            for host, why in why_unstopped.items()
            if host not in ended
        )
        self._signals.message_end = self.unstopped

    def _finish(self, *, keep_final: bool) -> None:
        """Fetch the outputs (after a failure only checkpoints) and remove the nodes' folders of this start."""
        self._fetch.wait(copied=not keep_final)
        shares_run_dir = self._launcher.capabilities.shares_run_dir
        if not (self.ends and self._folder_is_ours()):
            # nothing can be fetched, so folders on hosts stay if ranks may have saved checkpoints there
            if shares_run_dir or not self._followed:
                self._launcher.clean(self.plan)
            return
        if not self._collect(final=keep_final):  # what isn't fetched stays there for a later attempt
            return
        if not keep_final:
            self._emit(CheckpointSaved())
        self._launcher.clean(self.plan)
        if not shares_run_dir:
            starts.mark_collected(self.plan, self._run_dir)


def _not_stopped(why: str, lease_s: float) -> str:
    if why.startswith(NOT_ENDED):
        return f": {why}"
    return (
        f" could not be asked to stop ({why.partition(chr(10))[0]}); its agent ends the run by itself at once when "
        f"it is cut off from every other node, else {lease_s:g} s after the last contact"
    )


_COPY_S = 5.0  # limit at the end for a copy to the mirror
_PAUSE_FACTOR = 10  # times a fetch's duration until the next one, as ssh's encryption takes rank 0's processor time


class CheckpointFetch:
    """Fetches checkpoints in a thread, one at a time, at most every ``plan.checkpoint_fetch_s`` seconds (0: never)."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        run_dir: Path,
        on_fetched: Callable[[], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._launcher, self._plan, self._run_dir, self._every_s = launcher, plan, run_dir, plan.checkpoint_fetch_s
        self._on_fetched, self._on_failed = on_fetched, on_failed
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self._fetched = threading.Event()  # the fetch under way is over; its copy may still go on
        self._step, self._next_at = 0, time.monotonic() + self._every_s  # newest step that is here

    def offer(self, step: int) -> None:
        """Fetch the checkpoint of ``step``, the newest on rank 0's host, if it is new and the pause is over."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._every_s and step > self._step and not is_busy and time.monotonic() >= self._next_at:
            self._fetched.clear()
            self._thread = threads.start(self._fetch, step, name="checkpoints", on_error=lambda _: None)

    def wait(self, *, copied: bool = True) -> None:
        """Wait for the end of a fetch. ``copied``: also for its copy to the mirror, else at most ``_COPY_S``."""
        if self._thread is not None:
            self._fetched.wait()
            self._thread.join(None if copied else _COPY_S)

    def _fetch(self, step: int) -> None:
        began = time.monotonic()
        try:
            fetched = self._launcher.collect(of_step(self._plan, step), self._run_dir, final=False)
            self._has_failed = False
        except OSError as error:
            fetched = False
            if not self._has_failed:  # report only the first failure of several in a row
                self._on_failed(error)
            self._has_failed = True
        finally:
            self._fetched.set()
        if fetched:
            self._step = step
            self._on_fetched()
        now = time.monotonic()
        self._next_at = now + max(self._every_s, _PAUSE_FACTOR * (now - began))


def of_step(plan: LaunchPlan, step: int) -> LaunchPlan:
    """Return the plan with a single checkpoint as its outputs."""
    if plan.outputs.whole:  # a script: ``step`` is a time in ms, and all files up to this time are the checkpoint
        folder = ("checkpoints",)
        outputs = Outputs(resume=folder, final=(), needed=folder, whole=folder, until_s=step / 1000)
        others = folder if plan.outputs.others else ()
        outputs = dataclasses.replace(outputs, others=others, work=plan.outputs.work)
        return dataclasses.replace(plan, outputs=outputs)
    name = f"checkpoints/step-{step:08d}"
    files = (f"{name}.pt", f"{name}.json", "checkpoints/best.*")
    outputs = Outputs(resume=files, final=(), needed=(f"{name}.json",))
    return dataclasses.replace(plan, outputs=outputs)
