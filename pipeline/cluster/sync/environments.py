"""The environment of a lock file, made on the hosts that lack it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.answers import Answer
from pipeline.cluster.launchers.environments import Environment, LockFile
from pipeline.cluster.launchers.host_errors import ssh_command
from pipeline.cluster.sync import bringing
from pipeline.cluster.sync.folders import Folder
from pipeline.core.errors import HostError
from pipeline.core.heartbeat import Heartbeat
from pipeline.core.specs import Host

_LONGEST_S = 7200.0


def ensure(launcher: AgentLauncher, lock: LockFile, heartbeat: Heartbeat) -> list[Environment]:
    """The environments of all hosts, made where they are missing (whole or not at all).

    Raises:
        HostError: names the hosts that failed, the installer's last lines, and the command that repeats it.
    """
    heartbeat.doing("looking for the environment")
    environments = launcher.environments(lock)
    lacking = [one.host for one in environments if one.python is None]
    if not lacking:
        return environments
    wheelhouse = None
    if lock.wheelhouse is not None:
        wheelhouse = f"{launcher.workdir}/wheelhouse"
        folder = Folder(name="wheelhouse", source=lock.wheelhouse.resolve(), place=wheelhouse)
        bringing.bring(launcher, [folder], delete=False, heartbeat=heartbeat)
    _make(launcher, lock, wheelhouse, lacking, heartbeat)
    return launcher.environments(lock)


def _make(
    launcher: AgentLauncher, lock: LockFile, wheelhouse: str | None, lacking: Sequence[str], heartbeat: Heartbeat
) -> None:
    count = len(re.findall(r"^[A-Za-z0-9]", lock.text, re.MULTILINE))  # also those of other systems

    def so_far() -> str:
        arrived = launcher.arrived(lacking)
        each = ", ".join(f"{label} {arrived.get(label, 0)}" for label in lacking)
        return f"making the environment, of at most {count} packages: {each}"

    heartbeat.doing(so_far)
    hosts = [host for host in launcher.cluster.hosts if host.label in lacking]
    request = {"do": "make_environment", "workdir": launcher.workdir, "wheelhouse": wheelhouse, "lock": lock.text}
    answers = launcher.ask({**request, **lock.request}, hosts=hosts, timeout_s=_LONGEST_S)
    _refuse_failed(launcher, answers)


def _refuse_failed(launcher: AgentLauncher, answers: dict[str, Answer]) -> None:
    """Raises HostError."""

    def explained(host: Host, answer: Answer) -> tuple[str, str | None]:
        if answer.value is None or "repeat" not in answer.value:
            return launcher.transport.explain(host, answer)
        repeat = str(answer.value["repeat"]).replace("'", "'\\''")
        return str(answer.told), f"{ssh_command(host, launcher.cluster.ssh_config)} '{repeat}'"

    rows, hints = launcher.failures(answers, explained)
    if rows:
        what = f"the environment could not be made on {len(rows)} of {launcher.cluster.nnodes} hosts"
        raise HostError("\n".join([what, *rows]), hint=hints[0] if hints else None)
