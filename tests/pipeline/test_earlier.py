"""What starts that nobody has seen the end of have left: each is asked on its own hosts, whichever the next one has."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import earlier, starts
from pipeline.cluster.earlier import EarlierStarts
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.core.specs import SCRIPT_OUTPUTS, Cluster, Host, LaunchPlan, LaunchSettings, NodePlan
from pipeline.runs import journal

NODE = NodePlan(
    node_rank=0, host="node0", identity="id of node0", address="", argv=("evil.sh",), env={"A": "b"},
    run_dir="", data_dir="", state_dir="", first_rank=0, nproc_per_node=1,
)  # fmt: skip


class Fact:
    def __init__(self, host: str, identity: str = "", machine: str | None = None) -> None:
        self.host, self.identity, self.machine = host, identity or f"id of {host}", machine


class Hosts:
    """Stands for the launchers of all clusters: which host was asked for what, and the step that each has."""

    def __init__(self, steps: dict[str, int], silent: tuple[str, ...] = ()) -> None:
        self.steps, self.silent, self.told = steps, silent, list[tuple[str, ...]]()

    def create(self, cluster: Cluster) -> Any:
        return _Launcher(self, cluster)


class _Launcher:
    def __init__(self, hosts: Hosts, cluster: Cluster) -> None:
        self.hosts, self.cluster, self.capabilities = hosts, cluster, Capabilities()

    def stop(self, run_key: str, run_dir: Path) -> dict[str, str]:
        labels = [host.label for host in self.cluster.hosts]
        self.hosts.told.append(("stop", *labels))
        return {label: "no route to host" for label in labels if label in self.hosts.silent}

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        host = plan.nodes[0].host
        assert host in [host.label for host in self.cluster.hosts]
        save(run_dir, self.hosts.steps[host])
        return True

    def notes(self) -> list[str]:
        return []

    def clean(self, plan: LaunchPlan) -> None:
        self.hosts.told.append(("clean", *(host.label for host in self.cluster.hosts)))

    def close(self) -> None:
        pass


def save(run_dir: Path, step: int) -> None:
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    for old in (run_dir / "checkpoints").glob("*"):
        old.unlink()
    (run_dir / "checkpoints" / f"step-{step:08}.pt").touch()


def on(*names: str, **host: Any) -> Cluster:
    hosts = tuple(Host(name=name, **host) for name in names)
    return Cluster(launcher="pssh", hosts=hosts, ssh_config="lab", settings=LaunchSettings(lease_s=600.0))


def begin(run_dir: Path, attempt: int, cluster: Cluster, **plan: Any) -> LaunchPlan:
    """As a start does, whose command is killed then."""
    run_id = journal.new_attempt_id("k", run_dir, attempt, "aa")
    nodes = tuple(
        dataclasses.replace(
            NODE, node_rank=rank, host=host.label, identity=f"id of {host.name}",
            run_dir=f"/w/runs/{run_id}/node{rank}", state_dir=f"/w/runs/{run_id}/node{rank}/agent",
        )
        for rank, host in enumerate(cluster.hosts)
    )  # fmt: skip
    made = LaunchPlan(
        run_key="k", run_id=run_id, attempt=attempt, launcher=cluster.launcher, master_addr="", master_port=1,
        world_size=1, lease_s=600.0, nodes=nodes, **plan,
    )  # fmt: skip
    starts.record(made, run_dir)
    journal.register_attempt(run_dir, run_id)
    return made


def bring(hosts: Hosts, run_dir: Path, *now: str, is_restart: bool = False) -> list[str]:
    """What is said when the next attempt begins on the hosts ``now``."""
    facts: Any = [Fact(name) for name in now]
    return EarlierStarts(hosts.create(on(*now)), facts, run_dir, is_restart=is_restart).end_and_collect()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts({"node0": 7, "node1": 3, "node2": 5})
    monkeypatch.setattr("pipeline.cluster.launchers.create", made.create)
    return made


def steps(run_dir: Path) -> list[str]:
    return [path.stem for path in (run_dir / "checkpoints").glob("*.pt")]


def test_an_attempt_on_other_hosts_is_ended_there_and_its_checkpoints_come(hosts: Hosts, tmp_path: Path) -> None:
    plan = begin(tmp_path, 1, on("node0", user="ann"))
    hosts.steps["ann@node0"] = 7
    assert bring(hosts, tmp_path, "node2") == [
        "attempt 1 was left on ann@node0: it is ended there, and its checkpoints were fetched"
    ]
    assert hosts.told == [("stop", "ann@node0"), ("clean", "ann@node0")]
    assert steps(tmp_path) == ["step-00000007"]
    assert starts.is_collected(plan.run_id, tmp_path)
    assert bring(hosts, tmp_path, "node2") == []
    assert len(hosts.told) == 2, "once"


def test_a_host_with_another_name_by_now_is_asked_once_and_those_beside_it_by_their_own_way(
    hosts: Hosts, tmp_path: Path
) -> None:
    begin(tmp_path, 1, on("node0", "node1"))
    assert bring(hosts, tmp_path, "node0", "node2") == []
    assert hosts.told == [
        ("stop", "node0", "node2"),
        ("stop", "node1"),
        ("clean", "node0", "node2"),
        ("clean", "node1"),
    ]


def placed(run_dir: Path, cluster: Cluster) -> None:
    """Attempt 1 on node0, which has told its machine."""
    plan = begin(run_dir, 1, cluster)
    node = dataclasses.replace(plan.nodes[0], identity="node0 192.0.2.1:22 uid 0", machine="m0")
    starts.record(dataclasses.replace(plan, nodes=(node,)), run_dir)


def test_a_host_at_another_of_its_addresses_is_asked_by_that_one(hosts: Hosts, tmp_path: Path) -> None:
    placed(tmp_path, on("node0"))
    hosts.steps["other"] = 7
    facts: Any = [Fact("other", "node0 198.51.100.1:22 uid 0", "m0")]
    said = EarlierStarts(hosts.create(on("other")), facts, tmp_path, is_restart=False).end_and_collect()
    assert (said, hosts.told) == ([], [("stop", "other"), ("clean", "other")])
    assert steps(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize(("uid", "machine"), [(1000, "m0"), (0, "m1"), (0, None)])
def test_another_user_or_machine_is_another_host(hosts: Hosts, tmp_path: Path, uid: int, machine: str | None) -> None:
    placed(tmp_path, on("node0"))
    facts: Any = [Fact("other", f"node0 198.51.100.1:22 uid {uid}", machine)]
    EarlierStarts(hosts.create(on("other")), facts, tmp_path, is_restart=False).end_and_collect()
    assert hosts.told == [("stop", "node0"), ("clean", "node0")]


def test_of_a_host_that_another_launcher_has_reached_is_said_that_the_start_ends_the_attempt(
    hosts: Hosts, tmp_path: Path
) -> None:
    placed(tmp_path, dataclasses.replace(on("node0"), launcher="mpi"))
    run_id = journal.known_attempts(tmp_path)[0]
    launcher = hosts.create(on("localhost"))
    launcher.capabilities = Capabilities(shares_run_dir=True)
    facts: Any = [Fact("localhost", "node0 127.0.0.1:0 uid 0", "m0")]
    said = EarlierStarts(launcher, facts, tmp_path, is_restart=False).end_and_collect()
    assert said == [
        "node0: attempt 1 was started there by cluster.launcher=mpi, and node0 is localhost: its processes are ended "
        f"before this one starts; files that only it has stay in /w/runs/{run_id}/node0 and are not used"
    ]
    assert hosts.told == []


def test_of_a_host_that_does_not_answer_is_said_until_when_it_may_train_on(hosts: Hosts, tmp_path: Path) -> None:
    hosts.silent = ("node0",)
    plan = begin(tmp_path, 1, on("node0"))
    until = time.strftime("%H:%M:%S", time.localtime(starts.open_starts(tmp_path)[0].lease_ends))
    assert bring(hosts, tmp_path, "node2", is_restart=True) == []
    assert hosts.told == [], "the command that lost it has told of it"
    assert bring(hosts, tmp_path, "node2") == [
        "node0: attempt 1 was started there, and it could not be asked to stop (no route to host); its ranks may train "
        f"on until {until} (cluster.lease_s=600); the same command fetches its checkpoints once it answers"
    ]
    begin(tmp_path, 2, on("node2"))
    assert not starts.is_collected(plan.run_id, tmp_path), "no leftover that may go"

    hosts.silent = ()
    bring(hosts, tmp_path, "node0")
    assert steps(tmp_path) == ["step-00000007"], "it was ahead, though a later attempt began"
    assert starts.open_starts(tmp_path) == []


def test_an_older_attempt_that_is_behind_takes_nothing_back(hosts: Hosts, tmp_path: Path) -> None:
    begin(tmp_path, 1, on("node1"))
    begin(tmp_path, 2, on("node2"), outputs=SCRIPT_OUTPUTS)
    begin(tmp_path, 3, on("node0"))
    bring(hosts, tmp_path, "node2")
    assert steps(tmp_path) == ["step-00000007"]
    hosts.steps["node1"] = 6
    begin(tmp_path, 4, on("node1"))
    begin(tmp_path, 5, on("node0"))
    bring(hosts, tmp_path, "node2")
    assert steps(tmp_path) == ["step-00000007"]


def test_stop_asks_the_hosts_of_every_attempt_that_nobody_has_seen_the_end_of(hosts: Hosts, tmp_path: Path) -> None:
    plan = begin(tmp_path, 1, on("node0"))
    begin(tmp_path, 2, on("node2"))
    assert earlier.stop_elsewhere(on("node2"), tmp_path) == (["node0"], {})
    assert hosts.told == [("stop", "node0")]
    hosts.silent = ("node0",)
    _, failed = earlier.stop_elsewhere(on("node2"), tmp_path)
    assert failed["node0"].startswith("it could not be asked to stop (no route to host); its ranks may train on until ")
    path = next(tmp_path.glob("attempts/1/start-*.json"))
    os.utime(path, (0, time.time() - 601))
    assert earlier.stop_elsewhere(on("node2"), tmp_path) == (["node0"], {}), "its lease is over"
    starts.renew(plan.run_id, tmp_path)
    assert earlier.stop_elsewhere(on("node2"), tmp_path)[1] != {}


def test_hosts_of_another_launcher_are_not_reached_and_that_is_said(hosts: Hosts, tmp_path: Path) -> None:
    begin(tmp_path, 1, dataclasses.replace(on("node0"), launcher="mpi"))
    said = bring(hosts, tmp_path, "node2")
    assert said[0].startswith(
        "node0: attempt 1 was started there, and it could not be asked to stop (cluster.launcher=mpi started it "
        "there, and this command reaches hosts by pssh); its ranks may train on until "
    )
    _, failed = earlier.stop_elsewhere(on("node0"), tmp_path)
    assert list(failed) == ["node0"], "its name means another host to another launcher"
    assert hosts.told == []


def test_what_is_noted_of_a_start_are_labels_and_hosts_are_reached_as_the_words_say(tmp_path: Path) -> None:
    begin(tmp_path, 1, on("node0", python="/then/python", secrets={"TOKEN": "hunter2"}, env={"TOKEN": "***"}))
    (path,) = tmp_path.glob("attempts/1/start-*.json")
    assert not [word for word in ("hunter2", "evil.sh", "/then/python", "lab", "argv") if word in path.read_text()]
    (start,) = starts.open_starts(tmp_path)
    assert start.plan.nodes[0].argv == ()
    now = dataclasses.replace(on("node1", python="/now/python", user="ann"), ssh_config="now")
    way = starts.cluster_with(now, start.plan, ["node0", "ann@node1", "bob@node2:22"])
    assert way.ssh_config == "now"
    assert way.hosts == (
        Host(name="node0", python="/now/python"),
        *now.hosts,
        Host(name="node2", user="bob", port=22, python="/now/python"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "../../evil-1-aa"), ("run_key", "other"), ("attempt", "1"), ("attempt", 10**30), ("launcher", "a/b"),
        ("lease_s", "600"), ("lease_s", float("inf")), ("stall_s", True), ("master_addr", "a b"), ("master_port", -1),
        ("nodes", {}), ("nodes", [None]), ("outputs", None), ("host", "-oProxyCommand=evil.sh"), ("host", "a;b"),
        ("host", "../../x"), ("host", "node0:99999"), ("host", ["node0"]), ("run_dir", "/home/ann/thesis"),
        ("run_dir", "/w/runs/x/node0"), ("state_dir", "/w/runs/../../home/ann"), ("identity", "a\nb"),
        ("identity", "a" * 5000), ("machine", 1), ("node_rank", 1), ("nproc_per_node", "8"),
    ],
)  # fmt: skip
def test_a_start_whose_labels_have_another_form_is_none(field: str, value: Any, tmp_path: Path) -> None:
    begin(tmp_path, 1, on("node0"))
    (path,) = tmp_path.glob("attempts/1/start-*.json")
    noted = json.loads(path.read_text())
    (noted if field in noted else noted["nodes"][0])[field] = value
    path.write_text(json.dumps(noted))
    assert starts.open_starts(tmp_path) == []


def test_a_start_that_is_no_json_or_lies_elsewhere_is_none(tmp_path: Path) -> None:
    begin(tmp_path, 1, on("node0"))
    (path,) = tmp_path.glob("attempts/1/start-*.json")
    (tmp_path / "attempts" / "2").mkdir()
    path.rename(tmp_path / "attempts" / "2" / path.name)
    for number, text in enumerate(("{}", "[" * 99999, '"', '{"run_id": 1' + "0" * 9999 + "}")):
        (tmp_path / "attempts" / "1" / f"start-{number}.json").write_text(text)
    (tmp_path / "attempts" / "1" / "start-9.json").symlink_to("/dev/zero")
    assert starts.open_starts(tmp_path) == []
