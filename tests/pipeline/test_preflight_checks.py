"""The judgements of preflight: what is seen, what is wanted and what mends it, of facts as hosts tell them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.preflight import State, judgement
from pipeline.cluster.preflight.hardware import offset
from pipeline.core.specs import Cluster
from tests.pipeline.test_plan import cluster, facts
from trainers.contract.host_facts import (
    ControlGroup,
    Hardware,
    HostFacts,
    InfinibandPort,
    Limit,
    Limits,
    NetworkLink,
    OwnName,
    ProbeTimes,
)

GIB = 1 << 30
PORT = InfinibandPort(
    device="mlx5_0",
    port=1,
    state="ACTIVE",
    phys_state="LinkUp",
    rate="200 Gb/sec (4X HDR)",
    link_layer="InfiniBand",
    netdev="ib0",
)


def told(number: int, *, began: float = 100.4, ended: float = 100.6, **change: Any) -> HostFacts:
    """The facts of a host that has all that is wanted, but for ``change``."""
    good: dict[str, Any] = {
        "limits": limits(1024, 1 << 20),
        "shared_memory_free_bytes": 8 * GIB,
        "memory_available_bytes": 12 * GIB,
        "links": {f"eth{number}": NetworkLink("up", 1500, 10000)},
        "own_name": OwnName((f"10.0.0.{number + 1}",)),
        "times": ProbeTimes(began, ended, controller_asked=100.0, controller_answered=101.0),
    }
    return facts(number, **{**good, **change})


def limits(soft: int | None, hard: int | None = None, locked_bytes: int | None = None) -> Limits:
    return Limits(open_files=Limit(soft, hard), locked_memory_bytes=Limit(locked_bytes, locked_bytes))


def found(what: Cluster, *hosts: HostFacts) -> list[str]:
    """What isn't ok, as it is shown, with its state."""
    checks = [check for check in preflight.judge(what, hosts) if check.state != State.OK]
    return [f"{check.state} {judgement.lines([check])[0]}" for check in checks]


def test_hosts_that_have_all_that_is_wanted_are_ok() -> None:
    checks = preflight.judge(cluster(1, 1), [told(0), told(1)])
    assert {check.state for check in checks} == {State.OK}
    assert {check.host for check in checks} == {"node0", "node1"}
    expected = "Python cores memory disk shared memory open files clock host name link MTU link speed"
    assert " ".join(dict.fromkeys(check.name for check in checks)) == expected


def test_a_host_whose_probe_tells_nothing_of_its_system_is_not_judged_by_it() -> None:
    assert found(cluster(1, 1), facts(0), facts(1)) == []


ONE = cluster(1, 1)
CUDA = cluster(2, 2, device="cuda")
WRONG: list[tuple[str, Cluster, dict[str, Any], str]] = [
    ("few open files", ONE, {"limits": limits(256, 1 << 20)},
     "warning node1: open files: a process of the login may have 256 (wanted: at least 512 for 2 ranks); "
     "ulimit -n 65536 in the login's start file there"),
    ("too few open files, and a hard limit", ONE,
     {"limits": limits(32, 64)},
     "failed node1: open files: a process of the login may have 32 (wanted: at least 512 for 2 ranks); "
     "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.d/paceline.conf there"),
    ("locked memory", CUDA,
     {"infiniband": (PORT,), "limits": limits(None, locked_bytes=65536)},
     "failed node1: locked memory: a process of the login may lock 64 KiB (wanted: no limit, as NCCL registers its "
     "buffers with InfiniBand); echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.d/paceline.conf "
     "there (docker run --ulimit memlock=-1), or ++cluster.env={NCCL_IB_DISABLE: '1'}"),
    ("shared memory", ONE, {"shared_memory_free_bytes": 10 << 20},
     "warning node1: shared memory: 10.0 MiB free in /dev/shm (wanted: at least 64.0 MiB); "
     "sudo mount -o remount,size=8G /dev/shm there; of a container: docker run --shm-size=8g"),
    ("memory of a control group", ONE,
     {"control_group": ControlGroup(memory_bytes=2 * GIB, memory_used_bytes=2 * GIB - (512 << 20))},
     "warning node1: memory: 0.5 GiB of the 2.0 GiB that its control group allows (wanted: at least 1.0 GiB); "
     "end what takes it there, or fewer ranks: nproc_per_node"),
    ("memory", ONE, {"memory_available_bytes": 900 << 20},
     "warning node1: memory: 0.9 GiB of 16.0 GiB (wanted: at least 1.0 GiB); "
     "end what takes it there, or fewer ranks: nproc_per_node"),
    ("cores of a control group", ONE, {"control_group": ControlGroup(cpus=1.5)},
     "warning node1: cores: its control group allows 1.5 of 8 cores to 1 rank (wanted: 8, which programs there "
     "see); a larger limit (docker run --cpus=…, systemctl set-property … CPUQuota=…), or fewer ranks"),
    ("a full disk", ONE.with_settings(workdir="/scratch"), {"disk_free_bytes": 1 << 20},
     "warning node1: disk: 1.0 MiB free for /scratch (wanted: at least 2.0 GiB); "
     "make room there, or cluster.workdir= a folder on another disk"),
    ("a slow InfiniBand port", ONE, {"infiniband": (PORT._replace(rate="100 Gb/sec (2X HDR)"),)},
     "warning node1: InfiniBand rate: 100 Gb/sec (2X HDR) (wanted: 200 Gb/sec (4X HDR), as node0 has it); "
     "ibstatus on both hosts shows the difference"),
    ("a clock that is ahead", ONE, {"began": 137.9, "ended": 138.1},
     "warning node1: clock: 37.50 s ahead of this computer's (±0.40 s) (wanted: within 2 s); "
     "sudo chronyc makestep there, or sudo timedatectl set-ntp true"),
    ("another Python", ONE, {"python_version": "3.11.4"},
     "warning node1: Python: 3.11 (wanted: 3.12, as node0 has it); "
     "install the same version everywhere, or set cluster.python"),
    ("a host name on loopback", ONE, {"own_name": OwnName(("127.0.1.1",))},
     "warning node1: host name: node1 is 127.0.1.1 there (wanted: 10.0.0.2, where the other hosts reach it); "
     "a line '10.0.0.2 node1' in its /etc/hosts, in place of 127.0.1.1"),
    ("a host name that takes long", ONE, {"own_name": OwnName(slow_s=1.0)},
     "warning node1: host name: node1 isn't resolved within 1 s, for which torchrun waits several times (wanted: "
     "10.0.0.2 at once); a line '10.0.0.2 node1' in its /etc/hosts, in place of 127.0.1.1"),
    ("a smaller MTU", ONE, {"links": {"eth1": NetworkLink("up", 1400, 10000)}},
     "warning node1: MTU: 1400 on eth1 (wanted: 1500, as node0 has it); "
     "sudo ip link set dev INTERFACE mtu N: packets larger than the smallest on the way get lost"),
    ("a link that is down", ONE, {"links": {"eth1": NetworkLink("lowerlayerdown", 1500)}},
     "warning node1: link: lowerlayerdown on eth1 (wanted: up); "
     "sudo ip link set dev INTERFACE up there, or another interface by cluster.hosts[].interface"),
    ("a slow link", ONE, {"links": {"eth1": NetworkLink("up", 1500, 100)}},
     "warning node1: link speed: 100 Mbit/s on eth1 (wanted: 10000 Mbit/s, as node0 has it); "
     "check its cable and the switch's port (ethtool INTERFACE): the slowest link sets the pace of all"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change", "said"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_what_a_host_lacks_is_shown_with_what_is_wanted_and_what_mends_it(
    what: Cluster, change: dict[str, Any], said: str
) -> None:
    good: dict[str, Any] = {"infiniband": (PORT,)} if change.get("infiniband") else {}
    assert found(what, told(0, **good), told(1, **change)) == [said]


def test_more_ranks_than_cores_are_shown() -> None:
    (said,) = found(cluster(9, 1), told(0), told(1))
    assert said == "warning node0: cores: 8 cores for 9 ranks (wanted: one for each rank); a smaller nproc_per_node"


def test_a_host_name_that_no_interface_stands_for_is_refused() -> None:
    hosts = [told(0), told(1, own_name=OwnName(("127.0.1.1", "::1")), interface=None)]
    (said,) = found(ONE, *hosts)
    assert said.startswith("failed node1: host name: node1 is 127.0.1.1, ::1 there (wanted: 10.0.0.2,")
    assert said.endswith("in place of 127.0.1.1, or cluster.interface=")


def test_a_network_of_one_node_is_not_judged() -> None:
    assert found(cluster(1), told(0, own_name=OwnName(), links={"eth0": NetworkLink("down", 9000)})) == []


# -- InfiniBand


def test_an_infiniband_port_that_is_down_is_named_with_what_mends_its_state() -> None:
    down = PORT._replace(state="DOWN", phys_state="Polling", netdev=None)
    second = PORT._replace(device="mlx5_1")
    waits = second._replace(state="INIT")
    said = found(ONE, told(0, infiniband=(PORT, second)), told(1, infiniband=(down, waits)))
    assert said == [
        "warning node1: InfiniBand: mlx5_0 port 1 is DOWN (Polling), 200 Gb/sec (4X HDR), InfiniBand (wanted: ACTIVE); "
        "check its cable and the switch's port",
        "warning node1: InfiniBand: mlx5_1 port 1 is INIT (LinkUp), 200 Gb/sec (4X HDR), InfiniBand, ib0 "
        "(wanted: ACTIVE); start the fabric's subnet manager (opensm)",
        "warning node1: InfiniBand: 0 active ports (wanted: 2 active ports, as node0 has it); "
        "ibstatus on both hosts shows the difference",
    ]


def test_locked_memory_does_not_matter_where_nccl_takes_no_infiniband() -> None:
    few = limits(None, locked_bytes=65536)
    with_ports = [told(number, limits=few, infiniband=(PORT,)) for number in range(2)]
    assert found(ONE, *with_ports) == []  # gloo
    assert found(CUDA, told(0, limits=few), told(1, limits=few)) == []  # no port
    off = replace(CUDA, hosts=tuple(replace(host, env={"NCCL_IB_DISABLE": "1"}) for host in CUDA.hosts))
    assert found(off, *with_ports) == []


# -- clocks


@pytest.mark.parametrize("ahead_s", [0.0, 37.5, -4000.0])
def test_a_clock_is_compared_as_ntp_does(ahead_s: float) -> None:
    """0.4 s on the way there, 0.2 s of work, 0.4 s back."""
    measured = offset(ProbeTimes(100.4 + ahead_s, 100.6 + ahead_s, 100.0, 101.0))
    assert measured is not None
    assert measured.offset_s == pytest.approx(ahead_s)
    assert measured.error_s == pytest.approx(0.4)


def test_a_long_way_back_makes_the_figure_worse_and_never_blames_a_right_clock() -> None:
    measured = offset(ProbeTimes(100.1, 100.2, 100.0, 109.0))
    assert measured is not None
    assert measured.offset_s == pytest.approx(-4.35)
    assert measured.at_least_s == 0.0


def test_where_all_hosts_agree_this_computers_clock_is_the_wrong_one() -> None:
    (said,) = found(ONE, told(0, began=90.4, ended=90.6), told(1, began=90.5, ended=90.7))
    assert said.startswith("warning clock: this computer's is 9.90 s ahead of those of all hosts, which agree (wanted")
    assert "makestep here" in said


# -- versions


def test_another_nccl_is_refused_and_another_cuda_or_driver_shown() -> None:
    def gpu_host(number: int, nccl: str, cuda: str, driver: str) -> HostFacts:
        packages = {f"nvidia-nccl-cu{cuda[:2]}": nccl, "nvidia-nccl-cuda": "1"}
        return told(number, packages=packages, torch_cuda=cuda, hardware=Hardware(gpu_driver=driver))

    what = cluster(1, 1, 1, device="cuda")
    hosts = [gpu_host(0, "2.27.5", "12.8", "570.86.15"), gpu_host(1, "2.27.5", "12.8", "570.86.15")]
    assert found(what, *hosts, gpu_host(2, "2.30.7", "13.0", "575.51.03")) == [
        "failed node2: NCCL: 2.30.7 (wanted: 2.27.5, as 2 hosts have it); NCCL refuses ranks of another version: "
        "install the same version everywhere, or set cluster.python",
        "warning node2: CUDA: 13.0 (wanted: 12.8, as 2 hosts have it); torch was built with it: install the same "
        "version everywhere, or set cluster.python",
        "warning node2: GPU driver: 575.51.03 (wanted: 570.86.15, as 2 hosts have it); "
        "install the same driver everywhere",
        "warning node2: GPU driver: 575.51.03, and torch was built with CUDA 13.0 (wanted: 580 or newer); "
        "install a newer driver, or a torch for an older CUDA",
    ]
    assert (
        found(cluster(1, 1, 1), *hosts, gpu_host(2, "2.30.7", "13.0", "575.51.03")) == []
    )  # on CPUs it doesn't matter
