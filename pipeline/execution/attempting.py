"""The attempts of a run: they are made until one succeeds, or an attempt that another command has started is followed.

``complete`` calls it under the run's lock. ``cluster.attempt`` makes one attempt; ``restarts`` judges a failed one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pipeline.cluster import earlier, launchers, starts
from pipeline.cluster.attempt.run import attach_attempt, run_attempt
from pipeline.cluster.events import (
    AllSucceeded,
    AttemptEvent,
    CheckpointSaved,
    Doing,
    EarlierStartsEnded,
    Emit,
    HostNote,
    HostsProbed,
    Notice,
    ShownLine,
)
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.core.errors import HostError, Killed, TrainingError, UsageError
from pipeline.core.files import write_json
from pipeline.core.specs import SCRIPT_OUTPUTS, TRAINING_OUTPUTS, UNDER_WAY, Cluster, LaunchPlan, Outputs, State
from pipeline.execution.failure_hints import add_known_hint, replace_hint
from pipeline.execution.restarts import Pauses, Restarts, clock, next_start
from pipeline.execution.run import Run
from pipeline.execution.work import OpenAttempt, Say, Work, add_to_journal
from pipeline.runs import checkpoints, journal, metrics_file, provenance, ranks, recorded_hardware
from pipeline.runs.metrics_file import SystemMetrics
from trainers.contract import run_folder
from trainers.contract.beats import NodeBeat
from trainers.contract.host_facts import HostFacts
from trainers.script.settings import ScriptConfig

if TYPE_CHECKING:
    from pipeline.runs.script_attempts import ScriptAttempts


def run_attempts(work: Work) -> None:
    """Make attempts, each from the last checkpoint, until one succeeds. Raises the error of the last one."""
    run = work.run
    if work.mirror is not None:
        work.say.doing(f"waiting for {work.mirror.shown} to answer")
        work.mirror.restore()
        work.mirror.try_writing()
    first = journal.attempts(run.folder.journal) + 1
    if first > 1 and run.config.script is not None:  # ranks of the built-in trainer print this themselves
        work.say(f"attempt {first} starts {next_start(run)}")
    restarts = Restarts(
        run.config.cluster,
        shards=run.config.train.trainer.shards,
        keeps_hosts=work.services.hosts is not None,
        begun_before=first > 1,
    )
    Attempts(work, restarts, last=first + run.config.cluster.settings.max_restarts).make(first)


def attach(work: Work, attempt: OpenAttempt) -> None:
    """Follow an attempt under way; if it fails, make the further attempts that its own command would have made."""
    run, (plan, cluster) = work.run, attempt
    work.say(f"attached to attempt {plan.attempt} on {', '.join(node.host for node in plan.nodes)}")
    replaceable = bool(cluster.spares) and cluster.settings.max_restarts > 0
    spec = _attempt_spec(work, plan.attempt, replaceable=replaceable)
    try:
        emit = _subscriber(work, plan.attempt, notes=False)
        attach_attempt(plan, spec, closing(Hosts(cluster)), emit, work.services.stop)
    except TrainingError as error:
        number = journal.attempts(run.folder.journal)  # a later attempt may have been planned and not started
        restarts = Restarts(cluster, shards=run.config.train.trainer.shards)
        attempts = Attempts(work, restarts, last=number + cluster.settings.max_restarts)
        # no attempt follows here, but the same command makes one
        if number == attempts.last and error.hint is None and error.cause != "config":
            raise replace_hint(error, f"the same command starts {next_start(run)}") from None
        attempts.prepare_restart(number, error)
        attempts.make(number + 1)


class KeptHosts:
    """The connections to the hosts of one command's attempts, kept open for a restart on the same hosts."""

    def __init__(self) -> None:
        self._hosts: Hosts | None = None

    def of(self, cluster: Cluster) -> AbstractContextManager[Hosts]:
        """Return the hosts for one attempt. A scheduler grants hosts anew for each attempt: these aren't kept."""
        if launchers.capabilities(cluster).hosts_are_granted:
            return closing(Hosts(cluster))
        if self._hosts is None or self._hosts.cluster is not cluster:
            self.close()
            self._hosts = Hosts(cluster)
        self._hosts.forget_facts()
        return nullcontext(self._hosts)

    def close(self) -> None:
        """Close the connections: after the last attempt, or where one may lead to a host that is gone."""
        if self._hosts is not None:
            self._hosts.close()
        self._hosts = None


class Attempts:
    """The attempts of one command. ``restarts`` knows hosts and failures; ``last``: the last attempt's number."""

    def __init__(self, work: Work, restarts: Restarts, *, last: int) -> None:
        self._work, self._restarts, self.last = work, restarts, last
        self._kept = KeptHosts()

    def make(self, first: int) -> None:
        """Make attempts from this number on until one succeeds. Raises HostError, TrainingError, Killed: none does."""
        work = self._work
        with closing(self._kept):
            for number in range(first, self.last + 1):
                work.lock.check()
                add_to_journal(work.run, State.PLANNED, number)
                try:
                    self.make_one(number)
                    return
                except HostError as error:
                    raise _with_shards_hint(error, work.run) from error
                except TrainingError as error:
                    if error.gone or error.cause == "host":  # a connection to a lost host may hang
                        self._kept.close()
                    self.prepare_restart(number, add_known_hint(error, work.run))
                except Killed as error:
                    may_still_run = self._restarts.may_still_run(time.time())
                    raise Killed(f"{error.what}{may_still_run}", hint=error.hint) from None

    def make_one(self, number: int) -> None:
        """Make one attempt; at a restart, replace silent hosts or wait for them. Raises HostError."""
        services, restarts, say = self._work.services, self._restarts, self._work.say
        emit = _subscriber(self._work, number, notes=not restarts.has_failed)
        # only a run that has begun waits: at a first start a silent host is more likely a wrong name than a reboot
        waits = restarts.has_failed and services.hosts is None
        pauses = Pauses(restarts.cluster.settings.restart_wait_s if waits else 0.0)
        while True:
            say.doing(pauses.doing or "asking the hosts")
            hosts = nullcontext(services.hosts) if services.hosts is not None else self._kept.of(restarts.cluster)
            replaceable = services.hosts is not None or (bool(restarts.cluster.spares) and number != self.last)
            try:
                spec = _attempt_spec(self._work, number, is_restart=restarts.has_failed, replaceable=replaceable)
                run_attempt(spec, hosts, emit, services.stop)
                return
            except HostError as error:
                self._kept.close()
                self._replace_or_wait(number, error, pauses)

    def _replace_or_wait(self, number: int, error: HostError, pauses: Pauses) -> None:
        """Replace the silent hosts, or wait for them until the next try. Raises ``error``: neither is possible."""
        restarts, say = self._restarts, self._work.say
        # try spares before waiting: they can compute at once
        replaced = restarts.replace(error.hosts) if restarts.replaces else []
        if replaced:
            say("\n".join([str(error), *replaced]))
            return
        pause_s = pauses.next(time.monotonic()) if error.hosts else None
        if pause_s is None:
            idle = restarts.idle_spares(error.hosts) if restarts.replaces else []
            if not idle:
                raise error
            raise HostError("\n".join([error.what, *idle]), hint=error.hint, hosts=error.hosts) from error
        if not pauses.doing:
            until = f"{clock(time.time() + pauses.limit_s)} (cluster.restart_wait_s={pauses.limit_s:g})"
            names, unseen = ", ".join(error.hosts), [host for host in error.hosts if host not in restarts.took_part]
            waits = f"attempt {number} waits until {until} for {names}"
            spares = f"; {', '.join(unseen)} has never answered: is the name of the spare right?"
            say(f"{error}\n{waits}{spares if unseen else ', which took part before'}")
            pauses.doing = f"waiting for {names} to answer"
            say.doing(pauses.doing)
        time.sleep(pause_s)

    def prepare_restart(self, number: int, error: TrainingError) -> None:
        """Choose the hosts of the attempt after ``number`` and announce it. Raises ``error``: none may follow."""
        run, restarts, lock = self._work.run, self._restarts, self._work.lock
        folder_lost = lock.lost() or not (run.folder.path / run_folder.CONFIG).exists()
        stopped = (run.folder.path / run_folder.STOP).exists()  # by `doit stop`
        if number == self.last or folder_lost or stopped:
            raise error
        script = _script_attempts(run)
        saved = "" if script is None else script.checkpoints_stamp()
        restarts.record_failure(error, step=_last_step(run, number), saved=saved, now=time.time())
        add_to_journal(run, State.FAILED, number, error.what)
        # the hint about a lost host is for users whose run ends with it
        lines = [error.what if error.gone else str(error)]
        lines += restarts.replace(error.gone) or restarts.idle_spares(error.gone)
        start = next_start(run, error.gone)
        lines.append(f"attempt {number} failed; starting attempt {number + 1} of {self.last} {start}")
        self._work.say("\n".join(lines))


def _script_attempts(run: Run) -> ScriptAttempts | None:
    return checkpoints.script_attempts(run.folder.path, checkpoints.settings_of(run.folder.path))


def _last_step(run: Run, number: int) -> int:
    """Return the last step that attempt ``number`` reported; 0 if none."""
    if run.config.script is not None:
        logged = metrics_file.rows(run.folder.path / run_folder.METRICS)
        return max((row.step for row in logged), default=0)
    rows, _ = ranks.read(run.folder.path / run_folder.ATTEMPTS / str(number))
    return max((row.step for row in rows), default=0)


def _with_shards_hint(error: HostError, run: Run) -> HostError:
    """Extend the hint of a host's error: with trainer.shards, the run may go on with other hosts."""
    shards, cluster = run.config.train.trainer.shards, run.config.cluster
    if not shards or cluster.nnodes == 1:
        return error
    other_hosts = (
        f"the same words with other hosts: trainer.shards={shards} gives the same weights on any 1, 2, 4, … ranks up "
        f"to {shards}, and the run goes on from its last checkpoint"
    )
    return HostError(error.what, hint=f"{error.hint}; or {other_hosts}" if error.hint else other_hosts)


# ------------------------------------------------------------------------------------- what an attempt is given
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
    """Return what to fetch from a script's host."""
    settings = ScriptConfig(**run.config.resolved["program"])
    if settings.resumes:  # without its checkpoints, however large, it couldn't go on
        return SCRIPT_OUTPUTS
    limit_bytes = settings.outputs_limit_bytes
    return replace(SCRIPT_OUTPUTS, limit_bytes=limit_bytes, work=SCRIPT_OUTPUTS.work if limit_bytes is not None else ())


# ---------------------------------------------------------------------------------------- the events of an attempt
def _subscriber(work: Work, number: int, *, notes: bool) -> Emit:
    """Return the receiver of an attempt's events: it says, records, and passes the others on to the live view.
    ``notes``: say remarks about the hosts, too, as a first attempt does."""
    say, view = work.say, work.services.on_event
    samples = SystemMetrics(work.run.folder.path) if work.run.config.tracking.system_metrics else None

    def receive(event: AttemptEvent) -> None:
        match event:
            case ShownLine(line=line):
                say(line.shown)
            case Notice(text=text):
                say(text)
            case HostNote(text=text):  # the same at each attempt: said once
                if notes:
                    say(text)
            case Doing(what=activity):
                say.doing(activity if activity is not None else partial(ranks.under_way, work.run.folder))
            case HostsProbed(facts=facts):
                _record_hosts(work, number, facts)
            case EarlierStartsEnded():
                if (script := _script_attempts(work.run)) is not None:
                    script.keep_printed_lines()
            case CheckpointSaved():
                if work.mirror is not None:
                    work.mirror.push()
            case AllSucceeded():
                _give_hosts_back(work)
            case LaunchPlan():
                _record_start(work, number)
                view(event)
            case NodeBeat():
                view(event)
                if samples is not None:
                    samples.add(event, time.time())
            case _:
                view(event)

    return receive


def _record_start(work: Work, number: int) -> None:
    add_to_journal(work.run, State.RUNNING, number)
    work.recorder.start()
    work.say.doing(partial(ranks.under_way, work.run.folder))


def _give_hosts_back(work: Work) -> None:
    work.recorder.restore_priority()
    work.say.doing("fetching the results")
    if work.services.on_trained is not None:
        work.services.on_trained()


def _record_hosts(work: Work, number: int, facts: Sequence[HostFacts]) -> None:
    """Write the hosts and their environments into provenance.json, and the hardware of this attempt into its folder."""
    work.lock.check()
    folder = work.run.folder
    before_launch = folder.read_json(run_folder.PROVENANCE) or {}
    environments = {fact.host: provenance.environment(fact) for fact in facts}
    recorded_hardware.record(folder.path, number, [fact.hardware for fact in facts])
    hosts = [fact.host for fact in facts]  # a scheduler grants hosts only now
    write_json(folder.path / run_folder.PROVENANCE, {**before_launch, "hosts": hosts, "environments": environments})


def unfinished_attempt(run: Run) -> OpenAttempt:
    """Return the newest attempt and its hosts. Raises UsageError: it is over, or cluster.hosts lacks one of them."""
    cluster, plan = run.config.cluster, starts.unfinished_plan(run.folder.path)
    if launchers.capabilities(cluster).hosts_are_granted:  # its job may also be queued or over
        raise UsageError(
            f"{cluster.launcher} grants the hosts of run {run.key.short} to a job, and only doit train finds it again",
            hint="the command that started it, which takes up a job that waits or runs",
        )
    if plan is None:
        raise UsageError(f"nothing of run {run.key.short} is under way", hint="the command that started it")
    hosts_by_label = {host.label: host for host in (*cluster.hosts, *cluster.spares)}
    unknown = [node.host for node in plan.nodes if node.host not in hosts_by_label]
    if unknown:  # the same hosts may be configured under other names now
        relabelled = earlier.with_current_labels(cluster, plan)
        if relabelled is None:
            raise UsageError(
                f"the attempt that is under way is on {', '.join(unknown)}, which cluster.hosts doesn't name",
                hint="doit attach with the words of the command that has started it",
            )
        plan = relabelled
    hosts = tuple(hosts_by_label[node.host] for node in plan.nodes)
    spares = tuple(host for host in cluster.spares if host not in hosts)
    return OpenAttempt(plan, replace(cluster, hosts=hosts, spares=spares))


def attempt_to_attach(run: Run, say: Say) -> OpenAttempt:
    """Return the newest attempt and its hosts for `doit attach`. Raises UsageError: it has ended; HostError."""
    attempt = unfinished_attempt(run)
    last = journal.read(run.folder.journal)[-1:]
    has_ended = bool(last) and last[0].state not in UNDER_WAY
    why_over = earlier.why_over(attempt.cluster, attempt.plan, run.folder.path) if has_ended else None
    if why_over is not None:
        for line in why_over:
            say(line)
        raise UsageError(
            f"nothing of run {run.key.short} is under way: it is {last[0].state}, {last[0].first_line}",
            hint=f"its command again; it starts {next_start(run)}",
        )
    return attempt


def surviving_attempt(work: Work) -> OpenAttempt | None:
    """Return the newest attempt and its hosts if it still runs, or has succeeded, without a command; else None. Raises
    HostError: a host doesn't answer, and no restart could do without it."""
    try:
        attempt = unfinished_attempt(work.run)
    except UsageError:
        return None
    work.say.doing(f"asking the hosts of attempt {attempt.plan.attempt} whether it still runs")
    try:
        why_over = earlier.why_over(attempt.cluster, attempt.plan, work.run.folder.path)
    except HostError as error:
        cluster = work.run.config.cluster
        # a new attempt may replace the silent host, or doesn't use it at all
        if cluster.settings.max_restarts > 0 or not {host.label for host in cluster.hosts}.issuperset(error.hosts):
            return None
        raise
    for line in why_over or ():
        work.say(line)
    return attempt if why_over is None else None
