"""What preflight finds in a host's devices, limits and software, each broken where the node agent looks: the programs,
the files of /proc and /sys and the control groups of a lab host that say it has GPUs and InfiniBand."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from pipeline.cluster import preflight
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.cluster.preflight import State
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab, LabHost
from tests.lab_fixture import on
from tests.waiting import HANG_S

pytestmark = pytest.mark.lab

SMI = """#!/bin/sh
case "$1" in
-L) echo 'GPU 0: {model} (UUID: GPU-1)' ;;
--query-gpu=index,uuid,*) echo '0, GPU-1, {model}, {memory}, {errors}' ;;
--query-gpu=index,clocks_throttle_reasons.active) echo '0, {throttled}' ;;
--query-compute-apps=*) {processes} ;;
esac
"""
PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"}
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X)", "link_layer": "InfiniBand"}
HALF_A_GIB = "536870912"


def told(lab: Lab, host: LabHost, *commands: str) -> None:
    done = on(lab, host.name, " && ".join(commands))
    assert done.returncode == 0, done.stderr


def equip(host: LabHost, driver: str, ports: list[dict[str, str]], **smi: str) -> str:
    """Give a host a GPU, its driver, and InfiniBand; the commands that put its files where they belong."""
    (host.home / "bin").mkdir()
    program = host.home / "bin" / "nvidia-smi"
    program.write_text(SMI.format(**smi))
    program.chmod(0o755)
    (host.home / ".bashrc").write_text("PATH=~/bin:$PATH\n")
    for number, port in enumerate(ports):
        folder = host.home / "class" / "infiniband" / f"mlx5_{number}" / "ports" / "1"
        folder.mkdir(parents=True)
        for name, text in port.items():
            (folder / name).write_text(f"{text}\n")
    (host.home / "class" / "net").mkdir()
    (host.home / "driver" / "nvidia").mkdir(parents=True)
    (host.home / "driver" / "nvidia" / "version").write_text(
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}"
    )
    mounts = ["/sys/class/net ~/class/net", "~/class /sys/class", "~/driver /proc/driver"]
    return " && ".join(f"mount --rbind {mount}" for mount in mounts)


@pytest.fixture
def limited(lab: Lab) -> Iterator[None]:
    """node1 begins what it begins in a control group with half a core and half a GiB; skips the test where there can be
    none. A host of the lab has no view of them until it mounts one."""
    host, root, name = lab.hosts[1], Path("/sys/fs/cgroup"), f"paceline-{os.getpid()}"
    if (root / "cpu").is_dir():
        written = {"cpu/cpu.cfs_quota_us": "50000", "memory/memory.limit_in_bytes": HALF_A_GIB}
        view = "cd /sys/fs/cgroup && mkdir cpu memory"
        view += " && mount -t cgroup -o cpu c cpu && mount -t cgroup -o memory m memory"
    else:
        written, view = {"cpu.max": "50000 100000", "memory.max": HALF_A_GIB}, "mount -t cgroup2 c /sys/fs/cgroup"
    roots = {(root / file).parent for file in written}
    try:
        for place in roots:
            (place / name).mkdir()
        for file, value in written.items():
            ((root / file).parent / name / Path(file).name).write_text(value)
        for place in roots:
            (place / name / "cgroup.procs").write_text(str(host.sshd_pid))
    except OSError as error:
        for place in roots:
            with suppress(OSError):
                (place / name).rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        told(lab, host, "mount -t tmpfs t /sys/fs/cgroup", view)
        yield
    finally:
        on(lab, host.name, "umount -l /sys/fs/cgroup")
        for place in roots:
            for pid in (place / name / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    (place / "cgroup.procs").write_text(pid)
            (place / name).rmdir()


def other_software(home: Path) -> str:
    """An interpreter of another release with another NCCL and CUDA, and all else that this one has."""
    site = home / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "torch").mkdir(parents=True)
    (home / "venv" / "bin").mkdir()
    (home / "venv" / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (home / "venv" / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    (site / "here.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (site / "nvidia_nccl_cu13-2.1.dist-info").mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "version.py").write_text(f"__version__ = '{torch.__version__}'\ncuda = '11.8'\n")
    (site / "sitecustomize.py").write_text("import sys; sys.version_info = (3, 99, 0, 'final', 0)\n")
    return "~/venv/bin/python"


@pytest.fixture
def broken(lab: Lab) -> Iterator[list[Host]]:
    """Two hosts with a GPU and two ports of InfiniBand each; all that can be wrong with node1's is."""
    first, second = lab.hosts
    good = {"model": "NVIDIA A100", "memory": "81920", "errors": "0", "throttled": "0x0000000000000000"}
    bad = {"model": "NVIDIA T4", "memory": "15360", "errors": "2", "throttled": "0x0000000000000020"}
    with ExitStack() as mended:
        for host in lab.hosts:
            undone = "umount -l /sys/class/net/eth0/speed; umount -l /sys/class /proc/driver ~/class/net"
            mended.callback(
                told, lab, host, f"({undone}); rm -r ~/bin ~/class ~/driver ~/.bashrc; rm -rf ~/venv ~/speed"
            )
        told(lab, first, equip(first, "580.65", [PORT, PORT], **good, processes=":"))
        process = "echo GPU-1, 1, 300, /usr/sbin/sshd"
        told(
            lab,
            second,
            equip(second, "440.10", [{**PORT, "rate": "100 Gb/sec (4X EDR)"}, DOWN], **bad, processes=process),
        )
        told(lab, second, "echo 'ulimit -l 64' >> ~/.bashrc", "echo 100 > ~/speed")
        told(lab, second, "mount --bind ~/speed /sys/class/net/eth0/speed")
        yield [Host(name="node0"), Host(name="node1", python=other_software(second.home))]


def of_node1(lab: Lab, *hosts: Host, device: str = "auto") -> dict[str, str]:
    """What isn't ok on node1: name of the check → its lines."""
    cluster = Cluster(
        launcher="pssh",
        hosts=hosts,
        ssh_config=str(lab.ssh_config),
        device=device,
        settings=PsshConfig(connect_timeout_s=HANG_S),  # half a core may be slow to log in
    )
    found: dict[str, str] = {}
    for check in preflight.examine(cluster, deep=True).all_checks:
        if check.host == "node1" and check.state != State.OK:
            line = f"{check.state}: {check.seen} (wanted: {check.wanted}); {check.hint}"
            found[check.name] = f"{found[check.name]}\n{line}" if check.name in found else line
    return found


def test_each_fault_of_gpus_infiniband_and_software_is_named_with_what_mends_it(lab: Lab, broken: list[Host]) -> None:
    said = of_node1(lab, *broken, device="cuda")
    occupied = said.pop("occupied")
    everywhere = "install the same version everywhere, or set cluster.python"
    assert said == {
        "Python": f"warning: 3.99 (wanted: {sysconfig.get_python_version()}, as node0 has it); {everywhere}",
        "NCCL": f"failed: 2.1 (wanted: {version('nvidia-nccl-cu13')}, as node0 has it); NCCL refuses ranks of another "
        f"version: {everywhere}",
        "CUDA": f"warning: 11.8 (wanted: {torch.version.cuda}, as node0 has it); torch was built with it: {everywhere}",
        "GPU driver": "warning: 440.10 (wanted: 580.65, as node0 has it); install the same driver everywhere\nwarning:"
        " 440.10, and torch was built with CUDA 11.8 (wanted: 450 or newer); install a newer driver, or "
        "a torch for an older CUDA",
        "GPU model": "warning: 1 × NVIDIA T4 (wanted: 1 × NVIDIA A100, as node0 has it); the slowest GPU sets the "
        "pace of all",
        "GPU memory": "warning: 15360 MiB (wanted: 81920 MiB, as node0 has it); the smallest memory limits the batch "
        "of all",
        "GPU errors": "failed: GPU 0: 2 uncorrectable memory errors since its driver was loaded (wanted: 0); sudo "
        "nvidia-smi --gpu-reset -i 0 there, or other GPUs by CUDA_VISIBLE_DEVICES in cluster.hosts[].env",
        "GPU clocks": "warning: GPU 0 is slowed down by heat (software) (wanted: ); nvidia-smi -q -d "
        "PERFORMANCE,TEMPERATURE,POWER -i 0 there",
        "GPU processes": "warning: GPU 0 is used by /usr/sbin/sshd (pid 1, 300 MiB) (wanted: ); ps -fp 1 there shows "
        "whose",
        "locked memory": "failed: a process of the login may lock 64 KiB (wanted: no limit, as NCCL registers its "
        "buffers with InfiniBand); echo '* - memlock unlimited' | sudo tee -a "
        "/etc/security/limits.d/paceline.conf there (docker run --ulimit memlock=-1), or "
        "++cluster.env={NCCL_IB_DISABLE: '1'}",
        "link speed": "warning: 100 Mbit/s on eth0 (wanted: 10000 Mbit/s, as node0 has it); check its cable and the "
        "switch's port (ethtool INTERFACE): the slowest link sets the pace of all",
        "InfiniBand": "warning: mlx5_1 port 1 is DOWN (Polling), 10 Gb/sec (4X), InfiniBand (wanted: ACTIVE); check "
        "its cable and the switch's port\nwarning: 1 active port (wanted: 2 active ports, as node0 has "
        "it); ibstatus on both hosts shows the difference",
        "InfiniBand rate": "warning: 100 Gb/sec (4X EDR) (wanted: 200 Gb/sec (4X HDR), as node0 has it); "
        "ibstatus on both hosts shows the difference",
    }
    assert re.fullmatch(
        r"failed: root's /usr/sbin/sshd \(pid 1\) is on GPU 0 since .*cluster.when_busy=wait .*", occupied
    )


def test_limits_of_a_control_group_are_named(lab: Lab, limited: None) -> None:
    said = of_node1(lab, Host(name="node0"), Host(name="node1"))
    assert said["cores"].startswith(
        "warning: its control group allows 0.5 of 1 core to 1 rank (wanted: 1, which programs there see); a "
    )
    assert re.match(
        r"warning: [\d.]+ [GM]iB of the 0\.5 GiB that its control group allows \(wanted: at least 1\.0 GiB\); end what",
        said["memory"],
    )


@pytest.mark.ci
@pytest.mark.long
def test_a_driver_that_does_not_answer_is_told_by_the_deep_form(lab: Lab) -> None:
    host = lab.hosts[1]
    (host.home / "bin").mkdir()
    program = host.home / "bin" / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && exec echo GPU 0\nexec sleep 30\n')
    program.chmod(0o755)
    (host.home / ".bashrc").write_text("PATH=~/bin:$PATH\n")
    try:
        said = of_node1(lab, Host(name="node0"), Host(name="node1"), device="cuda")
        assert said["nvidia-smi"] == (
            "warning: nvidia-smi gave no answer within 5 s (wanted: an answer); sudo dmesg | grep -i xid there; sudo "
            "nvidia-smi -pm 1 keeps the driver loaded"
        )
        program.unlink()
        said = of_node1(lab, Host(name="node0"), Host(name="node1"), device="cuda")
        assert said["nvidia-smi"] == (
            "warning: nvidia-smi isn't on the login's PATH (wanted: an answer); install NVIDIA's utils for the driver"
        )
    finally:
        told(lab, host, "rm -rf ~/bin ~/.bashrc")
