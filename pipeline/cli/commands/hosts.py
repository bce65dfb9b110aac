"""`doit sync`, `stop`, `lab`, `queue`: prepare hosts, end a run on them, simulate some, list who computes on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from pipeline import lab as labs
from pipeline.cli import named_run
from pipeline.cli.commands import train
from pipeline.cli.output import answer, note, say, wants_json
from pipeline.cli.session import ROOT, Session, relative
from pipeline.cluster import hosts, launchers, preflight
from pipeline.cluster.agent.wire import clock
from pipeline.cluster.attempt.run import stop_run
from pipeline.cluster.hosts import Hosts, refuse_without_lab
from pipeline.cluster.launchers.base import PackSource
from pipeline.cluster.validation import usable_gpus
from pipeline.core.errors import UsageError
from pipeline.core.processes.signals import Interruptible
from pipeline.core.processes.threads import WaitReports, waiting
from pipeline.core.specs import LAST, UNDER_WAY, Cluster
from pipeline.core.tables import aligned
from pipeline.data.trees import Tree
from pipeline.execution import restarts
from pipeline.runs import checkpoints, index, journal
from pipeline.runs.lock import HostWait, ask_to_stop, record_stopped, waits_under_way
from trainers.contract.host_facts import HostFacts


def sync(current: Session) -> None:
    """Bring the environment and the data pack to the hosts. Raises UsageError, HostError."""
    sends_data = current.invocation.is_on("data") or "data" not in current.invocation.options
    with Interruptible() as signals, closing(hosts.remote_launcher(current.config.cluster.with_spares)) as launcher:
        signals.message_end = "; hosts that have everything keep it, and the same command continues"
        lock_file = launcher.lock_file
        if not (sends_data or lock_file):
            raise UsageError("data=0 leaves nothing to bring", hint="cluster.environment_from=lock, or without data=0")
        pack = _pack(current) if sends_data else None
        with WaitReports(note) as reports:
            environments = hosts.ensure_environments(launcher, lock_file, reports) if lock_file is not None else []
            facts = hosts.send_pack(launcher, pack, reports) if pack is not None else []
    for made in environments:
        say(f"{made.host}: environment {made.place}: ok, Python {made.python_version}")
    for fact in facts:
        say(f"{fact.host}: data pack {fact.pack_path}: {'ok' if fact.pack_path else 'absent'}")


def _pack(current: Session) -> PackSource | None:
    """Return the data pack after fetching it if it isn't here; None if the script names no data."""
    if current.pack is None:
        train.fetch(current)
    if current.pack is None or current.pack.path is None:
        return None
    if isinstance(current.pack, Tree):
        current.pack.create()
    return PackSource(path=current.pack.path.resolve(), digest=current.pack.digest)


def stop(current: Session) -> None:
    """End a run on all of its hosts: the one that a key or the words name, else the only one in progress."""
    # "last" doesn't name a run here: the newest run may have ended while another one is in progress
    by_key = current.invocation.options.get("run", LAST) != LAST
    by_words = not by_key and not all(word.startswith("paths.") for word in current.invocation.overrides)
    runs_dir = current.config.runs_dir
    folder = current.folder() if by_key or by_words else index.only_under_way(runs_dir, "stop")
    if folder is None:
        say(f"nothing to stop: no run under {relative(runs_dir)} is under way")
        return
    cluster = current.config.cluster if by_words else named_run.cluster(folder, current.invocation, ROOT, usable_gpus())
    entries = journal.read(folder.journal)
    with waiting(note, "ending what runs there"):
        ask_to_stop(folder)  # the command that trains it must not start another attempt
        hosts = ", ".join(stop_run(cluster, folder.path, folder.key))
    if record_stopped(folder):  # no command trains it, so this one has written KILLED to the journal
        start = restarts.next_start_in(folder.path, checkpoints.settings_of(folder.path))
        say(f"{folder.key} is stopped on {hosts}; no command was attached; typed again, it starts {start}")
    elif entries and entries[-1].state in UNDER_WAY:
        say(f"{folder.key} is stopped on {hosts}; the command that was attached ends as well")
    else:
        say(f"nothing of {folder.key} runs on {hosts}")


def lab(current: Session) -> None:
    """Start the lab, remove it, or say how to reach its hosts."""
    options = current.invocation.options
    if {"down", "hosts"} <= options.keys():
        raise UsageError("doit lab takes --down, which removes the lab, or --hosts N, which raises it; not both")
    if current.invocation.is_on("down"):
        with waiting(note, "removing the lab"):
            removed = labs.down(ROOT)
        say(f"removed {', '.join(removed)}" if removed else "no lab is up here; nothing was removed")
        return
    if "hosts" in options:
        with waiting(note, "raising the lab"):
            labs.up(ROOT, int(options["hosts"]))
    raised = labs.status(ROOT)
    if raised is None or not raised.running:
        state = "no lab is up here" if raised is None else "the lab's hosts are down"
        say(f"{state}; raise it: doit lab --hosts {len(raised.hosts) if raised else 2}")
        return
    for host in raised.hosts:
        say(f"{host.name}  {host.address}  ssh -F {relative(raised.ssh_config)} {host.name}")
    say("  train on it  doit train experiment=quickstart cluster=two_node\n  remove it    doit lab --down")


# ----------------------------------------------------------------------------------------------- queue
def queue(current: Session) -> None:
    """Show who computes on each host, and who waits. Raises HostError; UsageError: a scheduler has the queue."""
    config = current.config
    cluster = config.cluster.with_spares
    if launchers.capabilities(cluster).hosts_are_granted:
        raise UsageError(
            f"{cluster.launcher} has a queue of its own", hint="squeue, kubectl get pods, or what your scheduler has"
        )
    refuse_without_lab(cluster, ROOT)
    with waiting(note, "asking the hosts"), closing(Hosts(cluster)) as hosts:
        facts = hosts.facts(None)
    state = queue_of(cluster, facts, waits_under_way(config.runs_dir))
    if wants_json():
        answer(asdict(state))
        return
    say(queue_text(state))


@dataclass(frozen=True, kw_only=True)
class Computing:
    """A run that computes on a host."""

    host: str
    user: str
    what: str  # the run in words
    resources: Sequence[str]  # such as gpu:0, cpu
    since: float  # unix time by that host's clock


@dataclass(frozen=True, kw_only=True)
class HostQueue:
    """Who computes on the hosts, and who waits: the JSON answer."""

    hosts: Sequence[str]
    computing: Sequence[Computing]
    processes: Sequence[str]  # a line per process of no run, on a GPU that a run with these words would use
    waiting: Sequence[HostWait]


def queue_of(cluster: Cluster, facts: Sequence[HostFacts], waits: Sequence[HostWait]) -> HostQueue:
    """Return who computes by the hosts' answers (``facts``), and who waits."""
    others = preflight.occupied(cluster, facts, "")  # "": no attempt of this command, so all runs there are others'
    return HostQueue(
        hosts=[fact.host for fact in facts],
        computing=[
            Computing(
                host=fact.host, user=claim.user, what=claim.title, resources=[*claim.resources], since=claim.since
            )
            for fact in facts
            for claim in fact.claims
        ],
        processes=[f"{other.host}: {line}" for other in others for line in other.processes],
        waiting=waits,
    )


def queue_text(state: HostQueue) -> str:
    """Return the hosts as a table, and below it GPU processes without a claim, and who waits."""
    rows = [("host", "user", "run", "on", "since")]
    for host in state.hosts:
        on_host = [run for run in state.computing if run.host == host]
        for run in on_host:
            gpus = [name.partition(":")[2] for name in run.resources if name.startswith("gpu:")]
            devices = f"GPU {', '.join(gpus)}" if gpus else "processors"
            rows.append((host, run.user, run.what, devices, clock(run.since)))
        if not on_host:
            rows.append((host, "-", "free", "", ""))
    waiting = [f"{wait.key} waits since {clock(wait.since)} for {wait.host}: {wait.who}" for wait in state.waiting]
    return "\n".join([aligned(rows), *state.processes, *(waiting or ["no run of this project waits"])])
