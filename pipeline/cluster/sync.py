"""Bring the data pack and the environment to all hosts before a run (`doit sync`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster import launchers
from pipeline.cluster.agent.requests import MakeEnvironmentRequest, PutWheelsRequest
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import Environment, LockFile, PackSource
from pipeline.cluster.launchers.transport.agent_client import Payload
from pipeline.cluster.launchers.transport.answers import Answer
from pipeline.cluster.launchers.transport.host_errors import ssh_command
from pipeline.cluster.launchers.transport.payload import SLOWEST_BYTES_PER_S, append
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.wait_reports import WaitReports
from pipeline.core.specs import Cluster, Host
from trainers.contract.host_facts import HostFacts

_INSTALL_TIMEOUT_S = 7200.0


def remote(cluster: Cluster) -> AgentLauncher:
    """Return a launcher of hosts with files of their own, to be closed by the caller. Raises UsageError, HostError."""
    if launchers.capabilities(cluster).shares_run_dir:
        raise UsageError(
            f"doit sync brings files to other hosts, and cluster.launcher={cluster.launcher} lets ranks read files of "
            "this computer or a shared folder",
            hint="cluster=pssh cluster.hostfile=FILE, or cluster=two_node after doit lab --hosts 2",
        )
    launcher = launchers.create(cluster)
    assert isinstance(launcher, AgentLauncher)  # granted hosts share the folder of runs
    return launcher


def send_pack(launcher: AgentLauncher, pack: PackSource, reports: WaitReports) -> list[HostFacts]:
    """Send the data pack to the hosts that lack it, and return the facts of all. Raises HostError."""
    reports.doing("asking the hosts")
    facts = launcher.probe(pack)
    if all(fact.pack_path for fact in facts):
        return facts
    reports.doing(launcher.starting)
    launcher.send_pack(pack, facts)
    return launcher.probe(pack)


def ensure(launcher: AgentLauncher, lock: LockFile, reports: WaitReports) -> list[Environment]:
    """Make the environments that are missing (completely or not at all), and return those of all hosts.

    Raises HostError: names the hosts that failed, the installer's last lines, and the command that repeats it.
    """
    reports.doing("looking for the environment")
    environments = launcher.environments(lock)
    lacking = [host for host, one in zip(launcher.cluster.hosts, environments, strict=True) if one.python is None]
    if not lacking:
        return environments
    wheelhouse = None
    if lock.wheelhouse is not None:
        reports.doing(launcher.starting)
        wheelhouse = _send_wheels(launcher, lock.wheelhouse, lacking)
    _make(launcher, lock, wheelhouse, lacking, reports)
    return launcher.environments(lock)


def _send_wheels(launcher: AgentLauncher, folder: Path, hosts: Sequence[Host]) -> str:
    """Send a folder of wheels, and return its place on the hosts. Raises HostError."""
    place = f"{launcher.workdir}/wheelhouse"
    total_bytes = sum(path.stat().st_size for path in folder.iterdir()) * len(hosts)
    launcher.client.demand(
        "sending the wheelhouse",
        PutWheelsRequest(folder=place),
        hosts=hosts,
        timeout_s=launcher.client.short_s + total_bytes / SLOWEST_BYTES_PER_S,
        payload=Payload(name="the wheelhouse", append=lambda stdin: append(stdin, folder, ".")),
    )
    return place


def _make(
    launcher: AgentLauncher, lock: LockFile, wheelhouse: str | None, hosts: Sequence[Host], reports: WaitReports
) -> None:
    """Let hosts make their environments. Raises HostError if one failed."""
    count = len(re.findall(r"^[A-Za-z0-9]", lock.text, re.MULTILINE))  # includes packages for other systems
    labels = [host.label for host in hosts]

    def so_far() -> str:
        installed = launcher.client.reported_counts(labels)
        each = ", ".join(f"{label} {installed.get(label, 0)}" for label in labels)
        return f"making the environment, of at most {count} packages: {each}"

    def explained(host: Host, answer: Answer) -> tuple[str, str | None]:
        if answer.value is None or "repeat" not in answer.value:
            return launcher.transport.explain(host, answer)
        repeat = str(answer.value["repeat"]).replace("'", "'\\''")
        return str(answer.reported_error), f"{ssh_command(host, launcher.cluster.ssh_config)} '{repeat}'"

    reports.doing(so_far)
    request = MakeEnvironmentRequest(launcher.workdir, lock.sha256, lock.text, wheelhouse)
    answers = launcher.client.ask(request, hosts=hosts, timeout_s=_INSTALL_TIMEOUT_S)
    rows, hints = launcher.client.failures(answers, explained)
    if rows:
        what = f"the environment could not be made on {len(rows)} of {launcher.cluster.nnodes} hosts"
        raise HostError("\n".join([what, *rows]), hint=hints[0] if hints else None)
