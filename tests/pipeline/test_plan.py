"""Rendering is pure data; validation refuses what can't work and says what fixes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.plan import environment, render
from pipeline.cluster.validation import check_batch, validate_hosts
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host, LaunchPlan, LaunchSettings
from trainers.contract.host_facts import HostFacts


def facts(number: int, **change: object) -> HostFacts:
    value = HostFacts(
        host=f"node{number}",
        identity=f"node{number} 10.0.0.{number + 1}:22 uid 0",
        hostname=f"node{number}",
        address=f"10.0.0.{number + 1}",
        interface=f"eth{number}",
        python="/venv/bin/python",
        python_version="3.12.1",
        torch_version="2.15.0+cpu",
        gpus=0,
        cpus=8,
        memory_bytes=1 << 34,
        disk_free_bytes=1 << 34,
        free_ports=(40000 + number,),
        home="/root",
    )
    return value._replace(**change)  # type: ignore[arg-type]


def cluster(*nproc: int, **change: object) -> Cluster:
    hosts = tuple(Host(name=f"node{index}", nproc_per_node=count) for index, count in enumerate(nproc))
    return replace(Cluster(launcher="pssh", hosts=hosts, settings=LaunchSettings(workdir="/w")), **change)  # type: ignore[arg-type]


def rendered(what: Cluster, *found: HostFacts, script: str | None = None, uses_torchrun: bool = True) -> LaunchPlan:
    return render(
        what,
        found,
        AttemptSpec(
            run_dir=Path("/runs/abc"),
            run_key="abc",
            attempt=2,
            trainer="trainers.classifier",
            script=script,
            uses_torchrun=uses_torchrun,
        ),
        run_id="abc-2-ff",
        master_port=found[0].free_ports[0],
    )


def test_a_script_without_torchrun_is_started_by_python_alone() -> None:
    argv = rendered(cluster(1), facts(0), script="train.py", uses_torchrun=False).nodes[0].argv
    place = ("--script", "train.py", "--node-rank", "0", "--log-dir", "/w/runs/abc-2-ff/node0/agent/ranks")
    assert argv[-8:] == (*place, "--", "/venv/bin/python")
    assert not any("torch" in word for word in argv)


def test_node_ranks_follow_the_list_and_ranks_add_up() -> None:
    plan = rendered(cluster(2, 3), facts(0), facts(1))
    assert plan.world_size == 5
    assert [(node.node_rank, node.first_rank, node.nproc_per_node) for node in plan.nodes] == [(0, 0, 2), (1, 2, 3)]
    assert (plan.master_addr, plan.master_port) == ("10.0.0.1", 40000)


def test_command_is_static_rendezvous_with_the_nodes_own_address() -> None:
    argv = rendered(cluster(2, 3), facts(0), facts(1)).nodes[1].argv
    assert argv[:2] == ("/venv/bin/python", "/w/runs/abc-2-ff/node1/code/trainers/torchrun.py")
    assert {
        "--nnodes=2",
        "--nproc-per-node=3",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--rdzv-id=abc-2-ff",
        "--master-addr=10.0.0.1",
        "--master-port=40000",
        "--local-addr=10.0.0.2",
        "--max-restarts=0",
    } <= set(argv)
    assert argv[-4:] == ("-m", "trainers.classifier", "--config", "/w/runs/abc-2-ff/node1/config.json")


def test_cores_decide_the_threads_of_a_script_and_beside_gpus_alone() -> None:
    env = rendered(cluster(3, 3), facts(0), facts(1)).nodes[1].env
    assert env["OMP_NUM_THREADS"] == "1"
    for device, script in (("cuda", None), ("cpu", "train.py")):
        env = rendered(cluster(3, 3, device=device), facts(0), facts(1), script=script).nodes[1].env
        assert env["OMP_NUM_THREADS"] == "2"  # of eight cores
    hosts = (Host(name="node0", env={"OMP_NUM_THREADS": "7"}),)
    assert rendered(cluster(hosts=hosts), facts(0)).nodes[0].env["OMP_NUM_THREADS"] == "7"


def test_environment_names_the_interface_in_both_dialects() -> None:
    env = rendered(cluster(3, 3), facts(0), facts(1)).nodes[1].env
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
    assert env["PYTHONPATH"] == "/w/runs/abc-2-ff/node1/code"


@pytest.mark.parametrize(
    ("host", "gloo", "nccl"),
    [
        (Host(name="node0"), None, "=eth0"),  # the node has set gloo's itself
        (Host(name="node0", interface="eth0"), "eth0", "=eth0"),
        (Host(name="node0", env={"NCCL_SOCKET_IFNAME": "=ib9"}), None, "=ib9"),
    ],
)
def test_host_env_wins_then_a_configured_interface_then_the_one_that_the_node_has_set(
    host: Host, gloo: str | None, nccl: str
) -> None:
    found = facts(0, network_variables={"GLOO_SOCKET_IFNAME": "ib0"})
    env = rendered(cluster(1, hosts=(host, Host(name="node1"))), found, facts(1)).nodes[0].env
    assert (env.get("GLOO_SOCKET_IFNAME"), env["NCCL_SOCKET_IFNAME"]) == (gloo, nccl)


def test_the_code_snapshot_comes_before_what_the_person_puts_on_the_python_path() -> None:
    hosts = (Host(name="node0", env={"PYTHONPATH": "/mine:/theirs"}), Host(name="node1", env={"PYTHONPATH": ""}))
    nodes = rendered(cluster(1, hosts=hosts), facts(0), facts(1)).nodes
    assert [node.env["PYTHONPATH"] for node in nodes] == [
        "/w/runs/abc-2-ff/node0/code:/mine:/theirs",
        "/w/runs/abc-2-ff/node1/code",
    ]


def test_a_run_folder_that_the_python_path_would_cut_in_two_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"/runs/a:b/code, and PYTHONPATH separates folders by ':'\n  try: paths\.runs="
    ):
        environment(Host(name="node0"), facts(0), run_dir="/runs/a:b")


def test_the_ranks_of_one_node_meet_and_speak_on_the_loopback_alone() -> None:
    found = facts(
        0,
        interfaces={"10.0.0.1": "eth0", "127.0.0.1": "lo"},
        network_variables={"GLOO_SOCKET_IFNAME": "eth0"},
    )
    (node,) = rendered(cluster(2), found).nodes
    assert {"--master-addr=127.0.0.1", "--master-port=40000"} <= set(node.argv)
    assert (node.env["GLOO_SOCKET_IFNAME"], node.env["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "GLOO_SOCKET_IFNAME" not in rendered(cluster(2), facts(0)).nodes[0].env, "interfaces that aren't known"


def refused(what: Cluster, *found: HostFacts, backend: str = "auto") -> str:
    with pytest.raises(HostError) as caught:
        validate_hosts(what, found, backend=backend)
    return str(caught.value)


@pytest.mark.parametrize(
    ("micro_batches", "said"),
    [
        (1, r"global_batch_size=10 can.t be shared evenly by 4 ranks; nearest that can: 8 or 12"),
        (2, r"global_batch_size=10 can.t be shared evenly by 4 ranks × 2 micro-batches .*; nearest that can: 8 or 16"),
    ],
)
def test_global_batch_that_cannot_be_shared_names_the_nearest_good_ones(micro_batches: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_batch(10, 4, micro_batches)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"identity": facts(0).identity}, "node0 (10.0.0.1) and node1 (10.0.0.2) are the same host (node0)"),
        ({"torch_version": None}, {}, "node0: /venv/bin/python has no torch"),
        ({}, {"python_version": "3.9.2"}, "node1: /venv/bin/python is Python 3.9.2; 3.11 or newer is needed"),
        ({}, {"torch_version": "2.9.1"}, "torch differs: node0 has 2.15.0, node1 has 2.9.1"),
        (
            {"address": "127.0.0.1"},
            {},
            "node0: its address is 127.0.0.1, where the other nodes can't reach it; set cluster.hosts[].address",
        ),
    ],
)
def test_a_host_that_does_not_fit_is_named_with_its_value(
    first: dict[str, object], second: dict[str, object], said: str
) -> None:
    assert said in refused(cluster(1, 1), facts(0, **first), facts(1, **second))


def test_nccl_without_gpus() -> None:
    assert "node0: strategy.backend=nccl, but it has no GPU" in refused(cluster(1), facts(0), backend="nccl")


def test_one_machine_by_two_addresses_ports_and_users() -> None:
    first, second = (facts(number, hostname="big", machine="5f") for number in range(2))
    text = refused(cluster(1, 1, 1), first, second, facts(2, machine="6a"))
    assert text.splitlines()[1:] == [
        "  node0 (10.0.0.1) and node1 (10.0.0.2) are the same host (big); name each node once, more ranks on it are "
        "cluster.hosts[].nproc_per_node"
    ]


def test_more_ranks_than_gpus_unless_another_backend_than_nccl_is_asked_for() -> None:
    found = [facts(0, gpus=2), facts(1, gpus=4)]
    text = refused(cluster(4, 4, device="cuda"), *found)
    assert "node0: nproc_per_node=4 is more than its 2 GPUs" in text
    assert "node1" not in text
    assert text == refused(cluster(4, 4, device="cuda"), *found, backend="nccl")
    validate_hosts(cluster(4, 4, device="cuda"), found, backend="gloo")


def test_gpus_that_the_configured_environment_hides_do_not_count() -> None:
    host = Host(name="node0", nproc_per_node=2, env={"CUDA_VISIBLE_DEVICES": "5"})
    text = refused(Cluster(launcher="pssh", hosts=(host,), device="cuda"), facts(0, gpus=8))
    assert "node0: nproc_per_node=2 is more than its 1 GPU, and" in text


def test_hosts_with_gpus_are_refused_until_the_key_says_cuda_or_cpu() -> None:
    text = refused(cluster(1, 1), facts(0, gpus=8), facts(1))
    assert (
        "node0: it has 8 GPUs, and the run's key says cpu; take cluster.device=cuda, or cluster.device=cpu to" in text
    )
    assert "node1" not in text
    validate_hosts(cluster(1, 1, device="cpu"), [facts(0, gpus=8), facts(1)])


def test_a_host_without_gpus_is_refused_where_the_key_says_cuda() -> None:
    text = refused(cluster(1, 1, device="cuda"), facts(0, gpus=8), facts(1))
    assert text.splitlines()[1:] == [
        "  node1: cluster.device=cuda, but it has no GPU that CUDA may see; take cluster.device=cpu"
    ]
    hidden = Host(name="node0", env={"CUDA_VISIBLE_DEVICES": ""})
    assert "node0: cluster.device=cuda, but" in refused(
        Cluster(launcher="pssh", hosts=(hidden,), device="cuda"), facts(0, gpus=8)
    )


@pytest.mark.parametrize(("device", "told"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_ranks_are_told_the_device_that_the_key_names(device: str, told: str) -> None:
    plan = rendered(cluster(1, 1, device=device), facts(0), facts(1))
    assert [node.env["PACELINE_DEVICE"] for node in plan.nodes] == [told, told]


@pytest.mark.parametrize(
    ("device", "seen", "bound"),
    [
        ("cuda", {}, True),
        ("cuda", {"can_bind_numa": False}, False),
        ("cuda", {"torch_version": "2.8.0"}, False),
        ("cuda", {"gpus": 1}, False),  # two ranks share it: torchrun would look for a second one
        ("cpu", {}, False),
    ],
)
def test_ranks_are_bound_to_the_cores_beside_their_gpus_where_torchrun_can(
    device: str, seen: dict[str, object], bound: bool
) -> None:
    able = facts(0, gpus=2, can_bind_numa=True)
    plan = rendered(cluster(2, device=device), able._replace(**seen))  # type: ignore[arg-type]
    assert ("--numa-binding=node" in plan.nodes[0].argv) == bound


def test_ranks_are_told_how_long_a_collective_may_take() -> None:
    plan = rendered(cluster(1, 1).with_settings(collective_timeout_s=90.5), facts(0), facts(1))
    assert [node.env["PACELINE_COLLECTIVE_TIMEOUT_S"] for node in plan.nodes] == ["90.5", "90.5"]
