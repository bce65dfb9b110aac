"""Which points a benchmark measures, and its speeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.cluster.preflight import State
from pipeline.cluster.preflight.judgement import lines
from pipeline.core.specs import Cluster, Host
from pipeline.diagnostics import Benchmark, ScalingPoint, Speed, checks, clusters_to_measure, speeds, table


def cluster(*ranks: int) -> Cluster:
    hosts = tuple(Host(name=f"node{number}", nproc_per_node=count) for number, count in enumerate(ranks))
    return Cluster(launcher="pssh", hosts=hosts, settings=PsshConfig())


def shape(one: Cluster) -> tuple[int, int]:
    return one.nnodes, one.world_size


def result(ranks: int, own: list[float], plain: list[float], *, peak: float | None = None) -> dict[str, Any]:
    return {
        "model": "resnet18",
        "parameters": 11173962,
        "dataset": "cifar10",
        "synthetic": False,
        "precision": "bf16",
        "global_batch_size": 128,
        "backend": "gloo",
        "nnodes": 1,
        "world_size": ranks,
        "hardware": {"name": "a processor", "device": "cpu", "torch": "2.15.0", "threads": 1, "peak_flop_per_s": peak},
        "flop_per_image": 2e9,
        "pairs": [{"paceline_images_per_s": a, "plain_images_per_s": b} for a, b in zip(own, plain, strict=True)],
    }


def measured(*results: dict[str, Any]) -> Benchmark:
    return Benchmark(Path(), "abc", [*map(ScalingPoint.from_json, results)], ["1 host with 3 ranks: too many"])


def test_ranks_of_one_host_then_hosts() -> None:
    good, left_out = clusters_to_measure(cluster(2, 2, 2, 2), 128)
    assert [shape(one) for one in good] == [(1, 1), (1, 2), (2, 4), (4, 8)]
    assert left_out == ["3 hosts with 6 ranks: they can't share a global batch of 128"]


def test_of_many_ranks_the_powers_of_two_and_all_of_them() -> None:
    good, _ = clusters_to_measure(cluster(12), 48)
    assert [one.world_size for one in good] == [1, 2, 4, 8, 12]
    good, _ = clusters_to_measure(cluster(8), 128)
    assert [one.world_size for one in good] == [1, 2, 4, 8]


def test_medians_ratios_pair_by_pair_scaling_and_share_of_the_peak() -> None:
    both = measured(
        result(1, [100.0, 110.0, 90.0], [100.0, 100.0, 100.0], peak=1e12),
        result(2, [150.0, 160.0, 170.0], [200.0, 160.0, 100.0], peak=1e12),
    )
    first, second = both.points
    assert (first.flop_per_s, second.ratios) == (2e11, [0.75, 1.0, 1.7])
    assert (first.peak_share, second.peak_share) == (0.2, 0.16)
    lines = [" ".join(line.split()) for line in table(both).splitlines()]
    assert "1 1 1 100.0 90.0 110.0 3 1.00 100.0 1.000 (0.900 – 1.100) 0.200 20.0%" in lines
    assert "1 2 1 160.0 150.0 170.0 3 1.60 160.0 1.000 (0.750 – 1.700) 0.320 16.0%" in lines


def test_the_table_says_what_is_missing() -> None:
    text = table(measured(result(1, [100.0], [100.0]), result(2, [150.0], [100.0])))
    assert "no peak is known for a processor" in text
    assert "left out: 1 host with 3 ranks: too many" in text
    assert "1.500 (1.500 – 1.500)" in text
    known = table(measured(result(1, [100.0], [100.0], peak=1e12)))
    assert "20.0%" in known
    assert "no peak" not in known


def product(host: str, gflop_per_s: float, on: str = "1 × EPYC") -> Speed:
    return Speed(hosts=(host,), quantity="matrix product", setup=on, per_s=gflop_per_s * 1e9)


def pair(one: str, other: str, gb_per_s: float) -> Speed:
    return Speed(hosts=(one, other), quantity="all-reduce", setup="2 ranks, gloo", per_s=gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([product("a", 100), product("b", 81), product("c", 100)], None),
        ([product("a", 100), product("b", 79), product("c", 100)],
         "warning b: matrix product: 79.0 GFLOP/s (1 × EPYC) (wanted: at least 80% of the others' 100.0 GFLOP/s); "
         "doit preflight --deep shows limits, heat and who computes there"),
        ([pair("a", "b", 1.0), pair("a", "c", 0.5), pair("b", "c", 1.0)],
         "warning all-reduce: a – c: 0.500 GB/s (2 ranks, gloo) (wanted: at least 80% of the others' 1.000 GB/s); "
         "doit preflight --deep shows limits, heat and who computes there"),
        ([replace(pair("a", "b", 1.0), wrong_elements=1200), pair("a", "c", 1.0)],
         "failed all-reduce: a – b: 1,200 elements of a sum are wrong (wanted: right sums); "
         "the network or a device is faulty"),
        ([product("a", 100), product("b", 10, on="1 × Xeon"), pair("a", "b", 0.1)], None),  # other hardware
    ],
)  # fmt: skip
def test_a_host_or_pair_a_fifth_slower_than_the_others_or_with_a_wrong_sum_is_named(
    measured: list[Speed], said: str | None
) -> None:
    wrong = [f"{check.state} {lines([check])[0]}" for check in checks(measured) if check.state != State.OK]
    assert wrong == ([] if said is None else [said])


def test_a_host_counts_by_its_slowest_rank() -> None:
    ranks = [
        {"node_rank": node, "device": "cuda:0 H100", "flop_per_s": speed}
        for node, speed in ((0, 5e9), (0, 4e9), (1, 6e9))
    ]
    group = {"nodes": [0, 1], "ranks": 3, "bus_bytes_per_s": 2e9, "wrong_elements": 0}
    assert speeds({"device": "cuda", "backend": "nccl", "ranks": ranks, "groups": [group]}, ["a", "b"]) == [
        Speed(hosts=("a",), quantity="matrix product", setup="2 × H100", per_s=4e9),
        Speed(hosts=("b",), quantity="matrix product", setup="1 × H100", per_s=6e9),
        Speed(hosts=("a", "b"), quantity="all-reduce", setup="3 ranks, nccl", per_s=2e9),
    ]
