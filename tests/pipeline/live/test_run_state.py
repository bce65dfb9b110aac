"""What a state of a run becomes by what is heard of it."""

from __future__ import annotations

import math

from pipeline.cluster.events import LogLine, NodeExit, NodeLost
from pipeline.core.specs import LaunchPlan, NodePlan
from pipeline.live.state import RunState, ShownLine, after, first_state
from pipeline.runs.metrics_file import MetricsRow
from trainers.contract.beats import NodeBeat, Phase, RankBeat

FIRST = RunState(key="cf08486f7c19", title="digits small_cnn sgd", batch=64)
STEPS = LogLine(
    host="node0", rank=0, text="2 ranks on 2 nodes: cpu; batch 64 (32 a rank), 19 steps an epoch, 380 steps"
)


def plan(*hosts: str, attempt: int = 1) -> LaunchPlan:
    run_id = f"k-abcdef-{attempt}-aa"
    nodes = tuple(
        NodePlan(
            node_rank=number, host=host, identity=host, address=host, argv=(), env={}, data_dir="/d",
            run_dir=f"/w/runs/{run_id}/node{number}", state_dir=f"/w/runs/{run_id}/node{number}/agent",
            first_rank=number, nproc_per_node=1,
        )
        for number, host in enumerate(hosts)
    )  # fmt: skip
    return LaunchPlan(
        run_key="k", run_id=run_id, attempt=attempt, launcher="pssh", master_addr="a", master_port=1,
        world_size=len(hosts), lease_s=1.0, nodes=nodes,
    )  # fmt: skip


def rank(number: int, step: int, phase: int = Phase.COMPUTING, for_s: float = 0.0) -> RankBeat:
    return RankBeat(
        rank=number, pid=1, step=step, phase=phase, moves=1, for_s=for_s, collectives=0, own_s=0.0
    )  # fmt: skip


def heard(*events: tuple[float, object]) -> RunState:
    state = FIRST
    for now, event in events:
        state = after(state, event, now)
    return state


def row(step: int, time_s: float, attempt: str = "k-abcdef-1-aa", **metrics: float) -> MetricsRow:
    named = {name.replace("_", "/", 1): value for name, value in metrics.items()}
    return MetricsRow(time_s=time_s, step=step, epoch=1, metrics=named, attempt=attempt)


def test_a_host_stands_where_its_slowest_rank_is() -> None:
    beat = NodeBeat(host="node0", ranks=(rank(0, 8, Phase.WAITING), rank(1, 8, Phase.COMPUTING, 12.0), rank(2, 9)))
    host = heard((0.0, plan("node0", "node1")), (1.0, beat)).hosts["node0"]
    assert (host.step, host.doing, host.for_s, host.ranks) == (8, "computing gradients", 12.0, 3)


def test_a_scripts_host_runs_though_its_ranks_tell_nothing() -> None:
    for config, doing in (({"program": {"name": "script", "script": "train.py"}}, "running"), ({}, "starting")):
        begun = after(first_state("k", config), plan("node0"), 0.0)
        assert after(begun, NodeBeat(host="node0", ranks=()), 1.0).hosts["node0"].doing == doing


def test_a_hosts_speed_is_taken_over_seconds() -> None:
    beats = [(float(second), NodeBeat(host="node0", ranks=(rank(0, 1 + 4 * second),))) for second in range(6)]
    state = heard((0.0, plan("node0")), *beats)
    assert state.hosts["node0"].steps_per_s == 4.0
    assert heard((0.0, plan("node0")), *beats[:3]).hosts["node0"].steps_per_s is None


def test_steps_come_from_rank_0s_words_and_the_time_left_from_this_attempts_metrics() -> None:
    old = row(190, 10.0, attempt="k-0")
    state = heard(
        (0.0, STEPS), (0.0, old), (0.0, plan("node0", attempt=1)), (1.0, row(190, 1000.0)), (2.0, row(209, 1038.0))
    )
    assert (state.steps, state.steps_per_epoch, state.step) == (380, 19, 209)
    assert state.left_s == 2.0 * (380 - 209)
    assert state.done_fraction == 209 / 380


def test_a_loss_that_is_no_number_is_kept_and_counts_as_a_warning() -> None:
    state = heard((0.0, row(3, 1.0, train_loss=math.nan)))
    assert state.loss is not None
    assert math.isnan(state.loss)
    assert (state.warnings, state.warning) == (1, "train/loss is nan at step 3")


def test_warnings_are_counted_once_though_a_ranks_line_comes_twice() -> None:
    line = LogLine(host="node0", rank=0, text="warning: metrics.jsonl: line 3 was damaged")
    state = heard(
        (0.0, line), (0.0, ShownLine(text=f"node0:0 | {line.text}")), (0.0, ShownLine(text="WARNING: the disk is full"))
    )
    assert (state.warnings, state.warning) == (2, "the disk is full")


def test_a_host_that_is_lost_and_one_that_failed_say_so_until_the_next_attempt() -> None:
    ends = [(1.0, NodeLost(host="node0", reason="gone")), (1.0, NodeExit(host="node1", code=9))]
    state = heard((0.0, plan("node0", "node1")), *ends)
    assert [host.end for host in state.hosts.values()] == ["lost", "failed (9)"]
    again = after(state, plan("node1", "node2", attempt=2), 2.0)
    assert [*again.hosts] == ["node1", "node2"]
    assert (again.attempt, again.hosts["node1"].end) == (2, "")


def test_a_beat_from_before_a_hosts_end_that_is_heard_after_it_changes_nothing() -> None:
    """Of what comes each second the view takes the newest, after the events of the same moment."""
    ends = [(1.0, NodeExit(host="node0", code=0)), (1.0, NodeLost(host="node1", reason="gone"))]
    late = [(1.1, NodeBeat(host=name, ranks=(rank(0, 3),))) for name in ("node0", "node1")]
    hosts = heard((0.0, plan("node0", "node1")), *ends, *late).hosts
    assert (hosts["node0"].end, hosts["node1"].end) == ("ended", "")
