"""Real faults on real hosts: preflight names the host, the value, and what mends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.cluster.preflight import Report, State
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab, LabHost
from tests.integration.commands import ROOT, Project
from tests.lab_fixture import on

pytestmark = pytest.mark.lab


def cluster_of(lab: Lab, hosts: Sequence[Host] = (), **settings: Any) -> Cluster:
    hosts = tuple(hosts) or tuple(Host(name=host.name) for host in lab.hosts)
    return Cluster(launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), settings=PsshConfig(**settings))


def examined(cluster: Cluster, *, deep: bool = False) -> Report:
    return preflight.examine(cluster, deep=deep)


def of_node1(report: Report) -> dict[str, str]:
    """What isn't ok on node1: name of the check → its line."""
    wrong = [check for check in report.all_checks if check.host == "node1" and check.state != State.OK]
    return {check.name: f"{check.state}: {check.seen} (wanted: {check.wanted}); {check.hint}" for check in wrong}


def told(lab: Lab, host: str, command: str) -> None:
    done = on(lab, host, command)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def broken(lab: Lab) -> Iterator[LabHost]:
    """node1 with a host name on loopback, few open files, a small MTU, little shared memory and a small disk."""
    host = lab.hosts[1]
    names = host.folder / "etc" / "hosts"
    before = names.read_text()
    with ExitStack() as mended:
        mended.callback(names.write_text, before)
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 node1\n{lab.hosts[0].address} node0\n")
        mended.callback((host.home / ".bashrc").unlink, missing_ok=True)
        (host.home / ".bashrc").write_text("ulimit -n 256\n")
        mended.callback(told, lab, "node1", "umount -l /dev/shm; umount -l /var/tmp/small; ip link set eth0 mtu 1500")
        small = "mount -t tmpfs -o size=4m tmpfs"
        told(lab, "node1", f"{small} /dev/shm && mkdir -p /var/tmp/small && {small} /var/tmp/small")
        told(lab, "node1", "ip link set eth0 mtu 1400")
        yield host


def test_each_fault_of_a_host_is_named_with_what_is_wanted_and_what_mends_it(lab: Lab, broken: LabHost) -> None:
    report = examined(cluster_of(lab, workdir="/var/tmp/small/paceline"))
    said = of_node1(report)
    assert {name: said[name] for name in ("host name", "open files", "MTU", "shared memory", "disk")} == {
        "host name": f"warning: node1 is 127.0.1.1 there (wanted: {broken.address}, where the other hosts reach it); "
        f"a line '{broken.address} node1' in its /etc/hosts, in place of 127.0.1.1",
        "open files": "warning: a process of the login may have 256 (wanted: at least 512 for 2 ranks); "
        "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.d/paceline.conf there",
        "MTU": "warning: 1400 on eth0 (wanted: 1500, as node0 has it); "
        "sudo ip link set dev INTERFACE mtu N: packets larger than the smallest on the way get lost",
        "shared memory": "warning: 4.0 MiB free in /dev/shm (wanted: at least 64.0 MiB); "
        "sudo mount -o remount,size=8G /dev/shm there; of a container: docker run --shm-size=8g",
        "disk": "warning: 4.0 MiB free for /var/tmp/small/paceline (wanted: at least 2.0 GiB); "
        "make room there, or cluster.workdir= a folder on another disk",
    }
    report.raise_if_failed()  # warnings stop nothing


@pytest.mark.ci
@pytest.mark.long
def test_an_interface_that_is_down_is_named(lab: Lab) -> None:
    told(lab, "node1", "ip link add ib7 type bridge && ip addr add 10.99.0.2/24 dev ib7")
    try:
        cluster = cluster_of(lab, hosts=(Host(name="node0"), Host(name="node1", interface="ib7")))
        assert of_node1(examined(cluster))["link"].startswith("warning: down on ib7 (wanted: up); sudo ip link set")
    finally:
        told(lab, "node1", "ip link delete ib7")


@pytest.fixture
def shifted(lab: Lab, tmp_path: Path) -> str:
    """An interpreter of node1 whose clock is 40 s ahead."""
    compiler, home = shutil.which("cc"), lab.hosts[1].home
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = ROOT / "benchmarks" / "shifted_clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", home / "shifted.so", source, "-ldl"], check=True)
    (home / "seconds").write_text("40")
    python = home / "late-python"
    python.write_text('#!/bin/sh\nexport LD_PRELOAD=~/shifted.so SHIFTED_CLOCK=~/seconds\nexec python3 "$@"\n')
    python.chmod(0o755)
    return "~/late-python"


def test_a_clock_that_is_ahead_is_measured(lab: Lab, shifted: str) -> None:
    hosts = (Host(name="node0"), Host(name="node1", python=shifted))
    said = of_node1(examined(cluster_of(lab, hosts=hosts), deep=True))["clock"]
    shown = re.match(r"warning: ([\d.]+) s ahead of this computer's \(±([\d.]+) s\)", said)
    assert shown, said
    assert abs(float(shown[1]) - 40.0) <= float(shown[2]) + 0.01
    assert said.endswith("(wanted: within 2 s); sudo chronyc makestep there, or sudo timedatectl set-ntp true")


@pytest.mark.ci
@pytest.mark.long
def test_doit_preflight_asks_the_spares_too(tmp_path: Path, lab: Lab) -> None:
    project = Project(tmp_path, words=["cluster=pssh", f"cluster.ssh_config='{lab.ssh_config}'"])
    fit = project.doit("preflight", "cluster.hosts=[node0]", "cluster.spares=[node1]")
    assert fit.returncode == 0, fit.stdout
    assert "\n2 hosts can take part, 1 of them as a spare\n" in fit.stdout
    absent = project.doit("preflight", "json=1", "cluster.hosts=[node0]", "cluster.spares=[node7]", apart=True)
    assert absent.returncode == 1, absent.stdout
    (failed,) = json.loads(absent.stdout)["data"]["checks"]
    assert (failed["host"], failed["state"], failed["name"]) == ("node7", "failed", "probe")


@pytest.fixture
def slow_group() -> Iterator[Path]:
    """A control group with a seventh of a core; skips the test where none can be made."""
    root = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"paceline-slow-{os.getpid()}"
    try:
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("15000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("15000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        (root / "cgroup.procs").write_text(pid)
    group.rmdir()


@pytest.mark.long
def test_a_host_that_is_slowed_down_is_named_by_its_peers(tmp_path: Path, lab: Lab, slow_group: Path) -> None:
    # ranks that are forks of a warm parent would stay in the group where that was started
    words = ["cluster=two_node", "cluster.warm=false", f"cluster.ssh_config='{lab.ssh_config}'"]
    (slow_group / "cgroup.procs").write_text(str(lab.hosts[1].sshd_pid))  # and what it starts from now on
    peers = Project(tmp_path, words=words).doit("preflight", "measure=1")
    assert peers.returncode == 0, peers.stdout
    assert "\nwarning: node1: matrix product: " in peers.stdout
