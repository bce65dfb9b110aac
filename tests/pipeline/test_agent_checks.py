"""What the agent reads of its host for preflight: recorded trees of /sys, and this computer with something broken."""

from __future__ import annotations

import os
import resource
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.cluster.agent.host import hardware, probe, usage
from pipeline.cluster.agent.requests import ProbeRequest
from pipeline.cluster.launchers.transport.answers import host_facts, parse_answer
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP, message
from tests.pipeline.test_preflight_checks import PORT
from tests.small_disk import mounted
from trainers.contract.beats import Gpu, NodeBeat
from trainers.contract.host_facts import ControlGroup, HostFacts, Limit, Limits, NetworkLink, NvidiaSmi, OwnName
from trainers.contract.records import as_json, from_json


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(root)


def facts_under(shell: str) -> HostFacts:
    """The probe's facts of a process that a shell starts after ``shell``."""
    done = subprocess.run(
        ["sh", "-c", f'{shell}; exec "$0" -E -c "$1"', sys.executable, BOOTSTRAP],
        input=message(ProbeRequest(workdir="/"), "f00d"),
        capture_output=True,
        check=False,
    )
    answer = parse_answer(done.stdout, "f00d")
    assert answer is not None, done.stderr.decode()
    return host_facts("here", answer)


def test_limits_are_those_that_the_login_has_set() -> None:
    found = facts_under("ulimit -S -n 300; ulimit -l 48").limits
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert found == Limits(
        open_files=Limit(300, None if hard == resource.RLIM_INFINITY else hard),
        locked_memory_bytes=Limit(48 << 10, 48 << 10),
    )


def test_probe_tells_the_cuda_of_torch_and_when_it_began() -> None:
    found = facts_under(":")
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    assert found.torch_cuda == runpy.run_path(str(Path(torch.origin).with_name("version.py")))["cuda"]
    assert found.times is not None
    assert 0 <= found.times.host_ended - found.times.host_began < 60


def test_a_system_that_tells_nothing_has_no_facts(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    assert (probe.links(nowhere), probe.infiniband(nowhere)) == ({}, ())
    assert (hardware.shared_memory_free_bytes(nowhere), hardware.memory_available_bytes(nowhere)) == (None, None)
    assert hardware.control_group(nowhere, nowhere) == ControlGroup()


def test_shared_memory_is_that_of_the_mount(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm") as folder:
        (folder / "half").write_bytes(bytes(1 << 20))
        assert hardware.shared_memory_free_bytes(str(folder)) == 1 << 20


# -- names


def test_the_own_name_has_the_addresses_that_programs_here_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert "127.0.0.1" in probe.OwnNameLookup().result().addresses


def test_a_name_server_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait() and [])
    monkeypatch.setattr(probe, "NAME_S", 0.01)
    try:
        assert probe.OwnNameLookup().result() == OwnName(slow_s=0.01)
    finally:
        answered.set()


# -- network devices


def test_links_have_state_mtu_and_speed(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "eth0/operstate": "up",
            "eth0/mtu": "9000",
            "eth0/speed": "25000",
            "docker0/operstate": "down",
            "docker0/mtu": "1500",
            "docker0/speed": "-1",
            "lo/operstate": "unknown",
            "lo/mtu": "65536",
        },
    )
    assert probe.links(root) == {
        "eth0": NetworkLink(state="up", mtu=9000, speed_mbit=25000),
        "docker0": NetworkLink(state="down", mtu=1500),
        "lo": NetworkLink(state="unknown", mtu=65536),
    }


def test_infiniband_ports_have_what_ibstatus_and_ibdev2netdev_show(tmp_path: Path) -> None:
    """mlx5_0: InfiniBand, its interface named by the GID. mlx5_1: two ports of one RoCE card, named by dev_port."""
    port = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "200 Gb/sec (4X HDR)",
        "link_layer": "InfiniBand",
    }
    down = {**port, "state": "1: DOWN", "phys_state": "3: Disabled", "link_layer": "Ethernet"}
    files = {f"mlx5_0/ports/1/{name}": text for name, text in {**port, "gid_attrs/ndevs/0": "ib0"}.items()}
    for number in (1, 2):
        files |= {f"mlx5_1/ports/{number}/{name}": text for name, text in down.items()}
    files |= {"mlx5_1/device/net/ens1f0/dev_port": "0", "mlx5_1/device/net/ens1f1/dev_port": "1"}
    first, second, third = probe.infiniband(tree(tmp_path, files))
    assert first == PORT
    assert (second.device, second.port, second.netdev) == ("mlx5_1", 1, "ens1f0")
    assert (third.port, third.netdev, third.state, third.phys_state) == (2, "ens1f1", "DOWN", "Disabled")


# -- control groups


def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    """Version 2: a job with half of the memory of its slice, which has two cores. What it has read is no use of it."""
    own = tree(tmp_path / "proc", {"cgroup": "0::/slice/job"}) + "/cgroup"
    root = tree(
        tmp_path / "cgroup",
        {
            "slice/cpu.max": "200000 100000",
            "slice/memory.max": "8589934592",
            "slice/memory.current": "1073741824",
            "slice/job/cpu.max": "max 100000",
            "slice/job/memory.max": "4294967296",
            "slice/job/memory.current": "3145728",
            "slice/job/memory.stat": "anon 4096\ninactive_file 2097152",
        },
    )
    assert hardware.control_group(own, root) == ControlGroup(cpus=2.0, memory_bytes=4 << 30, memory_used_bytes=1 << 20)


def test_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    own = tree(tmp_path / "proc", {"cgroup": "5:memory:/docker/ab\n4:cpuset:/docker/ab\n1:cpu,cpuacct:/docker/ab"})
    no_limit = str((1 << 63) - 4096)
    root = tree(
        tmp_path / "cgroup",
        {
            "cpu/docker/ab/cpu.cfs_quota_us": "150000",
            "cpu/docker/ab/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": no_limit,
            "memory/memory.usage_in_bytes": "7",
            "memory/docker/ab/memory.limit_in_bytes": "1073741824",
            "memory/docker/ab/memory.usage_in_bytes": "1073741824",
            "memory/docker/ab/memory.stat": "inactive_file 1\ntotal_inactive_file 536870912",
        },
    )
    assert hardware.control_group(f"{own}/cgroup", root) == ControlGroup(1.5, 1 << 30, 512 << 20)


@pytest.fixture
def half_a_core() -> Iterator[Path]:
    """A control group of this computer with half a core; skips the test where none can be made."""
    root = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"paceline-test-{os.getpid()}"
    try:
        group.mkdir()
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text("50000 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_a_process_in_a_group_with_half_a_core_is_told_so(half_a_core: Path) -> None:
    assert facts_under(f"echo $$ >'{half_a_core}/cgroup.procs'").control_group.cpus == 0.5


# -- nvidia-smi

SMI = """#!/bin/sh
case $1 in
--query-gpu=index,uuid*) echo '0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 4, 0' ;;
*throttle*) {throttle} ;;
*) exit 2 ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test may put an nvidia-smi, the first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def test_the_answers_of_nvidia_smi_are_told_as_they_are(smi: Path) -> None:
    smi.write_text(SMI.format(throttle="echo '0, 0x0000000000000000'"))
    smi.chmod(0o755)
    assert usage.nvidia_smi(30.0) == NvidiaSmi(
        devices="0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 4, 0\n", throttling="0, 0x0000000000000000\n\n"
    )


@pytest.mark.slow
def test_an_nvidia_smi_that_hangs_is_not_waited_for(smi: Path) -> None:
    smi.write_text(SMI.format(throttle="exec sleep 60"))
    smi.chmod(0o755)
    assert (usage.nvidia_smi(1.0) or NvidiaSmi(throttling="x")).throttling.strip() == ""


def test_a_host_without_nvidia_smi_tells_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert usage.nvidia_smi(1.0) is None


def test_processor_time_leaves_idle_and_waiting_out() -> None:
    assert usage.processor_time("cpu  100 5 20 800 50 3 2 10 7 0") == (140, 990)


def test_traffic_is_that_of_all_interfaces_but_the_loopback() -> None:
    text = "head\nhead\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0:1000 1 0 0 0 0 0 0 50 1\n  ib0: 1 0 0 0 0 0 0 0 2 0\n"
    assert usage.traffic(text) == (1001, 52)


def test_what_lies_between_two_looks() -> None:
    found = usage.rates_between((100, 1000, 0, 500), (250, 1200, 4000, 300), 2.0)
    assert found == (0.75, 2000, 0)  # a counter that began anew is no speed


def test_a_gpu_that_says_nothing_is_left_out() -> None:
    assert usage.gpus("97, 1024, 81920\n[N/A], [N/A], 1\n\n") == (
        Gpu(busy=0.97, memory_bytes=2**30, memory_total_bytes=80 * 2**30),
    )


def test_it_is_sampled_at_most_every_two_seconds_and_travels_in_the_beat(tmp_path: Path) -> None:
    looks = usage.UsageSampler(str(tmp_path))
    assert looks.look() is None
    looks._at = time.monotonic() - 3.0
    told = looks.look()
    assert told is not None
    assert looks.look() is told
    beat = from_json(NodeBeat, as_json(NodeBeat("node0", usage=told))).usage
    assert beat is not None
    assert 0 <= beat.cpu <= 1
    assert 0 < beat.memory_bytes < beat.memory_total_bytes
    assert beat.disk_bytes > 0
    assert beat.disk_free_bytes > 0
