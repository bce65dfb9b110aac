"""Check that every host of a cluster can take part. Starts nothing there.

``examine`` probes the hosts and makes all checks, ``short`` those before every training on several nodes, and ``judge``
turns answers into checks (pure). Each check is explained in docs/troubleshooting.md.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import launchers, validation
from pipeline.cluster.earlier import clear_leftovers
from pipeline.cluster.launchers.granted_launcher import GrantedLauncher
from pipeline.cluster.launchers.transport.answers import Answer
from pipeline.cluster.preflight import gpus, occupation, resources, versions
from pipeline.cluster.preflight.judgement import ALL, Check, State, from_error, judged, refuse, warnings
from pipeline.cluster.preflight.versions import agreed, probed, refuse_different
from pipeline.core.errors import HostError, UsageError
from pipeline.core.files import canonical_json
from pipeline.core.specs import Cluster, Host, NodeFacts
from pipeline.core.tables import aligned, in_width

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

__all__ = [
    "Check", "Report", "State", "as_json", "examine", "from_error", "judge", "refuse", "short", "summary", "table",
    "versions_on_hosts", "warnings",
]  # fmt: skip


_GPU_S = 5.0  # how long nvidia-smi may take: without persistence mode it wakes every GPU first


@dataclass(frozen=True, kw_only=True)
class Report:
    """The facts of the hosts and their checks. ``refusals``: hosts that don't fit the configuration or the key."""

    facts: Sequence[NodeFacts]
    checks: Sequence[Check]
    refusals: Sequence[HostError] = ()

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

    def refuse(self) -> None:
        """Raise HostError with every failure, if there is one."""
        errors = list(self.refusals)
        try:
            refuse(self.checks, len(self.facts))
        except HostError as error:
            errors.append(error)
        if errors:
            hints = [error.hint for error in errors if error.hint]
            raise HostError("\n".join(error.what for error in errors), hint="; then ".join(hints) or None)


def judge(cluster: Cluster, facts: Sequence[NodeFacts]) -> list[Check]:
    """Return all checks of the facts. Pure."""
    return [
        *versions.checks(cluster, facts),
        *resources.checks(cluster, facts),
        *gpus.checks(cluster, facts),
    ]


def short(cluster: Cluster, facts: Sequence[NodeFacts], launcher: Launcher) -> list[Check]:
    """Return the checks before a training on several nodes. A single node needs none: its start shows what it lacks."""
    if cluster.nnodes < 2:
        return []
    return [*judge(cluster, facts), *_shared_folders(cluster, launcher, None)]


def examine(
    cluster: Cluster,
    *,
    backend: str = "auto",
    versions: Mapping[str, str] | None = None,
    deep: bool = False,
    runs_dir: Path | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Check every host, or the scheduler that grants them.

    Args:
        versions: name → version in the key of a run.
        deep: also make the checks that take time.
        runs_dir: the project's runs; if given, remove leftovers that no run needs from the hosts, and check that hosts
            share this folder if the launcher requires that.
        on_note: takes a line for each host from which something was removed.

    Raises:
        HostError: lists each host that doesn't answer, and the fix.
    """
    key = versions or {}
    with closing(launchers.create(cluster)) as launcher:
        if isinstance(launcher, GrantedLauncher):
            lines = launcher.scheduler.rehearse()
            return Report(facts=(), checks=[Check(ALL, "scheduler", State.OK, line) for line in lines])
        facts = launcher.probe(None, probed(key))
        if deep:  # again: a round trip over an open connection is shorter, so clocks are compared more exactly
            facts = launcher.probe(None, probed(key), gpu_s=_GPU_S)
        for note in clear_leftovers(launcher, facts, runs_dir) if runs_dir else ():
            on_note(note)
        refusals = []
        try:
            validation.validate_hosts(cluster, facts, backend=backend)
            refuse_different(facts, key, cluster.environment)
            facts = launcher.connect(facts)[0]
        except HostError as error:
            refusals.append(error)
        checks = judge(cluster, facts)
        if deep:
            answers = {fact.host: fact.extra.get("system", {}).get("gpus") for fact in facts}
            checks += [*gpus.unanswered(cluster, answers, _GPU_S)]
            checks += _shared_folders(cluster, launcher, runs_dir)
    return Report(facts=facts, checks=[*checks, *occupation.checks(cluster, facts)], refusals=refusals)


def versions_on_hosts(cluster: Cluster, key: Mapping[str, str]) -> dict[str, str]:
    """Return the names of ``key`` with their versions on the hosts; probe once for all runs of this process.

    Raises:
        HostError: a host doesn't answer, or the hosts differ.
        UsageError: a scheduler grants the hosts, so they can't be probed beforehand.
    """
    hosts = [(host.label, host.python, host.env.get("PYTHONPATH")) for host in cluster.hosts]
    where = [cluster.launcher, cluster.ssh_config, cluster.container, *cluster.container_mounts]
    request = canonical_json([where, hosts, dict(key)])
    if request not in _versions_by_request:
        with closing(launchers.create(cluster)) as launcher:
            if isinstance(launcher, GrantedLauncher):
                what = f"cluster.environment=hosts: cluster={cluster.launcher} grants hosts when the run starts"
                raise UsageError(what, hint="cluster.environment='{torch: 2.9.1}', with the versions of the hosts")
            _versions_by_request[request] = agreed(launcher.probe(None, probed(key)), key)
    return _versions_by_request[request]


_versions_by_request: dict[str, dict[str, str]] = {}


# ------------------------------------------------------------------------------------------ folders shared by all hosts
def _shared_folders(cluster: Cluster, launcher: Launcher, runs_dir: Path | None) -> list[Check]:
    """Check the folder of runs, if the launcher's hosts must share it."""
    if runs_dir is None or not launcher.capabilities.shares_run_dir or cluster.nnodes == 1:
        return []
    return shared_folder_checks(cluster, launcher.ask, str(runs_dir))


def shared_folder_checks(cluster: Cluster, ask: Callable[..., Mapping[str, Answer]], folder: str) -> list[Check]:
    """Check that all hosts share a folder: the first writes a file, the others look for it, the first removes it.

    The file has a new name each time, because a network file system may hide a file that was looked up before it
    existed. ``ask`` is ``Launcher.ask``.
    """
    hint = "mount the same file system on every host, or name another folder (paths.runs=)"

    def shared(host: Host, seen: str, is_ok: bool, wanted: str = "") -> Check:
        return judged(host.label, "shared folder", seen, is_ok, wanted=wanted, hint=hint, otherwise=State.FAILED)

    first, *others = cluster.hosts
    request = {"do": "shared", "folder": folder, "mark": secrets.token_hex(6)}
    written = ask({**request, "act": "write"}, hosts=[first]).get(first.label)
    if written is None:  # a launcher without agents
        return []
    if written.error is not None:
        seen = f"can't write into {folder}: {written.error}"
        return [shared(first, seen, False, "a folder that it can write")]
    try:
        answers = ask({**request, "act": "look"}, hosts=others) if others else {}
    finally:
        ask({**request, "act": "remove"}, hosts=[first])
    checks = [shared(first, f"{folder} is written", True)]
    for host in others:
        answer = answers.get(host.label)
        if answer is None or answer.value is None or answer.error is not None:
            checks.append(shared(host, f"{folder}: {answer.error if answer else 'no answer'}", False, "an answer"))
        elif answer.value["there"]:
            checks.append(shared(host, f"{folder} is the same as on {first.label}", True))
        else:
            is_other = answer.value["folder"]
            seen = f" there isn't the folder of that name on {first.label}" if is_other else " isn't there"
            checks.append(shared(host, f"{folder}{seen}", False, "one folder for all"))
    return checks


# ------------------------------------------------------------------------------------------------------ shown as text
def table(facts: Sequence[NodeFacts], width: int) -> str:
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
    """Return a table with a row a check: how many hosts are ok, which are not, and the value of the worst."""
    rows: list[tuple[str, ...]] = [("check", "ok", "warning", "failed", "seen")]
    for name in dict.fromkeys(check.name for check in checks):
        of_check = [check for check in checks if check.name == name]
        worst = next(check for state in reversed(State) for check in of_check if check.state == state)
        rows.append((name, *(_hosts(of_check, state) for state in State), worst.seen))
    return aligned(rows)


def _hosts(checks: Sequence[Check], state: State) -> str:
    labels = list(dict.fromkeys(check.host or "-" for check in checks if check.state == state))
    if state == State.OK:
        return str(len(labels)) if labels else "-"
    return ",".join(labels[:3]) + (f"+{len(labels) - 3}" if len(labels) > 3 else "") if labels else "-"


def as_json(report: Report) -> dict[str, Any]:
    """Return ``{"ok": …, "hosts": [facts], "checks": [{"host", "name", "state", "seen", "wanted", "hint"}]}``."""
    checks = report.all_checks
    return {
        "ok": report.is_ok,
        "hosts": [dataclasses.asdict(fact) for fact in report.facts],
        "checks": [
            {**dataclasses.asdict(check), "host": None if check.host == ALL else check.host} for check in checks
        ],
    }
