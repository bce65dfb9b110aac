"""One attempt of a run: probe, plan, start, follow to the end, and leave no process behind, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import queue
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.cluster import earlier, host_versions, launchers, rank_threads
from pipeline.cluster.failures import cause, failure_text, port_was_taken
from pipeline.cluster.launchers.base import NOT_ENDED, Launcher, PackSource, Place
from pipeline.cluster.plan import render, validate
from pipeline.cluster.tracebacks import Tracebacks
from pipeline.core.errors import HostError, TrainingError
from pipeline.core.files import write_json
from pipeline.core.signals import Interruptible, Stop
from pipeline.core.specs import (
    PRUNE,
    TRAINING_OUTPUTS,
    Cluster,
    Event,
    Host,
    LaunchPlan,
    LogLine,
    MetricsLine,
    NodeExit,
    NodeFacts,
    NodeLost,
    Outputs,
)
from pipeline.keys import rank_environment
from pipeline.runs import attempts
from pipeline.runs.checkpoints import go_on_from_checkpoint

STOP_S = 8.0  # agents: TERM, 3 s, KILL; the rest of the promised 10 s is for the way there
_POLL_S = 0.5

Ends = dict[str, NodeExit | NodeLost]


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """An attempt that ended well: what was planned on which facts, and when torchrun was up."""

    plan: LaunchPlan
    facts: tuple[NodeFacts, ...]
    started_unix_time: float
    ended_unix_time: float


@dataclass(frozen=True, kw_only=True)
class Watchers:
    """What the caller wants to hear of: ranks' lines, the moment that all nodes have started, and the one that all
    have ended well (their hosts are free from then on, though the outputs aren't here yet)."""

    on_line: Callable[[LogLine], None]
    on_start: Callable[[], None] | None = None
    on_end: Callable[[], None] | None = None


class Hosts:
    """The way to a cluster's hosts, and what they said when they were asked, kept for one attempt after another.

    One attempt at a time may begin with it; an earlier one may still be collecting.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._launcher: Launcher | None = None
        self._facts: list[NodeFacts] = []
        self._about: PackSource | None = None
        self._modules: frozenset[str] = frozenset()
        self._ports: list[int] = []
        self._told: set[str] = set()

    @property
    def launcher(self) -> Launcher:
        """Made when first needed. Raises HostError."""
        if self._launcher is None:
            self._launcher = launchers.create(self.cluster)
        return self._launcher

    def facts(self, pack: PackSource | None, modules: Collection[str] = ()) -> list[NodeFacts]:
        """Raises HostError. Asked again while a host lacks the pack: after the next start it has it.

        ``modules``: what is to be looked for among what is installed there.
        """
        lacking = pack is not None and any(not fact.pack_path for fact in self._facts)
        if not self._facts or self._about != pack or lacking or not self._modules.issuperset(modules):
            self._modules |= frozenset(modules)
            self._facts, self._about = self.launcher.probe(pack, sorted(self._modules)), pack
            self._ports = list(self._facts[0].extra.get("free_ports", [self._facts[0].free_port]))
        return self._facts

    def ports(self) -> list[int]:
        """Ports that were free on node 0, the one that was used last at the end."""
        self._ports = [*self._ports[1:], *self._ports[:1]]
        return self._ports

    def notes(self, plan: LaunchPlan) -> list[str]:
        """What the person should know of the hosts' shells and cores; each line once."""
        mine = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}  # how a checkout that isn't installed is run
        whose = "this shell" if self.launcher.capabilities.shares_run_dir else "the login shell there"
        seen = {fact.host: dict(fact.extra.get("left_behind", {}).items() - mine.items()) for fact in self._facts}
        lines = [*rank_environment.left_behind(seen, whose=whose), *rank_threads.shortages(plan, self._facts)]
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def forget(self) -> None:
        """After a bad end nothing that was heard before counts."""
        self._facts = []

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()


def run_attempt(
    *,
    cluster: Cluster,
    run_dir: Path,
    run_key: str,
    pack_dir: Path | None,
    pack_digest: str,
    attempt: int,
    trainer: str,
    on_line: Callable[[LogLine], None],
    on_start: Callable[[], None] | None = None,
    on_facts: Callable[[Sequence[NodeFacts]], None] | None = None,
    on_end: Callable[[], None] | None = None,
    on_note: Callable[[str], None] | None = None,
    outputs: Outputs = TRAINING_OUTPUTS,
    hosts: Hosts | None = None,
    stop: Stop | None = None,
    threads_per_rank: Sequence[int] = (),
    versions: Mapping[str, str] | None = None,
) -> AttemptResult:
    """Run the trainer on all nodes to its end; outputs are in ``run_dir`` then.

    ``run_dir`` holds config.json and code/ already. Written here: plan.json, attempts/N/<host>.log and
    .exit.json, and on launchers whose nodes don't share the folder metrics.jsonl and rank 0's ``outputs``.
    ``pack_dir`` is None for what needs no data. ``on_facts`` hears what the hosts told, before anything starts.
    ``on_note`` hears, once, what is remarkable about the hosts. ``hosts`` is a way to the cluster that stays open,
    ``stop`` ends an attempt that isn't in the main thread. ``threads_per_rank`` is how many threads a rank of each node
    takes (empty: what its cores allow); what the attempt took that left a checkpoint here goes before it.
    ``versions`` are those of the run's key (None: it has none); a host that has others is refused.

    Raises:
        HostError: a host can't take part or can't be started.
        UsageError: the ranks can't share the global batch.
        TrainingError: names the host, rank and traceback of the first error.
        Killed: SIGINT, SIGTERM or SIGHUP. In every case nothing of the attempt runs any more.
    """
    run_dir = run_dir.resolve()
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    pack = PackSource(path=pack_dir.resolve(), digest=pack_digest) if pack_dir is not None else None
    watchers = Watchers(on_line=on_line, on_start=on_start, on_end=on_end)
    with (
        Interruptible(stop) as signals,
        nullcontext(hosts) if hosts is not None else closing(Hosts(cluster)) as reached,
    ):
        signals.check()
        launcher, facts = reached.launcher, reached.facts(pack, host_versions.asked(versions or {}))
        settings = config.get("trainer", {}), config.get("strategy", {})
        validate(
            cluster,
            facts,
            global_batch_size=settings[0].get("global_batch_size", cluster.world_size),
            accumulate_steps=settings[0].get("accumulate_steps", 1),
            backend=settings[1].get("backend", "auto"),
        )
        host_versions.check(facts, versions or {}, cluster.environment)
        if on_facts is not None:
            on_facts(facts)
        if outputs.resume and not launcher.capabilities.shares_run_dir:
            earlier.bring(launcher, facts, run_dir)
        taken = rank_threads.of_checkpoints(run_dir) or threads_per_rank
        if len(taken) != cluster.nnodes:
            taken = ()
        ports = reached.ports()
        for port in ports:
            signals.check()
            plan = _plan(launcher, cluster, facts, pack, run_dir, run_key, attempt, port, trainer, taken)
            plan = dataclasses.replace(plan, outputs=outputs)
            if on_note is not None:
                for note in reached.notes(plan):
                    on_note(note)
            write_json(run_dir / "plan.json", dataclasses.asdict(plan))
            attempts.register(run_dir, plan.run_id)
            one = _Attempt(launcher, plan, pack, facts, run_dir, watchers, signals)
            started = one.run()
            if one.ended_well:
                return AttemptResult(
                    plan=plan, facts=tuple(facts), started_unix_time=started, ended_unix_time=time.time()
                )
            reached.forget()
            if not port_was_taken(plan, one.ends) or port == ports[-1]:
                break
        text = failure_text(plan, one.ends, one.order, one.log_dir) + one.left
        raise TrainingError(text, cause=cause(one.ends))


def _plan(
    launcher: Launcher,
    cluster: Cluster,
    facts: list[NodeFacts],
    pack: PackSource | None,
    run_dir: Path,
    run_key: str,
    attempt: int,
    port: int,
    trainer: str,
    taken: Sequence[int],
) -> LaunchPlan:
    """Render with a fresh run id: what is left of an earlier start can't be mistaken for this one."""
    run_id = attempts.new_id(run_key, run_dir, attempt, secrets.token_hex(3))

    def place(host: Host, fact: NodeFacts) -> Place:
        return launcher.place(host, fact, pack=pack, run_dir=run_dir, run_id=run_id, attempt=attempt)

    return render(
        cluster=cluster,
        facts=facts,
        run_key=run_key,
        attempt=attempt,
        run_id=run_id,
        master_port=port,
        trainer=trainer,
        place=place,
        threads=taken,
    )


def stop_run(cluster: Cluster, run_dir: Path, run_key: str) -> None:
    """End whatever runs for this key on the cluster's hosts. Raises HostError that lists hosts that failed."""
    with closing(launchers.create(cluster)) as launcher:
        failures = launcher.stop(run_key, run_dir.resolve())
    if failures:
        rows = [f"  {host}: {why}" for host, why in failures.items()]
        raise HostError("\n".join([f"run {run_key} could not be stopped on every host:", *rows]))


class _Attempt:
    """Start, follow and end one plan."""

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        pack: PackSource | None,
        facts: list[NodeFacts],
        run_dir: Path,
        watchers: Watchers,
        signals: Interruptible,
    ) -> None:
        self.launcher, self.plan, self.pack, self.facts = launcher, plan, pack, facts
        self.run_dir, self.watchers, self.signals = run_dir, watchers, signals
        self.log_dir = run_dir / "attempts" / str(plan.attempt)
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

    def run(self) -> float:
        """To the end of all nodes. Returns the unix time at which torchrun was up everywhere. Raises Killed."""
        with self._files:
            self._open()
            try:
                self.launcher.start(self.plan, self.pack, self.facts, self.run_dir)
                started = time.time()
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
            if self.watchers.on_end is not None:
                self.watchers.on_end()
        self._after(keep_final=self.ended_well)
        return started

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
            if self.watchers.on_start is not None:
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
        """What the streams could not end is ended by a stop command of its own; that also bars a late start."""
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
        f" could not be asked to stop ({_last_line(why)}); its agent ends the run by itself at once when "
        f"it is cut off from every other node, else {lease_s:g} s after the last word from here"
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no answer"


def _bad(end: NodeExit | NodeLost) -> bool:
    return isinstance(end, NodeLost) or end.code != 0
