"""One plan under way: started, followed to the end of every node, and nothing of it left behind."""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

from pipeline.cluster import earlier
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec, Launcher
from pipeline.cluster.tracebacks import Tracebacks
from pipeline.core.errors import TrainingError
from pipeline.core.files import write_json
from pipeline.core.signals import Interruptible
from pipeline.core.specs import PRUNE, Event, LaunchPlan, LogLine, MetricsLine, NodeExit, NodeFacts, NodeLost
from pipeline.runs import attempts
from pipeline.runs.checkpoints import go_on_from_checkpoint

STOP_S = 8.0  # agents: TERM, 3 s, KILL; the rest of the promised 10 s is for the way there
_POLL_S = 0.5

Ends = dict[str, NodeExit | NodeLost]


def nothing(*_: object) -> None:
    """The default callback: does nothing."""


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """What the caller wants to hear of.

    ``on_line``: ranks' lines. ``on_note``: what is remarkable about the hosts, once. ``on_facts``: what the hosts told,
    before anything starts. ``on_job``: what a batch scheduler was asked for and does. ``on_launch``: that begins, and
    what tells how far it has come (words that follow "still"). ``on_start``: all nodes have started. ``on_end``: all
    have ended well (their hosts are free from then on, though the outputs aren't here yet).
    """

    on_line: Callable[[LogLine], None]
    on_note: Callable[[str], None] = nothing
    on_facts: Callable[[Sequence[NodeFacts]], None] = nothing
    on_job: Callable[[str], None] = nothing
    on_launch: Callable[[Callable[[], str]], None] = nothing
    on_start: Callable[[], None] = nothing
    on_end: Callable[[], None] = nothing


class RunningAttempt:
    """Start, follow and end one plan."""

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
        self.log_dir = spec.run_dir / "attempts" / str(plan.attempt)
        self.ends: Ends = {}
        self._tracebacks = Tracebacks(watchers.on_line)
        self.left = ""  # hosts that could not be asked to stop
        self.order: list[str] = []  # hosts as their ends came in
        self._files = ExitStack()
        self._logs: dict[str, IO[str]] = {}
        self._metrics: IO[str] | None = None
        self._metrics_at = 0
        self._looked = 0.0

    @property
    def ended_well(self) -> bool:
        """All nodes have ended with exit code 0."""
        return len(self.ends) == self.plan.nnodes and not any(map(_bad, self.ends.values()))

    def run(self) -> None:
        """To the end of all nodes. Raises HostError, Killed."""
        with self._files:
            self._open()
            try:
                self.watchers.on_launch(self.launcher.starting)
                self.launcher.start(self.plan, self.pack, self.facts, self.run_dir)
                self._follow()
            except BaseException:
                self.signals.hold()
                self._end_everything()
                self._after(keep_final=False)
                raise
        self.signals.hold()
        if not self.ended_well:
            self._end_everything()
        else:
            self._tracebacks.release()
            self.watchers.on_end()
        self._after(keep_final=self.ended_well)

    def _open(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for node in self.plan.nodes:
            path = self.log_dir / f"{node.host}.log"
            self._logs[node.host] = self._files.enter_context(path.open("a", encoding="utf-8"))
        if not self.launcher.capabilities.shares_run_dir:
            path = self.run_dir / "metrics.jsonl"
            for warning in go_on_from_checkpoint(self.run_dir):
                self.watchers.on_line(LogLine(host=self.plan.nodes[0].host, rank=None, text=f"warning: {warning}"))
            self._metrics = self._files.enter_context(path.open("a", encoding="utf-8"))
            self._metrics_at = path.stat().st_size

    def _follow(self) -> None:
        """Handle events until every node has ended, or, after the first bad end, until STOP_S have passed."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        following = self.launcher.follow(self.plan, events.put, metrics_at=self._metrics_at)
        deadline: float | None = None
        pruning = self.launcher.capabilities.shares_run_dir  # where rank 0 sees the file itself
        try:
            self.watchers.on_start()
            while len(self.ends) < self.plan.nnodes and (deadline is None or time.monotonic() < deadline):
                self._next(events)
                self.signals.check()
                self._check_folder()
                if not pruning and (self.run_dir / PRUNE).exists():
                    following.prune()
                    pruning = True
                if deadline is None and any(map(_bad, self.ends.values())):
                    following.stop()
                    deadline = time.monotonic() + STOP_S
        except BaseException:
            self.signals.hold()
            following.stop()
            deadline = time.monotonic() + STOP_S
            while len(self.ends) < self.plan.nnodes and time.monotonic() < deadline:
                self._next(events, quiet=True)
            raise
        finally:
            following.close()

    def _check_folder(self) -> None:
        """Where hosts have copies, only the controller sees its own folder. Raises TrainingError once it is gone."""
        now = time.monotonic()
        if self.launcher.capabilities.shares_run_dir or now - self._looked < _POLL_S:
            return
        self._looked = now
        if not self._folder_is_ours():
            raise TrainingError(
                f"training failed: the run's folder {self.run_dir} was removed, or was taken by another command, while "
                "the run was going on",
                hint="the same command again",
            )

    def _folder_is_ours(self) -> bool:
        return attempts.known(self.run_dir)[-1:] == [self.plan.run_id]

    def _next(self, events: queue.SimpleQueue[Event], quiet: bool = False) -> None:
        try:
            event = events.get(timeout=_POLL_S)
        except queue.Empty:
            for log in self._logs.values():
                log.flush()
            return
        if isinstance(event, LogLine):
            rank = "-" if event.rank is None else event.rank
            self._logs[event.host].write(f"{rank} | {event.text}\n")
            if event.rank is not None and not quiet:  # torchrun's own talk stays in the log file
                self._tracebacks.add(event)
        elif isinstance(event, MetricsLine):
            if self._metrics is not None:
                self._metrics.write(event.text + "\n")
                self._metrics.flush()
        else:
            self.ends[event.host] = event
            self.order.append(event.host)
            kind = {"event": type(event).__name__}
            if self._folder_is_ours():  # nor is it made anew for this where it was removed
                write_json(self.log_dir / f"{event.host}.exit.json", {**kind, **dataclasses.asdict(event)})

    def _end_everything(self) -> None:
        """Stop by a command of its own what the streams could not end; it also keeps a late start from beginning."""
        sure = {host for host, end in self.ends.items() if isinstance(end, NodeExit)}
        if len(sure) == self.plan.nnodes:
            return
        failures = self.launcher.stop(self.plan.run_key, self.run_dir, bar=self.plan.run_id)
        unsure = {host: why for host, why in failures.items() if host not in sure}
        self.left = "".join(f"\n{host}{_not_stopped(why, self.plan.lease_s)}" for host, why in unsure.items())
        self.signals.left = self.left

    def _after(self, *, keep_final: bool) -> None:
        """Bring the outputs (after a bad end: what a later attempt resumes from), clear the nodes.

        What could not be brought stays there: the next attempt asks for it (pipeline/cluster/earlier.py).
        """
        heard = bool(self.ends) and self._folder_is_ours()
        if heard and not self.launcher.collect(self.plan, self.run_dir, final=keep_final):
            return
        self.launcher.clean(self.plan)
        if heard and not self.launcher.capabilities.shares_run_dir:
            earlier.nothing_is_left(self.plan, self.run_dir)


def _not_stopped(why: str, lease_s: float) -> str:
    if why.startswith(NOT_ENDED):
        return f": {why}"
    return (
        f" could not be asked to stop ({why.partition(chr(10))[0]}); its agent ends the run by itself at once when "
        f"it is cut off from every other node, else {lease_s:g} s after the last word from here"
    )


def _bad(end: NodeExit | NodeLost) -> bool:
    return isinstance(end, NodeLost) or end.code != 0
