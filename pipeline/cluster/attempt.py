"""One attempt of a run: probe, plan, start, follow to the end, and leave no process behind, whatever happens."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster import earlier, host_versions, launchers, rank_threads
from pipeline.cluster.failures import cause, failure_text, port_was_taken
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.base import Launcher, PackSource, Place
from pipeline.cluster.plan import render, validate
from pipeline.cluster.running import RunningAttempt, Watchers
from pipeline.core.errors import HostError, TrainingError
from pipeline.core.files import write_json
from pipeline.core.signals import Interruptible, Stop
from pipeline.core.specs import (
    TRAINING_OUTPUTS,
    Cluster,
    Host,
    LaunchPlan,
    LogLine,
    NodeFacts,
    Outputs,
)
from pipeline.runs import attempts


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """An attempt that ended well: what was planned on which facts, and when torchrun was up."""

    plan: LaunchPlan
    facts: tuple[NodeFacts, ...]
    started_unix_time: float
    ended_unix_time: float


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
            one = RunningAttempt(launcher, plan, pack, facts, run_dir, watchers, signals)
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
