"""The fixture ``slurm``: a real Slurm, whose two nodes have the addresses and names of the lab's hosts.

Each slurmd runs in a lab host's network with a host name of its own, but sees this machine's files: so the folder of
runs is shared, as it is on a cluster. Every daemon is a child of the test process and ended by its process id.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.lab import Lab
from tests.waiting import HANG_S, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")

_APART = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A node's own host name and processes, which all end with it."""

_CONF = """\
ClusterName=paceline
SlurmctldHost={name}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=10000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=3
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A running Slurm. ``env`` is what its commands need."""

    folder: Path
    nodes: tuple[str, ...]
    env: dict[str, str]

    def run(self, *argv: str) -> str:
        """What one of its commands prints. Raises AssertionError with what it says when it fails."""
        done = subprocess.run(
            argv, capture_output=True, text=True, env={**os.environ, **self.env}, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}{self.logs()}"
        return done.stdout

    def jobs(self) -> list[str]:
        """The ids of all jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def logs(self) -> str:
        """The daemons' last lines."""
        parts = [f"\n{path.name}:\n" + "".join(path.open().readlines()[-8:]) for path in self.folder.glob("*.log")]
        return "".join(parts)


@pytest.fixture(scope="session")
def slurm_cluster(lab: Lab) -> Iterator[Slurm]:
    """Started once per test process (about two seconds)."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)} here: apt install slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="paceline-slurm-", dir="/tmp"))  # a socket's path has to be short
    try:
        with contextlib.ExitStack() as daemons:
            slurm = Slurm(
                folder=folder,
                nodes=tuple(host.name for host in lab.hosts),
                env={"SLURM_CONF": str(folder / "slurm.conf")},
            )
            _start(slurm, lab, daemons)
            yield slurm
            for job in slurm.jobs():
                slurm.run("scancel", job)
            wait_until(lambda: not slurm.jobs())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(slurm_cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The Slurm that this process's commands speak to. No job of the test is left."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    for job in slurm_cluster.jobs():
        slurm_cluster.run("scancel", job)
    wait_until(lambda: not slurm_cluster.jobs())


def _start(slurm: Slurm, lab: Lab, daemons: contextlib.ExitStack) -> None:
    folder = slurm.folder
    ports = _free_ports(1 + len(lab.hosts))
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} Port={port} CPUs=8 RealMemory=2000 State=UNKNOWN"
        for host, port in zip(lab.hosts, ports[1:], strict=True)
    ]
    conf = _CONF.format(
        name=socket.gethostname().partition(".")[0],
        address=lab.subnet.rsplit(".", 1)[0] + ".1",
        port=ports[0],
        folder=folder,
        nodes="\n".join(nodes),
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    _daemon(slurm, munge, daemons)
    wait_until((folder / "munge.socket").exists)
    _daemon(slurm, ["slurmctld", "-D"], daemons)
    for host in lab.hosts:
        inside = 'mount --bind "$1/etc/hosts" /etc/hosts; hostname "$2"; exec slurmd -D -N "$2"'
        net = f"--net=/run/netns/{host.namespace}"  # `ip netns exec` would hide the cgroups
        apart = ["nsenter", net, "unshare", *_APART, "sh", "-c", inside, "sh"]
        _daemon(slurm, [*apart, str(host.folder), host.name], daemons)
    idle = ["idle"] * len(lab.hosts)
    wait_until(lambda: _states(slurm) == idle)


def _states(slurm: Slurm) -> list[str]:
    argv = ["sinfo", "--noheader", "--partition=debug", "--Node", "--format=%T"]
    return subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, **slurm.env}, check=False
    ).stdout.split()


def _daemon(slurm: Slurm, argv: Sequence[str], daemons: contextlib.ExitStack) -> None:
    with (slurm.folder / f"{Path(argv[0]).name}.start.log").open("a") as log:
        child = subprocess.Popen(
            argv, env={**os.environ, **slurm.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    daemons.callback(_end, child)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("", 0))
        return [item.getsockname()[1] for item in sockets]
