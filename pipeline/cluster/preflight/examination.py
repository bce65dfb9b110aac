"""Asks the hosts, puts the judgements of this package together, and shows them as a table, a summary or JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import launchers, validation
from pipeline.cluster.earlier import clear_left
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.preflight import clock, gpus, network, occupation, resources, shared_folder, versions
from pipeline.cluster.preflight.judgement import ALL, Check, State, from_error, refuse
from pipeline.cluster.preflight.versions import agreed, probed, refuse_others
from pipeline.core.errors import HostError, UsageError
from pipeline.core.files import canonical_json
from pipeline.core.specs import Cluster, NodeFacts
from pipeline.core.tables import aligned

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher


_GPU_S = 5.0  # without persistence mode nvidia-smi wakes every GPU first


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the hosts told and what was judged. ``refusals`` are those of the plan and of the run's key."""

    facts: Sequence[NodeFacts]
    checks: Sequence[Check]
    refusals: Sequence[HostError] = ()

    @property
    def all_checks(self) -> list[Check]:
        """The refusals among them, as failed checks."""
        labels = [fact.host for fact in self.facts]
        refused = [check for error in self.refusals for check in from_error(error, "run", labels)]
        return [*refused, *self.checks]

    @property
    def is_ok(self) -> bool:
        """Warnings leave it so."""
        return all(check.state != State.FAILED for check in self.all_checks)

    def refuse(self) -> None:
        """Raises HostError: it holds every failure."""
        errors = list(self.refusals)
        try:
            refuse(self.checks, len(self.facts))
        except HostError as error:
            errors.append(error)
        if errors:
            hints = [error.hint for error in errors if error.hint]
            raise HostError("\n".join(error.what for error in errors), hint="; then ".join(hints) or None)


@dataclass(frozen=True, kw_only=True)
class _Closer:
    """What only a deep examination knows: nvidia-smi's answers, clocks over a shorter round trip, further checks."""

    gpus: Mapping[str, Mapping[str, str] | None] = field(default_factory=dict)
    clocks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    checks: Sequence[Check] = ()


def judge(cluster: Cluster, facts: Sequence[NodeFacts], closer: _Closer | None = None) -> list[Check]:
    """All checks of what the hosts told. Pure."""
    known = closer or _Closer()
    gpus_probed: dict[str, Any] = {fact.host: fact.extra.get("system", {}).get("gpus") for fact in facts}
    return [
        *versions.checks(cluster, facts),
        *resources.checks(cluster, facts),
        *clock.checks(facts, known.clocks),
        *network.checks(cluster, facts),
        *gpus.checks(cluster, facts, {**gpus_probed, **known.gpus}),
        *known.checks,
    ]


def short(cluster: Cluster, facts: Sequence[NodeFacts], launcher: Launcher) -> list[Check]:
    """What is asked before a training of several nodes; one node alone is left to say itself what it lacks."""
    if cluster.nnodes < 2:
        return []
    folders = shared_folder.said_to_be_shared(cluster, launcher, None)
    return [
        *judge(cluster, facts),
        *(check for folder in folders for check in shared_folder.checks(cluster, launcher.ask, folder)),
    ]


def examine(
    cluster: Cluster,
    *,
    backend: str = "auto",
    versions: Mapping[str, str] | None = None,
    deep: bool = False,
    runs_dir: Path | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Ask every host, or who grants them. With ``runs_dir`` hosts also remove what nobody needs of what is over.

    Args:
        versions: what the key of a run would hold.
        deep: also what takes its time.
        runs_dir: where the runs of this project lie, which some launchers say that all hosts share.
        on_note: is told what was removed.

    Raises:
        HostError: lists each host that can't be asked, and the fix.
    """
    key = versions or {}
    with closing(launchers.create(cluster)) as launcher:
        if isinstance(launcher, GrantedLauncher):
            return _rehearsed(launcher)
        facts = launcher.probe(None, probed(key))
        for note in clear_left(launcher, facts, runs_dir) if runs_dir else ():
            on_note(note)
        refusals = []
        try:
            validation.validate_hosts(cluster, facts, backend=backend)
            refuse_others(facts, key, cluster.environment)
            facts = launcher.connect(facts)[0]
        except HostError as error:
            refusals.append(error)
        closer = _look_closer(cluster, launcher, runs_dir) if deep else None
    checks = [*judge(cluster, facts, closer), *occupation.checks(cluster, facts)]
    return Report(facts=facts, checks=checks, refusals=refusals)


def versions_there(cluster: Cluster, key: Mapping[str, str]) -> dict[str, str]:
    """The names of ``key`` with the versions that the hosts have, asked once for all runs of this process.

    Raises:
        HostError: a host can't be asked, or the hosts differ.
        UsageError: a scheduler grants the hosts, so nobody can be asked beforehand.
    """
    hosts = [(host.label, host.python, host.env.get("PYTHONPATH")) for host in cluster.hosts]
    asked = canonical_json([cluster.launcher, cluster.ssh_config, hosts, dict(key)])
    if asked not in _versions_by_question:
        with closing(launchers.create(cluster)) as launcher:
            if isinstance(launcher, GrantedLauncher):
                what = f"cluster.environment=hosts: cluster={cluster.launcher} grants hosts when the run starts"
                raise UsageError(what, hint="cluster.environment='{torch: 2.9.1}', with the versions that they have")
            _versions_by_question[asked] = agreed(launcher.probe(None, probed(key)), key)
    return _versions_by_question[asked]


_versions_by_question: dict[str, dict[str, str]] = {}


def _rehearsed(launcher: GrantedLauncher) -> Report:
    said = [Check(host=ALL, name="scheduler", state=State.OK, seen=line) for line in launcher.scheduler.rehearse()]
    return Report(facts=(), checks=said)


def _look_closer(cluster: Cluster, launcher: AgentLauncher, runs_dir: Path | None) -> _Closer:
    requested = time.time()
    answers = launcher.ask({"do": "examine", "gpu_s": _GPU_S if cluster.device == "cuda" else 0.0})
    answered = time.time()
    values = {host: answer.value for host, answer in answers.items() if answer.value and answer.error is None}
    hint = "doit preflight --deep again; what it says of ssh"
    silent = [
        Check(host=host, name="agent", state=State.FAILED, seen=str(answer.error), wanted="an answer", hint=hint)
        for host, answer in answers.items()
        if host not in values
    ]
    clocks = {
        host: {"asked": requested, "answered": answered, "began": value["began"], "said": value["unix_time"]}
        for host, value in values.items()
    }
    gpus_by_host = {host: value["gpus"] for host, value in values.items()}
    checks = [*silent, *gpus.unanswered(cluster, gpus_by_host, _GPU_S)]
    for folder in shared_folder.said_to_be_shared(cluster, launcher, runs_dir):
        checks += shared_folder.checks(cluster, launcher.ask, folder)
    return _Closer(gpus=gpus_by_host, clocks=clocks, checks=checks)


def table(facts: Sequence[NodeFacts]) -> str:
    """The facts as aligned text, a host a line."""
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
    return aligned(rows)


def summary(checks: Sequence[Check]) -> str:
    """A line a check: on how many hosts it is ok, the hosts where it isn't, and what was seen on the first of them."""
    rows: list[tuple[str, ...]] = [("check", "ok", "warning", "failed", "seen")]
    for name in dict.fromkeys(check.name for check in checks):
        mine = [check for check in checks if check.name == name]
        worst = next(check for state in reversed(State) for check in mine if check.state == state)
        rows.append((name, *(_hosts(mine, state) for state in State), worst.seen))
    return aligned(rows)


def _hosts(checks: Sequence[Check], state: State) -> str:
    labels = list(dict.fromkeys(check.host or "-" for check in checks if check.state == state))
    if state == State.OK:
        return str(len(labels)) if labels else "-"
    return ",".join(labels[:3]) + (f"+{len(labels) - 3}" if len(labels) > 3 else "") if labels else "-"


def as_json(report: Report) -> dict[str, Any]:
    """``{"ok": …, "hosts": [facts], "checks": [{"host", "name", "state", "seen", "wanted", "hint"}]}``."""
    checks = report.all_checks
    return {
        "ok": report.is_ok,
        "hosts": [dataclasses.asdict(fact) for fact in report.facts],
        "checks": [
            {**dataclasses.asdict(check), "host": None if check.host == ALL else check.host} for check in checks
        ],
    }
