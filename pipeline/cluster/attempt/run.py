"""Run one attempt: probe the hosts, check them, render the plan, start it, and follow all nodes to their end.

``execution/attempting.py`` calls ``run_attempt`` for a new attempt, and ``attach_attempt`` for one whose own command
is gone. No process of the attempt is left on any host when they return or raise.
"""

from __future__ import annotations

import dataclasses
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from pipeline.cluster import launchers, preflight, starts
from pipeline.cluster.agent.wire import BUSY
from pipeline.cluster.attempt.failures import cause, failure_text, first_error, is_consequence, port_was_taken
from pipeline.cluster.attempt.running import RunningAttempt
from pipeline.cluster.attempt.silent_hosts import lines_on_lost
from pipeline.cluster.attempt.stalls import HOST_CAUSED, stall_text
from pipeline.cluster.earlier import EarlierStarts, stop_elsewhere
from pipeline.cluster.events import Doing, EarlierStartsEnded, Emit, HostNote, HostsProbed, Notice
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec, Outcome
from pipeline.cluster.launchers.settings import REFUSE, SHARE, WAIT, busy_policy
from pipeline.cluster.plan import render, warm_environment
from pipeline.cluster.preflight.versions import names_to_probe, refuse_different
from pipeline.cluster.validation import check_batch, validate_hosts
from pipeline.core.errors import HostError, TrainingError
from pipeline.core.files import write_json
from pipeline.core.processes.signals import Interruptible, Stop
from pipeline.core.specs import Cluster, LaunchPlan
from pipeline.runs import journal
from pipeline.runs.lock import HostWaitRecord
from trainers.contract import run_folder
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json


def run_attempt(
    spec: AttemptSpec, hosts_context: AbstractContextManager[Hosts], emit: Emit, stop: Stop | None = None
) -> LaunchPlan:
    """Run the trainer on all nodes to its end; return the plan. ``stop`` replaces Ctrl-C outside of the main thread.

    ``hosts_context``: ``closing(Hosts(cluster))``, or ``nullcontext(hosts)`` if further attempts use the same hosts.
    Raises HostError, UsageError (a batch that can't be shared), TrainingError, Killed.
    """
    with Interruptible(stop) as signals, hosts_context as hosts:
        try:
            # repeated only after a preemption: the scheduler will grant other hosts for the same attempt
            while True:
                running = _run_once(spec, hosts, emit, signals)
                if running.ended_well:
                    return running.plan
                outcome = hosts.launcher.outcome(running.plan)
                if not outcome.again:
                    raise _failure(running, outcome)
                emit(Notice(text=outcome.text))
                # RunningAttempt.run defers signals for its clean-up and returns so. Where this module goes on after it,
                # ``release`` lets signals interrupt again, and raises Interrupted if one came meanwhile.
                signals.release()
        except TrainingError:  # keep granted hosts, as a further attempt may use them
            raise
        except BaseException:
            signals.hold()
            hosts.give_back(spec)
            raise


def attach_attempt(
    plan: LaunchPlan,
    spec: AttemptSpec,
    hosts_context: AbstractContextManager[Hosts],
    emit: Emit,
    stop: Stop | None = None,
) -> None:
    """Follow a running attempt, whose own command is gone, and fetch its outputs. Raises as ``run_attempt``."""
    with Interruptible(stop) as signals, hosts_context as hosts:
        signals.check()
        running = RunningAttempt(hosts.launcher, plan, spec, [], emit, signals)
        running.run(started_elsewhere=True)
        if not running.ended_well:
            raise _failure(running, hosts.launcher.outcome(plan))


def _run_once(spec: AttemptSpec, hosts: Hosts, emit: Emit, signals: Interruptible) -> RunningAttempt:
    """Wait for the hosts, start, and follow all nodes to their end. Repeat if another run claimed a host first."""
    signals.check()
    if hosts.launcher.capabilities.hosts_are_granted:
        emit(Doing(what=hosts.launcher.starting))
    hosts.grant(spec, names_to_probe(spec.versions), lambda text: emit(Notice(text=text)), signals.check)
    while True:
        until_free(hosts, spec, emit, signals.check)
        try:
            return _run_on_hosts(spec, hosts, emit, signals)
        except HostError as error:
            if not was_claimed_first(error, hosts, spec):
                raise
        signals.release()
        # two runs may each have claimed one host and given up: a random pause lets one of them be first now
        _pause(random.uniform(0.0, PROBE_AGAIN_S), spec, signals.check)
        hosts.forget_facts()


def _run_on_hosts(spec: AttemptSpec, hosts: Hosts, emit: Emit, signals: Interruptible) -> RunningAttempt:
    """Start on free hosts; start again with another port if the rendezvous port was taken after the probe."""

    def note(texts: Iterable[str]) -> None:
        for text in texts:
            emit(HostNote(text=text))

    facts = _checked_hosts(spec, hosts)
    emit(HostsProbed(facts=facts))
    # earlier attempts may still run on their hosts, or have left checkpoints there that this one resumes from
    if spec.outputs.resume:
        earlier_starts = EarlierStarts(hosts.launcher, facts, spec.run_dir, is_restart=spec.is_restart)
        note(earlier_starts.end_and_collect())
        emit(EarlierStartsEnded())
    if spec.outputs.resume and not hosts.launcher.capabilities.shares_run_dir:
        note(hosts.clear_leftovers(spec.run_dir.parent))
    for port in hosts.ports():
        signals.check()
        plan = _planned(spec, hosts, facts, port)
        note(hosts.notes(facts))
        running = RunningAttempt(hosts.launcher, plan, spec, facts, emit, signals)
        running.run()
        if running.ended_well:
            break
        hosts.forget_facts()
        if not port_was_taken(plan, running.ends):
            break
        signals.release()
    return running


def _failure(running: RunningAttempt, outcome: Outcome) -> TrainingError:
    """Return the error of a failed attempt: a stall, the first error of a rank, or the launcher's reason."""
    first, why = first_error(running.ends), cause(running.ends)
    if running.verdict is not None:
        text = stall_text(running.verdict, running.log_dir)
        why = "host" if running.verdict.kind in HOST_CAUSED else "code"
    elif outcome.hint and (first is None or is_consequence(first.error)):  # the scheduler knows why it ended the ranks
        text = f"training failed: {outcome.text}\nlogs: {running.log_dir}"
    else:
        # the ranks may have failed because the run folder was removed, and its logs with it: then the text names none
        text = failure_text(running.plan, running.ends, running.existing_log_dir)
        text += "".join(f"\n{line}" for line in [*lines_on_lost(running.silent.reached), outcome.text] if line)
    return TrainingError(text + running.unstopped, hint=outcome.hint, cause=outcome.cause or why, gone=running.gone)


def _checked_hosts(spec: AttemptSpec, hosts: Hosts) -> list[HostFacts]:
    """Return the facts of the hosts after all checks. Raises HostError, UsageError: they can't run this attempt."""
    # environment of the warm parent: a process on each host that imports torch now, and forks the ranks later
    warm = warm_environment(hosts.cluster) if hosts.cluster.settings.warm and _has_installed_torch(spec) else None
    facts = hosts.facts(spec.pack, names_to_probe(spec.versions), warm)
    # the configuration of a script has neither section
    config = json.loads((spec.run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
    trainer, strategy = config.get("trainer", {}), config.get("strategy", {})
    ranks = hosts.cluster.world_size
    batch_size, micro_batches = trainer.get("global_batch_size", ranks), trainer.get("accumulate_steps", 1)
    check_batch(batch_size, ranks, micro_batches, trainer.get("shards", 0))
    validate_hosts(hosts.cluster, facts, backend=strategy.get("backend", "auto"))
    refuse_different(facts, spec.versions, hosts.cluster.environment)
    # only valid hosts try to connect to each other; their facts then have the addresses that worked
    facts = hosts.connect()
    preflight.refuse(hosts.checks(), hosts.cluster.nnodes)
    return facts


def _has_installed_torch(spec: AttemptSpec) -> bool:
    """False for scripts, which import torch themselves, and for projects that contain a package ``torch``."""
    return spec.script is None and not (spec.run_dir / run_folder.CODE / "torch").exists()


def _planned(spec: AttemptSpec, hosts: Hosts, facts: Sequence[HostFacts], port: int) -> LaunchPlan:
    """Render the plan and write plan.json. Its new run id distinguishes this start from all earlier ones on hosts."""
    run_id = journal.new_attempt_id(spec.run_key, spec.run_dir, spec.attempt, secrets.token_hex(3))
    plan = render(hosts.cluster, facts, spec, run_id=run_id, master_port=port)
    warm = plan.warm and _has_installed_torch(spec)
    plan = dataclasses.replace(plan, submission=launchers.submission(hosts.cluster, spec), warm=warm)
    # A later attempt must find this start's hosts, to end its ranks and fetch its checkpoints. In a shared run folder
    # the checkpoints are there already, and ranks end themselves when they see in it that a later attempt has begun.
    if not hosts.launcher.capabilities.shares_run_dir:
        starts.record(plan, spec.run_dir)
    write_json(spec.run_dir / run_folder.PLAN, as_json(dataclasses.asdict(plan)))
    journal.register_attempt(spec.run_dir, run_id)
    return plan


def stop_run(cluster: Cluster, run_dir: Path, run_key: str) -> list[str]:
    """End all processes of this run, on all hosts that its attempts may use; return their labels. Raises HostError."""
    plan = starts.unfinished_plan(run_dir)
    used = {node.host for node in plan.nodes} if plan is not None else set()
    spares = tuple(spare for spare in cluster.spares if spare.label in used)  # in the places of lost hosts
    cluster = dataclasses.replace(cluster, hosts=(*cluster.hosts, *spares))
    with closing(launchers.create(cluster)) as launcher:
        failures = launcher.stop(run_key, run_dir.resolve())
    others, failed = stop_elsewhere(cluster, run_dir)
    if failures | failed:
        rows = [f"  {host}: {why}" for host, why in (failures | failed).items()]
        raise HostError("\n".join([f"run {run_key} could not be stopped on every host:", *rows]))
    return [host.label for host in cluster.hosts] + others


_POLL_S = 0.2
PROBE_AGAIN_S = 5.0  # between two probes of busy hosts


def until_free(hosts: Hosts, spec: AttemptSpec, emit: Emit, check: Callable[[], None]) -> None:
    """Refuse busy hosts or wait for them, as ``cluster.when_busy`` says; only a start claims them. Raises HostError."""
    if busy_policy(hosts.cluster) == SHARE or not isinstance(hosts.launcher, AgentLauncher):
        return
    if not may_wait(hosts, spec):
        preflight.refuse_occupied(_other_users(hosts, spec), hosts.cluster.nnodes)
        return
    waiting, answered_at, reported = HostWaitRecord(spec.run_dir), None, ""

    def progress() -> str:
        return reported

    try:
        while True:
            try:
                busy = _other_users(hosts, spec)
            except HostError as error:
                # a host that was busy may be silent for up to lease_s, as the ranks there go on for so long
                if answered_at is None or time.monotonic() - answered_at > hosts.cluster.settings.lease_s:
                    raise
                text = f"waiting, and a host doesn't answer: {error.what}; it is asked again"
            else:
                if not busy:
                    return
                answered_at = time.monotonic()
                waiting.write(busy[0].host, busy[0].who)
                text = f"waiting for {busy[0].host}: {busy[0].who}"
            if not reported:
                emit(Doing(what=progress))
            if text != reported:
                reported = text
                emit(Notice(text=text))
            _pause(PROBE_AGAIN_S, spec, check)
            hosts.forget_facts()
    finally:
        waiting.remove()


def _other_users(hosts: Hosts, spec: AttemptSpec) -> list[preflight.Occupation]:
    """Return which hosts others use, by the last probe. Raises HostError."""
    facts = hosts.facts(spec.pack, names_to_probe(spec.versions))
    return preflight.occupied(hosts.cluster, facts, journal.attempt_prefix(spec.run_key, spec.run_dir))


def _pause(seconds: float, spec: AttemptSpec, check: Callable[[], None]) -> None:
    """Sleep. Raises what ``check`` raises, and HostError if `doit stop` was typed meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check()
        if (spec.run_dir / run_folder.STOP).exists():
            raise HostError("doit stop has ended the wait for the hosts")
        time.sleep(_POLL_S)


def may_wait(hosts: Hosts, spec: AttemptSpec) -> bool:
    """Return whether this run waits for busy hosts. A restart does, as its user may not be there to repeat it."""
    policy = busy_policy(hosts.cluster)
    return policy == WAIT or (policy == REFUSE and spec.is_restart)


def was_claimed_first(error: HostError, hosts: Hosts, spec: AttemptSpec) -> bool:
    """True if a start failed because another run claimed a host first, and this run may wait for it."""
    return BUSY in error.what and may_wait(hosts, spec)
