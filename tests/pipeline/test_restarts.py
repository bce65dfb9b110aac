"""What a further attempt runs on, when there is none, and what other nodes see of a host that is gone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pipeline.cluster import validation
from pipeline.cluster.attempt import running, silent_hosts
from pipeline.cluster.attempt.running import CheckpointFetch
from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import TrainingError, UsageError
from pipeline.core.specs import Cluster, Host, LaunchPlan, LaunchSettings, NodePlan
from pipeline.execution.restarts import Restarts
from pipeline.keys.content_key import content_key
from pipeline.runs.metrics_file import cut_torn_line
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

HOSTS = (Host(name="a", nproc_per_node=2), Host(name="b", nproc_per_node=4, env={"X": "1"}))
SPARES = (Host(name="c", nproc_per_node=2), Host(name="d", nproc_per_node=4, env={"X": "1"}), Host(name="e"))
CLUSTER = Cluster(launcher="pssh", hosts=HOSTS, spares=SPARES)


def test_a_spare_with_the_same_ranks_and_variables_takes_the_place_of_a_host_that_is_gone() -> None:
    replaced = validation.replace_lost(CLUSTER, ["b"])
    assert replaced is not None
    cluster, lines = replaced
    assert [host.name for host in cluster.hosts] == ["a", "d"]
    assert [host.name for host in cluster.spares] == ["c", "e"]
    assert lines == ["d takes the place of b, as node 1"]
    assert validation.replace_lost(cluster, ["d"]) is None, "no other has four ranks"
    first = validation.replace_lost(CLUSTER, ["a"])
    assert first is not None
    assert [host.name for host in first[0].hosts] == ["c", "b"], "rank 0 moves with its place"
    assert validation.replace_lost(CLUSTER, ["a", "c"]) is None, "a spare that is gone itself is none"


def test_a_spare_that_stays_idle_is_named_with_the_reason() -> None:
    assert Restarts(CLUSTER).idle_spares(["a"]) == [
        "spare d can't take its place: it has 4 ranks (nproc_per_node=4), and a has 2",
        "spare e can't take its place: it has 1 rank (nproc_per_node=1), and a has 2",
    ]
    assert Restarts(CLUSTER, keeps_hosts=True).idle_spares(["a"]) == []
    assert validation.unfit_spares(CLUSTER, []) == []


def test_a_host_that_could_not_be_asked_is_told_of_until_its_lease_ends() -> None:
    restarts = Restarts(CLUSTER)
    assert restarts.may_still_run(0.0) == ""
    restarts.record_failure(TrainingError("a no longer answers", cause="host", gone=["a"]), step=3, now=1000.0)
    said = restarts.may_still_run(1000.0 + CLUSTER.settings.lease_s - 1)
    assert said.startswith(", but perhaps on a until ")
    assert said.endswith(f"(cluster.lease_s={CLUSTER.settings.lease_s:g}), which couldn't be asked")
    assert restarts.may_still_run(1000.0 + CLUSTER.settings.lease_s) == ""


def test_spares_without_a_further_attempt_are_remarked_on() -> None:
    assert "cluster.max_restarts=0 allows none" in validation.unused_warning(CLUSTER)
    assert validation.unused_warning(CLUSTER.with_settings(max_restarts=1)) == ""
    assert validation.unused_warning(replace(CLUSTER, spares=())) == ""


def test_no_spare_takes_the_place_of_a_host_that_a_sweep_has_dealt_out() -> None:
    assert Restarts(CLUSTER).replace(["b"]) == ["d takes the place of b, as node 1"]
    restarts = Restarts(CLUSTER, keeps_hosts=True)
    assert (restarts.replace(["b"]), restarts.cluster) == ([], CLUSTER)


def test_without_a_spare_the_hosts_that_are_left_go_on_where_shards_and_min_nodes_allow() -> None:
    hosts = tuple(Host(name=name, nproc_per_node=2) for name in "abcd")
    cluster = Cluster(launcher="pssh", hosts=hosts, settings=LaunchSettings(min_nodes=2))
    restarts = Restarts(cluster, shards=8)
    assert restarts.replace(["a"]) == ["going on without a: 2 nodes, 4 ranks"], "6 ranks can't share 8 parts"
    assert [host.name for host in restarts.cluster.hosts] == ["b", "c"]
    assert [host.name for host in restarts.cluster.spares] == ["d"]
    assert restarts.replace(["b"]) == ["d takes the place of b, as node 0"]
    assert restarts.replace(["d"]) == [], "one node is fewer than min_nodes"
    assert Restarts(cluster).replace(["a"]) == [], "without shards other ranks are another run"


def failed(text: str, cause: str = "code") -> TrainingError:
    return TrainingError(text, cause=cause)


def test_the_same_failure_at_the_same_step_is_not_tried_a_third_time() -> None:
    restarts = Restarts(CLUSTER)
    restarts.record_failure(
        failed("training failed on a, rank 1: index 70 is out of bounds\nlogs: 1"), step=58, now=0.0
    )
    with pytest.raises(TrainingError, match="failed in the same way at step 58 before, so it is not tried again"):
        restarts.record_failure(
            failed("training failed on a, rank 1: index 71 is out of bounds\nlogs: 2"), step=58, now=0.0
        )


def test_a_script_that_has_saved_another_checkpoint_has_advanced() -> None:
    restarts = Restarts(CLUSTER)
    for saved in ("", "checkpoints/w.bin 1", "checkpoints/w.bin 2"):
        restarts.record_failure(failed("train.py ended with exit code 3"), step=0, saved=saved, now=0.0)
    with pytest.raises(TrainingError, match="same way before, and no logged step or checkpoint tells of progress"):
        restarts.record_failure(failed("train.py ended with exit code 3"), step=0, saved="checkpoints/w.bin 2", now=0.0)


def test_a_value_that_ranks_refuse_and_a_cancelled_job_are_not_tried_again() -> None:
    with pytest.raises(TrainingError, match="must be at most"):
        Restarts(CLUSTER).record_failure(
            failed("training failed on a, rank 0: seed=-1 must be at most 9", "config"), step=0, now=0.0
        )
    with pytest.raises(TrainingError, match="was ended by Slurm"):
        Restarts(CLUSTER).record_failure(
            failed("training failed: job 7 was ended by Slurm: CANCELLED", "cancelled"), step=0, now=0.0
        )


@pytest.mark.parametrize(
    ("text", "cause", "step"),
    [("one error", "code", 59), ("another error", "code", 58), ("one error", "host", 58)],
    ids=["at another step", "another one", "a host's"],
)
def test_every_other_failure_is(text: str, cause: str, step: int) -> None:
    restarts = Restarts(CLUSTER)
    restarts.record_failure(failed("one error"), step=58, now=0.0)
    restarts.record_failure(failed(text, cause), step=step, now=0.0)
    assert restarts.has_failed


def test_without_a_spare_the_same_hosts_are_asked_again() -> None:
    restarts = Restarts(Cluster(launcher="pssh", hosts=HOSTS))
    assert restarts.replace(["b"]) == []
    assert restarts.cluster.hosts == HOSTS


def test_spares_are_read_as_hosts_are_and_are_no_part_of_the_key() -> None:
    def configured(*words: str) -> Any:
        words = ("cluster=two_node", *words)
        return build(resolve(compose_config(words)), words, root=Path("/project"), local_gpus=0)

    def key(config: Any) -> str:
        made: dict[str, Any] = {"code": {}, "data_digest": "d", "environment": {}}
        return str(content_key(canonical=config.canonical, topology=config.topology, **made).digest)

    with_spare = configured("cluster.spares=[{name: node2, port: 2200}]", "cluster.stall_s=60")
    assert [spare.label for spare in with_spare.cluster.spares] == ["node2:2200"]
    assert key(with_spare) == key(configured())
    with pytest.raises(UsageError, match=r"cluster\.hosts and cluster\.spares both name node1"):
        configured("cluster.spares=[{name: node1}]")
    with pytest.raises(UsageError, match=r"cluster\.stall_s=1 must be a finite number from 5"):
        configured("cluster.stall_s=1")
    with pytest.raises(UsageError, match=r"cluster\.min_nodes=1 needs trainer\.shards"):
        configured("cluster.min_nodes=1")
    with pytest.raises(UsageError, match=r"cluster\.min_nodes=3 is more than the 2 of cluster\.hosts"):
        configured("cluster.min_nodes=3", "trainer.shards=8")


def plan(*identities: str) -> LaunchPlan:
    fields: dict[str, Any] = {"argv": (), "env": {}, "run_dir": "/r", "data_dir": "", "state_dir": "/s"}
    nodes = tuple(
        NodePlan(
            node_rank=n, host=f"node{n}", identity=one, address="10.0.0.1", first_rank=n, nproc_per_node=1, **fields
        )
        for n, one in enumerate(identities)
    )
    where: dict[str, Any] = {"launcher": "pssh", "master_addr": "10.0.0.1", "master_port": 1}
    return LaunchPlan(run_key="k", run_id="k-x-1-n", attempt=1, world_size=2, lease_s=600.0, nodes=nodes, **where)


def test_what_the_other_nodes_see_of_a_lost_host_tells_its_kinds_apart() -> None:
    two = plan("n0 10.0.0.1:22 uid 0", "n1 fe80::1:2200 uid 0", "n2 127.0.0.1:0 uid 0")
    assert silent_hosts.ssh_server(two, "node1") == ("fe80::1", 2200)
    assert silent_hosts.ssh_server(two, "node2") is None
    assert silent_hosts.lines_on_lost({"node1": {"node0": "unreachable", "node2": "silent"}}) == [
        "node1: the host is alive, as node2 sees, but its ssh server says nothing: frozen, or overloaded"
    ]
    assert silent_hosts.lines_on_lost({"node1": {"node0": "unreachable", "node2": "unreachable"}}) == [
        "node1: node0 and node2 can't reach it either: the host, or its link, is down"
    ]
    assert silent_hosts.lines_on_lost({"node1": {"node0": "answers"}}) == [
        "node1: its ssh server answers node0: the host is alive, but can't be reached from here"
    ]


@pytest.mark.parametrize(
    ("node0", "node2", "dead"),
    [
        ("unreachable", "silent", True),
        ("unreachable", "answers", False),
        ("unreachable", "refuses", False),  # it restarts, and may be back in a moment
        ("unreachable", None, False),
    ],
)
def test_a_silent_host_is_dead_only_if_no_other_one_reaches_it(node0: str, node2: str | None, dead: bool) -> None:
    assert silent_hosts.is_dead({"node0": node0} | ({"node2": node2} if node2 else {}), ["node0", "node2"]) == dead
    assert not silent_hosts.is_dead({}, ["node0"]), "nobody was asked of it"
    assert not silent_hosts.is_dead({}, []), "there is nobody to ask"
    assert silent_hosts.lines_on_lost({"node1": {}}) == []


def test_a_torn_last_line_of_the_metrics_is_cut_off_and_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_torn_line(path)
    assert not path.exists()
    for text, left in (('{"a": 1}\n{"b', '{"a": 1}\n'), ('{"a": 1}\n', '{"a": 1}\n'), ('{"a', "")):
        path.write_text(text)
        cut_torn_line(path)
        assert path.read_text() == left


class Collecting:
    """A launcher that only brings files, and fails when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.brings, self.go_on, self.full = True, threading.Event(), False

    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool:
        self.asked.append(plan.outputs.resume)
        self.go_on.wait()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.brings


def fetching(
    launcher: Collecting,
    run_dir: Path,
    every_s: float = 1e-9,
    on_fetched: Callable[[], None] = lambda: None,
    on_failed: Callable[[OSError], None] = lambda _: None,
) -> CheckpointFetch:
    where = replace(plan("n0 10.0.0.1:22 uid 0"), checkpoint_fetch_s=every_s)
    return CheckpointFetch(cast("Launcher", launcher), where, run_dir, on_fetched, on_failed)


def test_a_run_that_has_ended_well_does_not_wait_for_a_mirror_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_COPY_S", 0.01)
    launcher, goes_on = Collecting(), threading.Event()
    launcher.go_on.set()
    fetch = fetching(launcher, tmp_path, on_fetched=lambda: (goes_on.wait(HANG_S), None)[1])
    fetch.offer(40)
    fetch.wait(copied=False)
    assert len(launcher.asked) == 1
    assert not goes_on.is_set()
    goes_on.set()
    fetch.wait()


def test_new_checkpoints_are_fetched_one_at_a_time_without_the_metrics_that_are_being_written(tmp_path: Path) -> None:
    launcher = Collecting()
    fetch = fetching(launcher, tmp_path)
    fetch.offer(40)
    fetch.offer(80)
    launcher.go_on.set()
    fetch.wait()
    assert [files[0] for files in launcher.asked] == ["checkpoints/step-00000040.pt"]
    assert not any("metrics" in file for file in launcher.asked[0])
    fetch._next_at = 0.0
    fetch.offer(40)
    fetch.wait()
    assert len(launcher.asked) == 1, "it is here already"
    never = fetching(launcher, tmp_path, every_s=0.0)
    never.offer(80)
    never.wait()
    assert len(launcher.asked) == 1


def test_a_run_folder_that_takes_no_checkpoint_is_told_once_and_tried_again(tmp_path: Path) -> None:
    launcher, told = Collecting(), list[OSError]()
    launcher.go_on.set()
    fetch = fetching(launcher, tmp_path, on_failed=told.append)
    for full in (True, True, False, True):
        launcher.full, fetch._next_at, fetch._step = full, 0.0, 0
        fetch.offer(40)
        fetch.wait()
    assert len(launcher.asked) == 4
    assert [error.strerror for error in told] == ["No space left on device"] * 2
