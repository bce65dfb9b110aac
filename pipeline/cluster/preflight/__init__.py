"""Check that every host of a cluster can take part in a run, without starting anything there.

`doit preflight` calls ``examine``, which probes the hosts and makes all checks. Each start has probed the hosts itself
and calls ``judge``, the checks of the probe's facts (pure), and ``occupied``, which finds other users of the hosts.
docs/troubleshooting.md explains each check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cluster import launchers, starts, validation
from pipeline.cluster.agent.wire import clock, printable_title
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.settings import REFUSE, WHEN_BUSY_HINT, busy_policy
from pipeline.cluster.launchers.transport.agent_client import claim, resources
from pipeline.cluster.preflight import hardware, versions
from pipeline.cluster.preflight.judgement import ALL, Check, State, from_error, judged, refuse, warnings
from pipeline.cluster.preflight.versions import common_versions, names_to_probe, refuse_different
from pipeline.core.errors import HostError, UsageError
from pipeline.core.files import canonical_json
from pipeline.core.specs import Cluster, Host
from pipeline.core.tables import aligned, counted, in_width
from trainers.contract.host_facts import HostFacts
from trainers.contract.records import as_json as as_object

__all__ = [
    "Check", "Occupation", "Report", "State", "as_json", "examine", "from_error", "judge", "occupied", "refuse",
    "refuse_occupied", "summary", "table", "versions_on_hosts", "warnings",
]  # fmt: skip


_DEEP_GPU_S = 5.0  # how long nvidia-smi may take; without persistence mode it first wakes every GPU


@dataclass(frozen=True, kw_only=True)
class Report:
    """The facts of the hosts, and what was found wrong with them."""

    facts: Sequence[HostFacts]
    checks: Sequence[Check]
    refusals: Sequence[HostError] = ()  # hosts don't fit the configuration or the key, or don't reach each other

    @property
    def all_checks(self) -> list[Check]:
        """All checks, with the refusals as failed ones."""
        labels = [fact.host for fact in self.facts]
        refused = [check for error in self.refusals for check in from_error(error, "run", labels)]
        return [*refused, *self.checks]

    @property
    def is_ok(self) -> bool:
        """True if no check failed; warnings may remain."""
        return all(check.state != State.FAILED for check in self.all_checks)

    def raise_if_failed(self) -> None:
        """Raise HostError with every failure, if there is one."""
        errors = list(self.refusals)
        try:
            refuse(self.checks, len(self.facts))
        except HostError as error:
            errors.append(error)
        if errors:
            hints = [error.hint for error in errors if error.hint]
            raise HostError("\n".join(error.what for error in errors), hint="; then ".join(hints) or None)


def judge(cluster: Cluster, facts: Sequence[HostFacts]) -> list[Check]:
    """Return all checks of the facts. Pure."""
    return [*versions.checks(cluster, facts), *hardware.checks(cluster, facts)]


def examine(
    cluster: Cluster,
    *,
    backend: str = "auto",
    key_versions: Mapping[str, str] | None = None,
    deep: bool = False,
    runs_dir: Path | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check every host, or the scheduler that grants them. Raises HostError: lists each host that doesn't answer.

    Args:
        key_versions: package → version in the key of a run.
        deep: also make the checks that take time.
        runs_dir: the project's runs; if given, remove leftovers that no run needs from the hosts.
        on_note: called with a line for each host from which something was removed.
    """
    key_versions = key_versions or {}
    with closing(launchers.create(cluster)) as launcher:
        if not isinstance(launcher, AgentLauncher):
            lines = launcher.scheduler.rehearse()
            return Report(facts=(), checks=[Check(ALL, "scheduler", State.OK, line) for line in lines])
        facts = launcher.probe(None, names_to_probe(key_versions))
        if deep:
            # Once more: over an open connection the round trip is shorter, so clocks are compared more exactly.
            facts = launcher.probe(None, names_to_probe(key_versions), gpu_s=_DEEP_GPU_S)
        for note in starts.clear_leftovers(launcher, facts, runs_dir) if runs_dir else ():
            on_note(note)
        refusals = []
        try:
            validation.validate_hosts(cluster, facts, backend=backend)
            refuse_different(facts, key_versions, cluster.environment)
            facts = launcher.connect(facts)[0]
        except HostError as error:
            refusals.append(error)
        checks = judge(cluster, facts)
        if deep:
            checks += hardware.unanswered(cluster, facts, _DEEP_GPU_S)
    return Report(facts=facts, checks=[*checks, *_occupation(cluster, facts)], refusals=refusals)


_versions_by_request: dict[str, dict[str, str]] = {}


def versions_on_hosts(cluster: Cluster, key: Mapping[str, str]) -> dict[str, str]:
    """Return the packages of ``key`` with their versions on the hosts; probe once for all runs of this process.

    Raises HostError: a host doesn't answer, or the hosts differ; UsageError: a scheduler grants the hosts only later.
    """
    # everything on which the answer depends
    hosts = [(host.label, host.python, host.env.get("PYTHONPATH")) for host in cluster.hosts]
    settings = [cluster.launcher, cluster.ssh_config, cluster.container, *cluster.container_mounts]
    request = canonical_json([settings, hosts, dict(key)])
    if request not in _versions_by_request:
        with closing(launchers.create(cluster)) as launcher:
            if not isinstance(launcher, AgentLauncher):
                what = f"cluster.environment=hosts: cluster={cluster.launcher} grants hosts when the run starts"
                raise UsageError(what, hint="cluster.environment='{torch: 2.9.1}', with the versions of the hosts")
            _versions_by_request[request] = common_versions(launcher.probe(None, names_to_probe(key)), key)
    return _versions_by_request[request]


# ------------------------------------------------------------------------------------------- other users of the hosts
@dataclass(frozen=True, kw_only=True)
class Occupation:
    """The other users of one host, each described in a few words."""

    host: str
    runs: tuple[str, ...]  # runs that have claimed it
    processes: tuple[str, ...]  # processes on its GPUs that belong to no known run

    @property
    def who(self) -> str:
        return "; ".join([*self.runs, *self.processes])


def occupied(cluster: Cluster, facts: Sequence[HostFacts], attempts: str) -> list[Occupation]:
    """Return the hosts that others use. ``attempts``: the prefix of the run ids of this run's own attempts, or ''."""
    occupations = []
    for host, fact in zip(cluster.hosts, facts, strict=True):
        own_claim = claim(cluster, host, attempts, "")
        runs = tuple(other.description for other in fact.claims if own_claim.collides_with(other))
        processes = tuple(_unknown_processes(host, fact, attempts)) if cluster.device == "cuda" else ()
        if runs or processes:
            occupations.append(Occupation(host=fact.host, runs=runs, processes=processes))
    return occupations


def _unknown_processes(host: Host, fact: HostFacts, own_attempts: str) -> Iterator[str]:
    """Describe each process on the GPUs of the ranks that belongs neither to this run nor to one that has a claim."""
    known_runs = {own_attempts, *(other.attempt_prefix for other in fact.claims)} - {""}
    devices_of_ranks = set(resources(host, "cuda"))
    owners = {  # pid → (user, since when, the mark RUN_ID:NODE_RANK if it is a rank)
        int(pid): (printable_title(user), f" since {clock(float(since))}", mark)
        for pid, user, since, mark in hardware.rows(fact.nvidia_smi.owners if fact.nvidia_smi else "", 4)
        if pid.isdecimal() and since.isdecimal()
    }
    for gpu in hardware.parse_gpus(fact.nvidia_smi):
        if devices_of_ranks.isdisjoint({f"gpu:{gpu.index}", f"gpu:{gpu.uuid}"}):
            continue
        for process in gpu.processes:
            user, since, mark = owners.get(process.pid, ("somebody", "", ""))
            if not any(mark.startswith(prefix) for prefix in known_runs):
                program = printable_title(process.program)
                yield f"{user}'s {program} (pid {process.pid}) is on GPU {gpu.index}{since}"


def _occupation(cluster: Cluster, facts: Sequence[HostFacts]) -> list[Check]:
    state = State.FAILED if busy_policy(cluster) == REFUSE else State.WARNING
    return [
        judged(busy.host, "occupied", busy.who, False, wanted="nobody", hint=WHEN_BUSY_HINT, otherwise=state)
        for busy in occupied(cluster, facts, "")
    ]


def refuse_occupied(occupations: Sequence[Occupation], nnodes: int) -> None:
    """Raise HostError that names the users of each busy host, if there is one."""
    if occupations:
        rows = [f"  {busy.host} is busy: {busy.who}" for busy in occupations]
        head = f"{len(occupations)} of {counted(nnodes, 'host')} {'is' if len(occupations) == 1 else 'are'} busy:"
        raise HostError("\n".join([head, *rows]), hint=WHEN_BUSY_HINT)


# ------------------------------------------------------------------------------------------------------ shown as text
def table(facts: Sequence[HostFacts], width: int) -> str:
    """Return a table of the facts with a row a host, at most ``width`` columns wide."""
    rows = [("host", "address", "interface", "python", "torch", "gpus", "cpus", "memory", "disk free")]
    rows += [
        (
            fact.host,
            fact.address,
            fact.interface or "-",
            fact.python_version,
            fact.torch_version or "-",
            str(fact.gpus),
            str(fact.cpus),
            f"{fact.memory_bytes / 2**30:.1f} GiB",
            f"{fact.disk_free_bytes / 2**30:.1f} GiB",
        )
        for fact in facts
    ]
    return "\n".join(in_width(rows, width))


def summary(checks: Sequence[Check]) -> str:
    """Return a table with a row a check: how many hosts are ok, which ones are not, and the value of the worst one."""
    rows: list[tuple[str, ...]] = [("check", "ok", "warning", "failed", "seen")]
    for name in dict.fromkeys(check.name for check in checks):
        results = [check for check in checks if check.name == name]
        worst = next(check for state in reversed(State) for check in results if check.state == state)
        rows.append((name, *(_hosts_cell(results, state) for state in State), worst.seen))
    return aligned(rows)


def _hosts_cell(checks: Sequence[Check], state: State) -> str:
    """Return the number of hosts that are ok, or the labels of the others, of many the first three."""
    labels = list(dict.fromkeys(check.host or "-" for check in checks if check.state == state))
    if not labels:
        return "-"
    if state == State.OK:
        return str(len(labels))
    return ",".join(labels[:3]) + (f"+{len(labels) - 3}" if len(labels) > 3 else "")


def as_json(report: Report) -> dict[str, Any]:
    """Return ``{"ok": …, "hosts": [facts], "checks": [{"host", "name", "state", "seen", "wanted", "hint"}]}``."""
    checks = report.all_checks
    return {
        "ok": report.is_ok,
        "hosts": [as_object(fact) for fact in report.facts],
        "checks": [
            {**dataclasses.asdict(check), "host": None if check.host == ALL else check.host} for check in checks
        ],
    }
