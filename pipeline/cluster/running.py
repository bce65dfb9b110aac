"""A started plan, followed to the end of every node; afterwards nothing of it is left behind."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING

from pipeline.cluster import earlier, failures, starts
from pipeline.cluster.agent.running.look import newest_change
from pipeline.cluster.checkpoint_fetch import CheckpointFetch
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
from pipeline.runs import journal, status
from pipeline.runs.checkpoints import go_on_from_checkpoint, newest_step, set_aside_of_script
from pipeline.runs.metrics_file import cut_torn_line
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat, NodeLook

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Following, Launcher

STOP_S = 8.0  # agents: TERM, 3 s, KILL; the rest of the promised 10 s is for the way there
NOTE_S = 2.0
_POLL_S = 0.5
_MOST_QUESTIONED = 3  # lost hosts, as the others have little time to answer
_COLLECT_AGAIN_S = 2.0
_ASK_AGAIN_S = 5.0  # between two questions to the other hosts
_ANSWERED_S = 3.5  # after which missing answers are no longer waited for

Ends = dict[str, NodeExit | NodeLost]
Progress = LaunchPlan | Event | Verdict
"""What ``Watchers.on_event`` takes."""


def nothing(*_: object) -> None:
    """Do nothing: the default callback."""


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """The callbacks of an attempt.

    Attributes:
        on_line: takes the ranks' lines.
        on_note: takes each remark about the hosts, once.
        on_facts: takes the facts of the hosts, before anything starts.
        on_job: takes what a batch scheduler was asked for, and what it does.
        on_launch: called when a start begins, with a function that returns its progress (words that follow "still").
        on_start: called when all nodes have started.
        on_wait: takes the words for a wait for silent hosts ('': the wait is over).
        on_end: called when all nodes have ended well. Their hosts are free from then on, though the outputs are still
            to be fetched.
        on_checkpoint: called when the run folder has a new checkpoint, and after a bad end the last one (None: not
            wanted).
        on_event: takes the plan when it is followed, each event of its nodes, and the verdict on ranks that no longer
            move.
    """

    on_line: Callable[[LogLine], None]
    on_note: Callable[[str], None] = nothing
    on_facts: Callable[[Sequence[NodeFacts]], None] = nothing
    on_job: Callable[[str], None] = nothing
    on_launch: Callable[[Callable[[], str]], None] = nothing
    on_start: Callable[[], None] = nothing
    on_wait: Callable[[str], None] = nothing
    on_end: Callable[[], None] = nothing
    on_checkpoint: Callable[[], None] | None = None
    on_event: Callable[[Progress], None] = nothing


class RunningAttempt:
    """One plan on its way from its start to the end of all nodes."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        spec: AttemptSpec,
        facts: list[NodeFacts],
        watchers: Watchers,
        signals: Interruptible,
    ) -> None:
        self.launcher, self.plan, self.pack, self.facts = launcher, plan, spec.pack, facts
        self.run_dir, self.watchers, self.signals = spec.run_dir, watchers, signals
        self.log_dir = spec.run_dir / run_folder.ATTEMPTS / str(plan.attempt)
        self.ends: Ends = {}
        self._tracebacks = Tracebacks(watchers.on_line)
        self.watch = Watch(
            hosts={node.address: node.host for node in plan.nodes},
            stall_s=plan.stall_s,
            collective_timeout_s=plan.collective_timeout_s,
        )
        self.notes: list[str] = []  # on ranks and connections, as `doit status` shows them
        self.verdict: Verdict | None = None  # on a rank that held the others up
        self.lost: list[str] = []  # hosts that no longer answer and that the others were asked to reach
        self.seen: dict[str, tuple[str, ...]] = {}  # other host → its answer for each lost one
        self.gone: tuple[str, ...] = ()  # lost hosts that no new connection reached either
        self.left = ""  # message about hosts that could not be stopped
        self.silent: dict[str, NodeSilent] = {}  # hosts that don't answer at the moment
        self._waited_for: set[str] = set()  # silent hosts that were reported
        self._replaceable = spec.replaceable
        self._questioned_at = 0.0  # when the others were asked to reach the silent hosts
        self.order: list[str] = []  # hosts in the order of their ends
        self._on_checkpoint = watchers.on_checkpoint or nothing
        is_here = launcher.capabilities.shares_run_dir and watchers.on_checkpoint is None
        every_s = 0.0 if is_here else plan.checkpoint_fetch_s
        self._fetch = CheckpointFetch(launcher, plan, spec.run_dir, every_s, self._on_checkpoint, self._not_fetched)
        self._files = ExitStack()
        self._logs: dict[str, IO[str]] = {}
        self._shown: dict[str, int] = {}  # host → lines of its log that were shown already
        self._metrics: IO[str] | None = None
        self._metrics_at = 0
        self._checked_at = self._noted_at = 0.0
        self._followed = False

    @property
    def ended_well(self) -> bool:
        """True if all nodes have ended with exit code 0."""
        return len(self.ends) == self.plan.nnodes and not self._has_failed

    @property
    def _has_failed(self) -> bool:
        ended_badly = (isinstance(end, NodeLost) or end.code != 0 for end in self.ends.values())
        return self.verdict is not None or any(ended_badly)

    def _show(self, text: str) -> None:
        self.watchers.on_line(LogLine(host=self.plan.nodes[0].host, rank=None, text=text))

    def run(self, *, started: bool = False) -> None:
        """Run the plan to the end of all nodes.

        Args:
            started: another command has started it; only follow.

        Raises HostError, Killed.
        """
        with self._files:
            self._open(started=started)
            try:
                if not started:
                    self.watchers.on_launch(self.launcher.starting)
                    self.launcher.start(self.plan, self.pack, self.facts, self.run_dir)
                    for note in self.launcher.notes():
                        self.watchers.on_note(note)
                self._follow()
            except BaseException:
                self.signals.hold()
                self._stop_rest()
                self._finish(keep_final=False)
                raise
        self.signals.hold()
        if not self.ended_well:
            self._stop_rest()
        else:
            self._tracebacks.release()
            self._name_slow_ranks()
            self.watchers.on_end()
        self._finish(keep_final=self.ended_well)

    def _open(self, *, started: bool) -> None:
        """Open the files that are written here.

        The logs of an attempt that runs already are sent again from their beginning; lines that another command has
        shown are not shown again.
        """
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for node in self.plan.nodes:
            path = self.log_dir / f"{node.host}.log"
            if started and path.exists():
                self._shown[node.host] = path.read_bytes().count(b"\n")
            mode = "w" if started else "a"
            self._logs[node.host] = self._files.enter_context(path.open(mode, encoding="utf-8"))
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
        """Handle events until every node has ended, or, after the first bad end, until STOP_S have passed."""
        self._followed = True
        self.watchers.on_start()
        self.watchers.on_event(self.plan)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        following = self.launcher.follow(self.plan, events.put, metrics_at=self._metrics_at)
        deadline: float | None = None
        pruning = self.launcher.capabilities.shares_run_dir  # on a shared folder rank 0 sees the file itself
        try:
            while len(self.ends) < self.plan.nnodes and (deadline is None or time.monotonic() < deadline):
                self._next(events)
                self.signals.check()
                self._check_folder()
                if not pruning and (self.run_dir / run_folder.PRUNE).exists():
                    following.prune()
                    pruning = True
                if deadline is None:
                    self._judge(following)
                self._judge_silence(following, is_over=deadline is not None or self._has_failed)
                if deadline is None and self._has_failed:
                    self._ask_about_lost(following)
                    following.stop()
                    deadline = time.monotonic() + STOP_S
        except BaseException:
            self.signals.hold()
            following.stop()
            deadline = time.monotonic() + STOP_S
            while len(self.ends) + len(self.silent) < self.plan.nnodes and time.monotonic() < deadline:
                self._next(events, quiet=True)
            raise
        finally:
            following.close()

    def _judge(self, following: Following) -> None:
        """Where no rank moves any more, say which one holds the others up; the run is ended for it."""
        now = time.monotonic()
        slow = self.watch.slow_network(now, partial(following.look, None))
        if slow is not None:
            self.notes.append(slow.text)
            self.watchers.on_line(LogLine(host=slow.host, rank=slow.rank, text=slow.text))
        self.verdict = self.watch.check(now, following.look)
        if self.verdict is not None:
            self.notes.append(self.verdict.text)
            self.watchers.on_event(self.verdict)
            self._noted_at = 0.0
            self._note_ranks()
            self.watchers.on_line(LogLine(host=self.verdict.host, rank=self.verdict.rank, text=self.verdict.text))

    def _newest_saved(self) -> int:
        """Return ``NodeBeat.saved`` of the shared run folder. The names of a script's checkpoints aren't known."""
        return newest_change(str(self.run_dir)) if self.plan.outputs.whole else newest_step(self.run_dir)

    def _judge_silence(self, following: Following, *, is_over: bool) -> None:
        """Decide whether the silent hosts are lost.

        They are if the run is over without them (``is_over``), or if the other hosts see that they are dead. Otherwise
        their ranks may train on under their lease, and the attempt waits for them.
        """
        others = [node.host for node in self.plan.nodes if node.host not in self.silent and node.host not in self.ends]
        now = time.monotonic()
        if self.silent and not is_over and others and now - self._questioned_at > _ASK_AGAIN_S:
            self._questioned_at = now
            self._ask_to_reach(following, [*self.silent])
        late = now - self._questioned_at > _ANSWERED_S
        witnesses = [host for host in others if host in self.seen] if late else others
        for host in [*self.silent]:
            is_alone = not others and self.plan.nnodes == 1
            unknown = failures.ssh_server(self.plan, host) is None or (is_alone and self._replaceable)
            if is_over or unknown or failures.is_dead(host, self.lost, self.seen, witnesses):
                self._record_end(NodeLost(host=host, reason=self.silent[host].reason))
        if late or not others or set(others) <= self.seen.keys():
            self._report_silence()

    def _report_silence(self) -> None:
        """Report once for each silent host why it is waited for, and until when at most."""
        new = [host for host in self.silent if host not in self._waited_for]
        for host in new:
            ends = time.strftime("%H:%M:%S", time.localtime(time.time() + self.plan.lease_s))
            until = f"{ends} (cluster.lease_s={self.plan.lease_s:g})"
            line = f"{host} {self.silent[host].reason}; its ranks may train on until {until}, so it is waited for"
            at = self.lost.index(host) if host in self.lost else None
            seen = {} if at is None else {other: answers[at : at + 1] for other, answers in self.seen.items()}
            self.watchers.on_job("\n".join([line, *failures.seen_of_lost([host], seen)]))
        if new:
            self._waited_for.update(new)
            self._report_wait()

    def _report_wait(self) -> None:
        hosts = ", ".join(sorted(self._waited_for))
        self.watchers.on_wait(f"waiting for {hosts}, whose ranks may train on" if hosts else "")

    def _ask_about_lost(self, following: Following) -> None:
        """Let the other nodes check whether they reach the lost ones, unless they have answered that already."""
        lost = [host for host, end in self.ends.items() if isinstance(end, NodeLost) and not end.answers]
        if not self.seen or not set(lost) <= set(self.lost):
            self._ask_to_reach(following, lost)

    def _ask_to_reach(self, following: Following, silent: Sequence[str]) -> None:
        servers = {host: failures.ssh_server(self.plan, host) for host in silent}
        known = {host: server for host, server in servers.items() if server is not None}
        self.lost, self.seen = [*known][:_MOST_QUESTIONED], {}
        if self.lost:
            following.look([known[host] for host in self.lost])

    def _not_fetched(self, error: OSError) -> None:
        why, host = error.strerror or error, self.plan.nodes[0].host
        self._show(f"WARNING: checkpoints can't be brought to {self.run_dir} ({why}); they stay on {host}")

    def _is_collected(self, *, final: bool) -> bool:
        """Fetch the outputs. True if they are here.

        Raises TrainingError, OSError: only after a good end, where a broken connection is tried again for ``lease_s``.
        """
        try:
            fetched = self._collect_final() if final else self.launcher.collect(self.plan, self.run_dir, final=False)
            for note in self.launcher.notes():
                self._show(f"WARNING: {note}")
            return fetched
        except OSError as error:
            if final:
                raise
            self._not_fetched(error)
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
                    self.watchers.on_job(f"{error.what}; it is tried again for {self.plan.lease_s:g} s")
                is_reported = True
            self.signals.release()  # Ctrl-C loses nothing: the same command fetches them
            time.sleep(_COLLECT_AGAIN_S)
            self.signals.hold()

    def _note_ranks(self) -> None:
        """Write the state of the ranks for `doit status`; a full disk or a removed folder is reported elsewhere."""
        now = time.monotonic()
        if now - self._noted_at >= NOTE_S and self.watch.last:
            self._noted_at = now
            with suppress(OSError):
                usages = {host: node.usage for host, node in self.watch.nodes.items() if node.usage is not None}
                status.write_rank_rows(self.log_dir, status.rank_rows(self.watch.last.values()), self.notes, usages)

    def _name_slow_ranks(self) -> None:
        slow = status.slow_ranks(status.rank_rows(self.watch.last.values()))
        for note in slow:
            self._show(note)
        self.notes += slow
        self._noted_at = 0.0
        self._note_ranks()

    def _check_folder(self) -> None:
        """Check that the run folder is still this attempt's; on hosts with copies only the controller sees it.

        Raises TrainingError once it is gone.
        """
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
        starts.followed(self.plan.run_id, self.run_dir)

    def _folder_is_ours(self) -> bool:
        return journal.known_attempts(self.run_dir)[-1:] == [self.plan.run_id]

    def _next(self, events: queue.SimpleQueue[Event], quiet: bool = False) -> None:
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            for log in self._logs.values():
                log.flush()
            return
        self.watchers.on_event(event)
        if isinstance(event, LogLine):
            rank = "-" if event.rank is None else event.rank
            self._logs[event.host].write(f"{rank} | {event.text}\n")
            self._shown[event.host] = self._shown.get(event.host, 0) - 1
            if is_worth_showing(event) and not quiet and self._shown[event.host] < 0:
                self._tracebacks.add(event)
        elif isinstance(event, MetricsLine):
            if self._metrics is not None:
                self._metrics.write(event.text + "\n")
                self._metrics.flush()
        elif isinstance(event, NodeBeat):
            self.watch.heard(event)
            self._note_ranks()
            saved = self._newest_saved() if self.launcher.capabilities.shares_run_dir else event.saved
            if saved:
                self._fetch.heard(saved)
        elif isinstance(event, NodeLook):
            if event.peers:
                self.seen[event.host] = event.peers
            else:
                self.watch.seen(event)
        elif isinstance(event, NodeSilent):
            self.silent[event.host] = event
            self._questioned_at = 0.0
        elif isinstance(event, NodeAnswers):
            self.silent.pop(event.host, None)
            if event.host in self._waited_for:
                self._waited_for.remove(event.host)
                self.watchers.on_job(f"{event.host} answers again, after {event.silent_s:.0f} s; nothing is lost")
                self._report_wait()
        else:
            self._record_end(event)

    def _record_end(self, end: NodeExit | NodeLost) -> None:
        """Record how a node has ended."""
        self.silent.pop(end.host, None)
        self.ends[end.host] = end
        self.watch.ended(end.host)
        self.order.append(end.host)
        kind = {"event": type(end).__name__}
        if self._folder_is_ours():  # a removed folder isn't made again for this
            write_json(self.log_dir / f"{end.host}.exit.json", {**kind, **dataclasses.asdict(end)})

    def _stop_rest(self) -> None:
        """Stop by a separate command what the streams could not end; it also keeps a late start from beginning."""
        sure = {host for host, end in self.ends.items() if isinstance(end, NodeExit)}
        if len(sure) == self.plan.nnodes:
            return
        failures = self.launcher.stop(self.plan.run_key, self.run_dir, bar=self.plan.run_id)
        lost = {host for host, end in self.ends.items() if isinstance(end, NodeLost)}
        self.gone = tuple(host for host, why in failures.items() if host in lost and not why.startswith(NOT_ENDED))
        unsure = {host: why for host, why in failures.items() if host not in sure}
        self.left = "".join(f"\n{host}{_not_stopped(why, self.plan.lease_s)}" for host, why in unsure.items())
        self.signals.left = self.left

    def _finish(self, *, keep_final: bool) -> None:
        """Fetch the outputs (after a bad end: what a later attempt resumes from) and clear the nodes.

        What could not be fetched stays there, and the next attempt fetches it (pipeline/cluster/earlier.py). If no end
        was recorded, the run folder may be away for a while (renamed, not mounted) or its disk full, so nothing is
        cleared.
        """
        self._fetch.wait(copied=not keep_final)
        was_recorded = bool(self.ends) and self._folder_is_ours()
        if not was_recorded and self._followed and not self.launcher.capabilities.shares_run_dir:
            return
        if was_recorded and not self._is_collected(final=keep_final):
            return
        if was_recorded and not keep_final:
            self._on_checkpoint()
        self.launcher.clean(self.plan)
        if was_recorded and not self.launcher.capabilities.shares_run_dir:
            earlier.nothing_is_left(self.plan, self.run_dir)


def _not_stopped(why: str, lease_s: float) -> str:
    if why.startswith(NOT_ENDED):
        return f": {why}"
    return (
        f" could not be asked to stop ({why.partition(chr(10))[0]}); its agent ends the run by itself at once when "
        f"it is cut off from every other node, else {lease_s:g} s after the last word from here"
    )
