"""Start a plan, follow it to the end of every node, and leave no process behind."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO, TYPE_CHECKING

from pipeline.cluster import earlier, failures, starts
from pipeline.cluster.agent.running.saved import newest_change
from pipeline.cluster.checkpoint_fetch import CheckpointFetch
from pipeline.cluster.events import AllSucceeded, CheckpointSaved, Doing, Emit, HostNote, Notice, ShownLine
from pipeline.cluster.failures import Tracebacks, is_worth_showing
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec
from pipeline.cluster.stalls import Verdict, Watch
from pipeline.core.errors import TrainingError
from pipeline.core.files import write_json
from pipeline.core.processes.signals import Interruptible
from pipeline.core.specs import (
    Event,
    LaunchPlan,
    LogLine,
    MetricsLine,
    NodeAnswers,
    NodeExit,
    NodeFacts,
    NodeLost,
    NodeSilent,
)
from pipeline.runs import journal, ranks
from pipeline.runs.checkpoints import go_on_from_checkpoint, newest_step, set_aside_of_script
from pipeline.runs.metrics_file import cut_torn_line
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, NodeLook

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Following, Launcher

STOP_S = 8.0  # agents: TERM, 3 s, KILL; the rest of the promised 10 s is for the network
RANK_ROWS_S = 2.0  # between two writes of the ranks' state
_POLL_S = 0.5
_MAX_ASKED_ABOUT = 3  # lost hosts, because the others have little time to answer
_COLLECT_AGAIN_S = 2.0
_ASK_AGAIN_S = 5.0  # between two requests to the other hosts
_ANSWER_S = 3.5  # how long their answers are waited for

Ends = dict[str, NodeExit | NodeLost]


class RunningAttempt:
    """One plan from its start to the end of all nodes."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        spec: AttemptSpec,
        facts: list[NodeFacts],
        emit: Emit,
        signals: Interruptible,
    ) -> None:
        self.launcher, self.plan, self.pack, self.facts = launcher, plan, spec.pack, facts
        self.run_dir, self._emit, self.signals = spec.run_dir, emit, signals
        self.log_dir = spec.run_dir / run_folder.ATTEMPTS / str(plan.attempt)
        self.ends: Ends = {}
        self._tracebacks = Tracebacks(self._show_line)
        self.watch = Watch(
            hosts={node.address: node.host for node in plan.nodes},
            stall_s=plan.stall_s,
            collective_timeout_s=plan.collective_timeout_s,
        )
        self.notes: list[str] = []  # about ranks and connections, for `doit status`
        self.verdict: Verdict | None = None  # on a stall
        self.reached: dict[str, dict[str, str]] = {}  # silent host → other host → whether that one reaches it
        self.gone: tuple[str, ...] = ()  # lost hosts that a new connection didn't reach either
        self.unstopped = ""  # message about hosts that could not be stopped
        self.silent: dict[str, NodeSilent] = {}  # hosts that don't answer at the moment
        self._waited_for: set[str] = set()  # silent hosts that were reported
        self._replaceable = spec.replaceable
        self._asked_at = 0.0  # time of the last request to reach the silent hosts
        self._fetch = CheckpointFetch(
            launcher, plan, spec.run_dir, lambda: emit(CheckpointSaved()), self._report_not_fetched
        )
        self._files = ExitStack()
        self._logs: dict[str, IO[str]] = {}
        self._lines_to_skip: dict[str, int] = {}  # host → lines of its log that another command has shown
        self._metrics: IO[str] | None = None
        self._metrics_at = 0
        self._checked_at = self._rows_at = 0.0
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
        self._show_line(LogLine(host=self.plan.nodes[0].host, rank=None, text=text))

    def run(self, *, started: bool = False) -> None:
        """Run the plan to the end of all nodes.

        Raises HostError, Killed. ``started``: only follow, because another command has started the plan.
        """
        with self._files:
            self._open(started=started)
            try:
                if not started:
                    self._emit(Doing(what=self.launcher.starting))
                    self.launcher.start(self.plan, self.pack, self.facts, self.run_dir)
                    for note in self.launcher.notes():
                        self._emit(HostNote(text=note))
                self._follow()
            except BaseException:
                self.signals.hold()
                self._stop_unended()
                self._finish(keep_final=False)
                raise
        self.signals.hold()
        if not self.ended_well:
            self._stop_unended()
        else:
            self._tracebacks.release()
            self._report_slow_ranks()
            self._emit(AllSucceeded())
        self._finish(keep_final=self.ended_well)

    def _open(self, *, started: bool) -> None:
        """Open the log and metrics files.

        Hosts send the logs of a running attempt again from the beginning, so count the lines that another command has
        shown already.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for node in self.plan.nodes:
            path = self.log_dir / f"{node.host}.log"
            if started and path.exists():
                self._lines_to_skip[node.host] = path.read_bytes().count(b"\n")
            mode = "w" if started else "a"
            # line by line: of a command that is killed, the next one reads what earlier attempts printed
            self._logs[node.host] = self._files.enter_context(path.open(mode, buffering=1, encoding="utf-8"))
        if not self.launcher.capabilities.shares_run_dir:
            path = self.run_dir / run_folder.METRICS
            if started:
                cut_torn_line(path)
            if not started and (kept := set_aside_of_script(self.run_dir, self.plan.attempt)) is not None:
                self._show(kept)
            for warning in () if started else go_on_from_checkpoint(self.run_dir):
                self._show(f"warning: {warning}")
            self._metrics = self._files.enter_context(path.open("a", encoding="utf-8"))
            self._metrics_at = path.stat().st_size

    def _follow(self) -> None:
        """Handle events until every node has ended, or until STOP_S after the first failure."""
        self._followed = True
        self._emit(self.plan)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        following = self.launcher.follow(self.plan, events.put, metrics_at=self._metrics_at)
        deadline: float | None = None
        pruning = self.launcher.capabilities.shares_run_dir  # with a shared folder, rank 0 sees the file itself
        try:
            while len(self.ends) < self.plan.nnodes and (deadline is None or time.monotonic() < deadline):
                self._handle_event(events)
                self.signals.check()
                self._check_folder()
                if not pruning and (self.run_dir / run_folder.PRUNE).exists():
                    following.prune()
                    pruning = True
                if deadline is None:
                    self._check_for_stall(following)
                self._check_silent_hosts(following, is_over=deadline is not None or self._has_failed)
                if deadline is None and self._has_failed:
                    self._ask_about_lost(following)
                    following.stop()
                    deadline = time.monotonic() + STOP_S
        except BaseException:
            self.signals.hold()
            following.stop()
            deadline = time.monotonic() + STOP_S
            while len(self.ends) + len(self.silent) < self.plan.nnodes and time.monotonic() < deadline:
                self._handle_event(events, quiet=True)
            raise
        finally:
            following.close()

    def _check_for_stall(self, following: Following) -> None:
        """If no rank moves any more, set ``verdict``, which ends the run, and report which rank holds the others up."""
        now = time.monotonic()
        slow = self.watch.slow_network(now, partial(following.look, None))
        if slow is not None:
            self.notes.append(slow.text)
            self._show_line(LogLine(host=slow.host, rank=slow.rank, text=slow.text))
        self.verdict = self.watch.check(now, following.look)
        if self.verdict is not None:
            self.notes.append(self.verdict.text)
            self._emit(self.verdict)
            self._rows_at = 0.0
            self._write_rank_rows()
            self._show_line(LogLine(host=self.verdict.host, rank=self.verdict.rank, text=self.verdict.text))

    def _check_silent_hosts(self, following: Following, *, is_over: bool) -> None:
        """Decide whether the silent hosts are lost.

        They are if the run is over (``is_over``), or if no other host reaches them. Otherwise the attempt waits for
        them, because their ranks may train on until their lease ends.
        """
        others = [node.host for node in self.plan.nodes if node.host not in self.silent and node.host not in self.ends]
        now = time.monotonic()
        if self.silent and not is_over and others and now - self._asked_at > _ASK_AGAIN_S:
            self._asked_at = now
            self._ask_to_reach(following, [*self.silent])
        is_late = now - self._asked_at > _ANSWER_S
        answered = set[str]().union(*self.reached.values())
        witnesses = [host for host in others if host in answered] if is_late else others
        for host in [*self.silent]:
            is_alone = not others and self.plan.nnodes == 1
            not_awaited = failures.ssh_server(self.plan, host) is None or (is_alone and self._replaceable)
            if is_over or not_awaited or failures.is_dead(self.reached.get(host, {}), witnesses):
                if not is_over:  # at once, as stopping the others takes seconds
                    self._report_host(host, "the attempt is ended")
                self._record_end(NodeLost(host=host, reason=self.silent[host].reason))
        if is_late or answered.issuperset(others):
            self._report_silence()

    def _report_silence(self) -> None:
        """Report once for each silent host that it is waited for, and how long."""
        new = [host for host in self.silent if host not in self._waited_for]
        for host in new:
            ends = time.strftime("%H:%M:%S", time.localtime(time.time() + self.plan.lease_s))
            until = f"{ends} (cluster.lease_s={self.plan.lease_s:g})"
            self._report_host(host, f"its ranks may train on until {until}, so it is waited for")
        if new:
            self._waited_for.update(new)
            self._report_wait()

    def _report_host(self, host: str, what_follows: str) -> None:
        line = f"{host} {self.silent[host].reason}; {what_follows}"
        self._emit(Notice(text="\n".join([line, *failures.lines_on_lost({host: self.reached.get(host, {})})])))

    def _report_wait(self) -> None:
        hosts = ", ".join(sorted(self._waited_for))
        self._emit(Doing(what=f"waiting for {hosts}, whose ranks may train on" if hosts else None))

    def _ask_about_lost(self, following: Following) -> None:
        """Ask the other nodes whether they reach the lost ones, unless they have answered that already."""
        lost = [host for host, end in self.ends.items() if isinstance(end, NodeLost) and not end.answers]
        if not any(self.reached.values()) or not self.reached.keys() >= {*lost}:
            self._ask_to_reach(following, lost)

    def _ask_to_reach(self, following: Following, silent: Sequence[str]) -> None:
        servers = {host: failures.ssh_server(self.plan, host) for host in silent}
        known = [(host, server) for host, server in servers.items() if server is not None][:_MAX_ASKED_ABOUT]
        self.reached = {host: {} for host, _ in known}
        if known:
            following.look([server for _, server in known])

    def _report_not_fetched(self, error: OSError) -> None:
        why, host = error.strerror or error, self.plan.nodes[0].host
        self._show(f"WARNING: checkpoints can't be written to {self.run_dir} ({why}); they stay on {host}")

    def _collected(self, *, final: bool) -> bool:
        """Fetch the outputs; True if that succeeded.

        Raises TrainingError, OSError: only for final outputs. Their fetch is tried again for ``lease_s``.
        """
        try:
            fetched = self._collect_final() if final else self.launcher.collect(self.plan, self.run_dir, final=False)
            for note in self.launcher.notes():
                self._show(f"WARNING: {note}")
            return fetched
        except OSError as error:
            if final:
                raise
            self._report_not_fetched(error)
            return False

    def _collect_final(self) -> bool:
        until, is_reported = time.monotonic() + self.plan.lease_s, False
        while True:
            try:
                return self.launcher.collect(self.plan, self.run_dir, final=True)
            except TrainingError as error:
                if error.cause != "outputs" or time.monotonic() > until:
                    raise
                if not is_reported:
                    self._emit(Notice(text=f"{error.what}; it is tried again for {self.plan.lease_s:g} s"))
                is_reported = True
            self.signals.release()  # Ctrl-C loses nothing: the same command fetches the outputs
            time.sleep(_COLLECT_AGAIN_S)
            self.signals.hold()

    def _write_rank_rows(self) -> None:
        """Write the state of the ranks for `doit status`. A full disk or a removed folder shows elsewhere."""
        now = time.monotonic()
        if now - self._rows_at >= RANK_ROWS_S and self.watch.last:
            self._rows_at = now
            with suppress(OSError):
                usages = {host: node.usage for host, node in self.watch.nodes.items() if node.usage is not None}
                ranks.write(self.log_dir, ranks.rows_of(self.watch.last.values()), self.notes, usages)

    def _report_slow_ranks(self) -> None:
        slow = ranks.slow(ranks.rows_of(self.watch.last.values()))
        for note in slow:
            self._show(note)
        self.notes += slow
        self._rows_at = 0.0
        self._write_rank_rows()

    def _check_folder(self) -> None:
        """Raise TrainingError if the run folder no longer belongs to this attempt. Agents check a shared folder."""
        now = time.monotonic()
        if self.launcher.capabilities.shares_run_dir or now - self._checked_at < _POLL_S:
            return
        self._checked_at = now
        if not self._folder_is_ours():
            raise TrainingError(
                f"training failed: the run's folder {self.run_dir} was removed, or was taken by another command, while "
                "the run was going on",
                hint="the same command again",
            )
        starts.renew(self.plan.run_id, self.run_dir)

    def _folder_is_ours(self) -> bool:
        return journal.known_attempts(self.run_dir)[-1:] == [self.plan.run_id]

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
                self.watch.take_beat(event)
                self._write_rank_rows()
                saved = event.saved  # a step, for scripts a time
                if self.launcher.capabilities.shares_run_dir:
                    whole, folder = self.plan.outputs.whole, self.run_dir
                    saved = newest_change(str(folder)) if whole else newest_step(folder)
                if saved:
                    self._fetch.offer(saved)
            case NodeLook(peers=()):
                self.watch.take_look(event)
            case NodeLook():
                for answers, answer in zip(self.reached.values(), event.peers, strict=False):
                    answers[event.host] = answer
            case NodeSilent():
                self.silent[event.host] = event
                self._asked_at = 0.0
            case NodeAnswers():
                self.silent.pop(event.host, None)
                if event.host in self._waited_for:
                    self._waited_for.remove(event.host)
                    text = f"{event.host} answers again, after {event.silent_s:.0f} s; nothing is lost"
                    self._emit(Notice(text=text))
                    self._report_wait()
            case NodeExit() | NodeLost():
                self._record_end(event)

    def _take_line(self, line: LogLine, *, quiet: bool) -> None:
        rank = "-" if line.rank is None else line.rank
        self._logs[line.host].write(f"{rank} | {line.text}\n")
        self._lines_to_skip[line.host] = self._lines_to_skip.get(line.host, 0) - 1
        if is_worth_showing(line) and not quiet and self._lines_to_skip[line.host] < 0:
            self._tracebacks.add(line)

    def _record_end(self, end: NodeExit | NodeLost) -> None:
        """Record how a node ended."""
        self.silent.pop(end.host, None)
        self.ends[end.host] = end
        self.watch.remove(end.host)
        kind = {"event": type(end).__name__}
        if self._folder_is_ours():  # don't make a removed folder again
            write_json(self.log_dir / f"{end.host}.exit.json", {**kind, **dataclasses.asdict(end)})

    def _stop_unended(self) -> None:
        """Stop nodes whose end isn't known by a separate request, which also keeps a late start from beginning."""
        ended = {host for host, end in self.ends.items() if isinstance(end, NodeExit)}
        if len(ended) == self.plan.nnodes:
            return
        failures = self.launcher.stop(self.plan.run_key, self.run_dir, start=self.plan.run_id)
        lost = {host for host, end in self.ends.items() if isinstance(end, NodeLost)}
        self.gone = tuple(host for host, why in failures.items() if host in lost and not why.startswith(NOT_ENDED))
        self.unstopped = "".join(
            f"\n{host}{_not_stopped(why, self.plan.lease_s)}" for host, why in failures.items() if host not in ended
        )
        self.signals.left = self.unstopped

    def _finish(self, *, keep_final: bool) -> None:
        """Fetch the outputs (after a failure only checkpoints) and clear the nodes.

        Files that could not be fetched stay there for the next attempt (pipeline/cluster/earlier.py). If no end was
        recorded, the run folder may be renamed or unmounted or its disk full, so nothing is cleared.
        """
        self._fetch.wait(copied=not keep_final)
        was_recorded = bool(self.ends) and self._folder_is_ours()
        if not was_recorded and self._followed and not self.launcher.capabilities.shares_run_dir:
            return
        if was_recorded and not self._collected(final=keep_final):
            return
        if was_recorded and not keep_final:
            self._emit(CheckpointSaved())
        self.launcher.clean(self.plan)
        if was_recorded and not self.launcher.capabilities.shares_run_dir:
            earlier.mark_collected(self.plan, self.run_dir)


def _not_stopped(why: str, lease_s: float) -> str:
    if why.startswith(NOT_ENDED):
        return f": {why}"
    return (
        f" could not be asked to stop ({why.partition(chr(10))[0]}); its agent ends the run by itself at once when "
        f"it is cut off from every other node, else {lease_s:g} s after the last contact"
    )
