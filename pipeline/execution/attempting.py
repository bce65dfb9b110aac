"""Make the attempts of a run until one succeeds, or follow an attempt that is already under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.cluster import earlier, launchers
from pipeline.cluster.attempt.run import attach_attempt, run_attempt
from pipeline.cluster.events import (
    AllSucceeded,
    AttemptEvent,
    CheckpointSaved,
    Doing,
    Emit,
    FollowedEvent,
    HostNote,
    HostsProbed,
    LogLine,
    Notice,
    ShownLine,
)
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.core.errors import HostError, Killed, TrainingError, UsageError
from pipeline.core.files import write_json
from pipeline.core.processes.signals import Stop
from pipeline.core.processes.wait_reports import WaitReports
from pipeline.core.specs import (
    SCRIPT_OUTPUTS,
    TRAINING_OUTPUTS,
    UNDER_WAY,
    Cluster,
    LaunchPlan,
    Outputs,
    State,
    Waiting,
)
from pipeline.execution.failure_hints import hinting, with_hint
from pipeline.execution.restarts import Pauses, Restarts, clock, next_start
from pipeline.execution.run import Run
from pipeline.runs import checkpoints, journal, metrics_file, provenance, ranks, recorded_hardware, status
from pipeline.runs.checkpoint_mirror import CheckpointMirror
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock
from pipeline.runs.metrics_file import SystemMetrics
from pipeline.tracking.client import Recorder
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat
from trainers.contract.host_facts import HostFacts
from trainers.script.printed import keep_lines
from trainers.script.settings import ScriptConfig

Say = Callable[[str], None]
_LINE_LIMIT = 2000  # characters of a line on the terminal


@dataclass(frozen=True, kw_only=True)
class RunServices:
    """What the caller provides: a single run has its own helper processes, a sweep's trials share them.

    ``evaluate`` makes the report of a run folder with the project's code (raises PacelineError). ``on_trained`` is
    called when the hosts are free again, before outputs, report and record are complete, but not if another command
    finished the run. ``code`` lists the files to copy the snapshot from (None: the project's own). ``hosts`` and
    ``stop`` are passed to run_attempt. ``on_event`` receives an attempt's plan and events; ``on_wait`` is called every
    second with the step under way and its start, and replaces the lines about long waits. Both feed the live view and
    must not block.
    """

    evaluate: Callable[[RunFolder, Path], None]
    recorder: Callable[[Run], Recorder]
    provenance: Callable[[Run, Sequence[str], float, Say], tuple[provenance.Provenance, bytes]]
    on_trained: Callable[[], None] | None = None
    code: Mapping[str, Path] | None = None
    hosts: Hosts | None = None
    stop: Stop | None = None
    on_event: Callable[[FollowedEvent], None] = lambda _: None
    on_wait: Callable[[Waiting], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """One command's work on one run, whose lock it holds. ``started``: unix time in seconds."""

    run: Run
    lock: RunLock
    recorder: Recorder
    argv: Sequence[str]
    say: WaitReports
    services: RunServices
    started: float
    attached: tuple[LaunchPlan, Cluster] | None
    mirror: CheckpointMirror | None


def note(run: Run, state: State, attempt: int, detail: str = "") -> None:
    """Append an entry to the run's journal. Raises OSError."""
    entry = journal.Entry(state=state, attempt=attempt, time=time.time(), detail=run.config.hide(detail))
    journal.append(run.folder.journal, entry)


def unfinished_attempt(run: Run) -> tuple[LaunchPlan, Cluster]:
    """Return the newest attempt and its hosts. Raises UsageError: it is over, or runs on hosts not in cluster.hosts."""
    cluster, plan = run.config.cluster, earlier.unfinished_plan(run.folder.path)
    if launchers.capabilities(cluster).hosts_are_granted:  # its job may also be queued or over
        raise UsageError(
            f"{cluster.launcher} grants the hosts of run {run.key.short} to a job, and only doit train finds it again",
            hint="the command that started it, which takes up a job that waits or runs",
        )
    if plan is None:
        raise UsageError(f"nothing of run {run.key.short} is under way", hint="the command that started it")
    known = {host.label: host for host in (*cluster.hosts, *cluster.spares)}
    unknown = [node.host for node in plan.nodes if node.host not in known]
    if unknown and (same := earlier.with_current_labels(cluster, plan)) is not None:
        plan = same
    elif unknown:
        raise UsageError(
            f"the attempt that is under way is on {', '.join(unknown)}, which cluster.hosts doesn't name",
            hint="doit attach with the words of the command that has started it",
        )
    hosts = tuple(known[node.host] for node in plan.nodes)
    return plan, replace(cluster, hosts=hosts, spares=tuple(host for host in cluster.spares if host not in hosts))


def attempt_to_attach(run: Run, say: Callable[[str], None]) -> tuple[LaunchPlan, Cluster]:
    """Return the newest attempt and its hosts if it may still run; else report its end through ``say``.

    Raises:
        UsageError: it is over, or runs on hosts not in cluster.hosts.
        HostError: the journal says that it ended, and a host can't be asked whether its ranks still run.
    """
    plan, cluster = unfinished_attempt(run)
    last = journal.read(run.folder.journal)[-1:]
    if last and last[0].state not in UNDER_WAY and not earlier.can_be_followed(cluster, plan, run.folder.path, say):
        raise UsageError(
            f"nothing of run {run.key.short} is under way: it is {last[0].state}, {last[0].first_line}",
            hint=f"its command again; it starts {next_start(run)}",
        )
    return plan, cluster


def surviving_attempt(work: Work) -> tuple[LaunchPlan, Cluster] | None:
    """Return the newest attempt and its hosts if it outlived its command, and still runs or succeeded.

    Raises HostError: a host can't be asked, and no other host may replace it.
    """
    try:
        plan, cluster = unfinished_attempt(work.run)
    except UsageError:
        return None
    work.say.doing(f"asking the hosts of attempt {plan.attempt} whether it still runs")
    wanted = work.run.config.cluster
    try:
        return (plan, cluster) if earlier.can_be_followed(cluster, plan, work.run.folder.path, work.say) else None
    except HostError as error:
        if wanted.settings.max_restarts > 0 or not {host.label for host in wanted.hosts}.issuperset(error.hosts):
            return None
        raise


def attach(work: Work, plan: LaunchPlan, cluster: Cluster) -> None:
    """Follow an attempt under way; if it fails, make further attempts as its own command would have."""
    run = work.run
    work.say(f"attached to attempt {plan.attempt} on {', '.join(node.host for node in plan.nodes)}")
    emit = _subscriber(work, plan.attempt, notes=False)
    try:
        replaceable = bool(cluster.spares) and cluster.settings.max_restarts > 0
        attach_attempt(
            plan,
            _attempt_spec(work, plan.attempt, replaceable=replaceable),
            closing(Hosts(cluster)),
            emit,
            work.services.stop,
        )
    except TrainingError as error:
        number = journal.attempts(run.folder.journal)  # a later attempt may have been planned and not started
        last, restarts = (
            number + cluster.settings.max_restarts,
            Restarts(cluster, shards=run.config.train.trainer.shards),
        )
        if number == last and error.hint is None and error.cause != "config":
            hint = f"the same command starts {next_start(run)}"
            raise hinting(error, hint) from None
        _prepare_restart(work, number, last, restarts, error)
        _make_attempts(work, number + 1, last, restarts)


def run_attempts(work: Work) -> None:
    """Make attempts, each from the last checkpoint, until one succeeds or none is left."""
    run, say = work.run, work.say
    if work.mirror is not None:
        say.doing(f"waiting for {work.mirror.shown} to answer")
        work.mirror.restore()
        work.mirror.try_writing()
    first = journal.attempts(run.folder.journal) + 1
    last = first + run.config.cluster.settings.max_restarts
    if first > 1 and run.config.script is not None:  # ranks of our trainer print this themselves
        say(f"attempt {first} starts {next_start(run)}")
    restarts = Restarts(
        run.config.cluster,
        shards=run.config.train.trainer.shards,
        keeps_hosts=work.services.hosts is not None,
        begun_before=first > 1,
    )
    _make_attempts(work, first, last, restarts)


class KeptHosts:
    """The hosts of one command's attempts. A restart on the same hosts uses the open connections to them."""

    def __init__(self) -> None:
        self._hosts: Hosts | None = None

    def of(self, cluster: Cluster) -> AbstractContextManager[Hosts]:
        """Return the hosts for one attempt. Those that a scheduler grants are granted anew for each."""
        if launchers.capabilities(cluster).hosts_are_granted:
            return closing(Hosts(cluster))
        if self._hosts is None or self._hosts.cluster is not cluster:
            self.close()
            self._hosts = Hosts(cluster)
        self._hosts.forget()
        return nullcontext(self._hosts)

    def close(self) -> None:
        """Close the connections: after the last attempt, or where one may lead to a host that is gone."""
        if self._hosts is not None:
            self._hosts.close()
        self._hosts = None


def _make_attempts(work: Work, first: int, last: int, restarts: Restarts) -> None:
    with closing(KeptHosts()) as kept:
        for number in range(first, last + 1):
            work.lock.check()
            note(work.run, State.PLANNED, number)
            _keep_printed_lines(work.run)
            try:
                _attempt(kept, work, number, restarts, notes=not restarts.begun, is_last=number == last)
                return
            except HostError as error:
                raise _with_shards_hint(error, work.run) from error
            except TrainingError as error:
                if error.gone or error.cause == "host":  # a connection may hang
                    kept.close()
                _prepare_restart(work, number, last, restarts, with_hint(error, work.run))
            except Killed as error:
                raise Killed(f"{error.what}{restarts.may_still_run(time.time())}", hint=error.hint) from None


def _keep_printed_lines(run: Run) -> None:
    """Keep lines printed by earlier attempts of a script, because its metrics are read from them."""
    settings = checkpoints.settings_of(run.folder.path)
    if settings is None or settings.metrics == "off" or settings.metrics_pattern is not None:
        return
    begun = {entry.attempt: entry.time for entry in journal.read(run.folder.journal) if entry.state is State.RUNNING}
    with suppress(OSError):  # another write reports a full disk
        keep_lines(run.folder.path, begun)


def _prepare_restart(work: Work, number: int, last: int, restarts: Restarts, error: TrainingError) -> None:
    """Choose the hosts of the next attempt and announce it. Raises ``error`` if no attempt may follow."""
    run = work.run
    folder_lost = work.lock.lost() or not (run.folder.path / run_folder.CONFIG).exists()
    if number == last or folder_lost or (run.folder.path / run_folder.STOP).exists():
        raise error
    saved = checkpoints.saved_by_script(run.folder.path) if run.config.script is not None else ""
    restarts.after(error, step=_last_step(run, number), saved=saved, now=time.time())
    note(run, State.FAILED, number, error.what)
    # the hint about a lost host is for users whose run ends with it
    lines = [
        error.what if error.gone else str(error),
        *(restarts.replace(error.gone) or restarts.idle_spares(error.gone)),
    ]
    work.say(
        "\n".join(
            [*lines, f"attempt {number} failed; starting attempt {number + 1} of {last} {next_start(run, error.gone)}"]
        )
    )


def _attempt(kept: KeptHosts, work: Work, number: int, restarts: Restarts, *, notes: bool, is_last: bool) -> None:
    """Make one attempt. If hosts of a run that has begun are silent, replace them by spares or wait for them.

    Raises HostError: hosts stay silent.
    """
    services, emit = work.services, _subscriber(work, number, notes=notes)
    # only a run that has begun waits: at a first start a silent host is more likely a wrong name than a reboot
    pauses = Pauses(restarts.cluster.settings.restart_wait_s if restarts.begun and services.hosts is None else 0.0)
    while True:
        work.say.doing(pauses.doing or "asking the hosts")
        hosts = nullcontext(services.hosts) if services.hosts is not None else kept.of(restarts.cluster)
        try:
            replaceable = services.hosts is not None or (bool(restarts.cluster.spares) and not is_last)
            spec = _attempt_spec(work, number, is_restart=restarts.begun, replaceable=replaceable)
            run_attempt(spec, hosts, emit, services.stop)
            return
        except HostError as error:
            kept.close()
            # try spares before waiting: they can compute at once
            if lines := restarts.replace(error.hosts) if restarts.replaces else []:
                work.say("\n".join([str(error), *lines]))
            elif error.hosts and (pause_s := pauses.next(time.monotonic())) is not None:
                if not pauses.doing:
                    until = f"{clock(time.time() + pauses.limit_s)} (cluster.restart_wait_s={pauses.limit_s:g})"
                    names = ", ".join(error.hosts)
                    work.say(f"{error}\nattempt {number} waits until {until} for {names}, which took part before")
                    pauses.doing = f"waiting for {names} to answer"
                    work.say.doing(pauses.doing)
                time.sleep(pause_s)
            elif restarts.replaces and (idle := restarts.idle_spares(error.hosts)):
                raise HostError("\n".join([error.what, *idle]), hint=error.hint, hosts=error.hosts) from error
            else:
                raise


def _last_step(run: Run, number: int) -> int:
    """Return the last known step of an attempt; for a script, the last one that it logged."""
    if run.config.script is not None:
        logged = metrics_file.rows(run.folder.path / run_folder.METRICS)
        return max((row.step for row in logged), default=0)
    rows, _ = ranks.read(run.folder.path / run_folder.ATTEMPTS / str(number))
    return max((row.step for row in rows), default=0)


def _with_shards_hint(error: HostError, run: Run) -> HostError:
    """Extend the error's hint: with trainer.shards, a run may go on with other hosts."""
    shards, cluster = run.config.train.trainer.shards, run.config.cluster
    if not shards or cluster.nnodes == 1:
        return error
    other_hosts = (
        f"the same words with other hosts: trainer.shards={shards} gives the same weights on any 1, 2, 4, … ranks up "
        f"to {shards}, and the run goes on from its last checkpoint"
    )
    return HostError(error.what, hint=f"{error.hint}; or {other_hosts}" if error.hint else other_hosts)


def _attempt_spec(work: Work, number: int, *, is_restart: bool = False, replaceable: bool = False) -> AttemptSpec:
    run = work.run
    return AttemptSpec(
        run_dir=run.folder.path.resolve(),
        run_key=run.key.short,
        attempt=number,
        trainer=run.config.program.entry,
        pack=run.pack_source,
        outputs=TRAINING_OUTPUTS if run.config.program.is_ours else _outputs_of_script(run),
        versions=run.key.parts["environment"],
        is_restart=is_restart,
        replaceable=replaceable,
        script=run.config.script.path if run.config.script is not None else None,
        project=str(run.root),
        uses_torchrun=run.config.uses_torchrun,
    )


def _outputs_of_script(run: Run) -> Outputs:
    """Return what to fetch from a script's host. The size limit doesn't apply to checkpoints that it resumes from."""
    settings = ScriptConfig(**run.config.resolved["program"])
    if settings.resumes:
        return SCRIPT_OUTPUTS
    limit_bytes = settings.outputs_limit_bytes
    return replace(SCRIPT_OUTPUTS, limit_bytes=limit_bytes, work=SCRIPT_OUTPUTS.work if limit_bytes is not None else ())


def formatted(line: LogLine) -> str:
    """Format a rank's line for the terminal; cut one that would fill pages, such as a printed array."""
    excess = len(line.text) - _LINE_LIMIT
    text = f"{line.text[:_LINE_LIMIT]}… (cut: {excess:,} more characters are in the log)" if excess > 0 else line.text
    return f"{line.host}:{'-' if line.rank is None else line.rank} | {text}"


def _subscriber(work: Work, number: int, *, notes: bool) -> Emit:
    """Return the receiver of an attempt's events; the view gets those of its nodes.

    ``notes``: report remarks about the hosts, as the first attempt of a run does.
    """
    say, view = work.say, work.services.on_event
    samples = SystemMetrics(work.run.folder.path) if work.run.config.tracking.system_metrics else None

    def take(event: AttemptEvent) -> None:
        match event:
            case ShownLine(line=line):
                say(formatted(line))
            case Notice(text=text):
                say(text)
            case HostNote(text=text):
                if notes:
                    say(text)
            case Doing(what=what):
                say.doing(what if what is not None else partial(status.under_way, work.run.folder))
            case HostsProbed(facts=facts):
                _note_hosts(work, number, facts)
            case CheckpointSaved():
                if work.mirror is not None:
                    work.mirror.push()
            case AllSucceeded():
                _give_hosts_back(work)
            case LaunchPlan():
                _note_start(work, number)
                view(event)
            case NodeBeat():
                view(event)
                if samples is not None:
                    samples.heard(event, time.time())
            case _:
                view(event)

    return take


def _note_start(work: Work, number: int) -> None:
    note(work.run, State.RUNNING, number)
    work.recorder.start()
    work.say.doing(partial(status.under_way, work.run.folder))


def _give_hosts_back(work: Work) -> None:
    work.recorder.restore_priority()
    work.say.doing("fetching the results")
    if work.services.on_trained is not None:
        work.services.on_trained()


def _note_hosts(work: Work, number: int, facts: Sequence[HostFacts]) -> None:
    """Write the hosts and their environments into provenance.json, and their hardware with the attempt's number,
    because another attempt may have other hosts.
    """
    work.lock.check()
    folder = work.run.folder
    known = folder.read_json(run_folder.PROVENANCE) or {}
    environments = {fact.host: provenance.environment(fact) for fact in facts}
    recorded_hardware.record(folder.path, number, [fact.hardware for fact in facts])
    hosts = [fact.host for fact in facts]  # a scheduler grants hosts only now
    write_json(folder.path / run_folder.PROVENANCE, {**known, "hosts": hosts, "environments": environments})
