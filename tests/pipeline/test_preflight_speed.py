"""Hosts that are slower than the others are named; figures of other hardware aren't compared."""

from __future__ import annotations

from dataclasses import replace

from pipeline.cluster.preflight import State
from pipeline.cluster.preflight.judgement import lines
from pipeline.diagnostics import Figure, checks, figures


def product(host: str, gflop_per_s: float, on: str = "1 × EPYC") -> Figure:
    return Figure(hosts=(host,), quantity="matrix product", setup=on, per_s=gflop_per_s * 1e9)


def pair(one: str, other: str, gb_per_s: float) -> Figure:
    return Figure(hosts=(one, other), quantity="all-reduce", setup="2 ranks, gloo", per_s=gb_per_s * 1e9)


def found(measured: list[Figure]) -> list[str]:
    wrong = [check for check in checks(measured) if check.state != State.OK]
    return [f"{check.state} {lines([check])[0]}" for check in wrong]


LOOK = "doit preflight --deep shows limits, heat and who computes there"


def test_a_host_a_fifth_slower_than_the_others_is_named() -> None:
    assert found([product("a", 100), product("b", 81), product("c", 100)]) == []
    assert found([product("a", 100), product("b", 79), product("c", 100)]) == [
        "warning b: matrix product: 79.0 GFLOP/s (1 × EPYC) (wanted: at least 80% of the others' 100.0 GFLOP/s); "
        + LOOK
    ]


def test_a_slow_pair_is_named() -> None:
    measured = [pair("a", "b", 1.0), pair("a", "c", 0.5), pair("b", "c", 1.0)]
    assert found(measured) == [
        "warning all-reduce: a – c: 0.500 GB/s (2 ranks, gloo) (wanted: at least 80% of the others' 1.000 GB/s); "
        + LOOK
    ]


def test_a_wrong_sum_fails() -> None:
    wrong = replace(pair("a", "b", 1.0), wrong_elements=1200)
    assert found([wrong, pair("a", "c", 1.0)]) == [
        "failed all-reduce: a – b: 1,200 elements of a sum are wrong (wanted: right sums); "
        "the network or a device is faulty"
    ]


def test_other_hardware_is_not_compared() -> None:
    assert found([product("a", 100), product("b", 10, on="1 × Xeon"), pair("a", "b", 0.1)]) == []


def test_a_host_counts_by_its_slowest_rank() -> None:
    ranks = [
        {"node_rank": node, "device": "cuda:0 H100", "flop_per_s": speed}
        for node, speed in ((0, 5e9), (0, 4e9), (1, 6e9))
    ]
    group = {"nodes": [0, 1], "ranks": 3, "bus_bytes_per_s": 2e9, "wrong_elements": 0}
    assert figures({"device": "cuda", "backend": "nccl", "ranks": ranks, "groups": [group]}, ["a", "b"]) == [
        Figure(hosts=("a",), quantity="matrix product", setup="2 × H100", per_s=4e9),
        Figure(hosts=("b",), quantity="matrix product", setup="1 × H100", per_s=6e9),
        Figure(hosts=("a", "b"), quantity="all-reduce", setup="3 ranks, nccl", per_s=2e9),
    ]
