"""Hosts that are slower than they were, or than the others, are named; figures of other hardware aren't compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cluster.preflight import State
from pipeline.cluster.preflight.judgement import lines
from pipeline.core.errors import PacelineError
from pipeline.diagnostics import host_speed
from pipeline.diagnostics.host_speed import Figure, checks, figures


def product(host: str, gflop_per_s: float, on: str = "1 × EPYC") -> Figure:
    return Figure(hosts=(host,), what="matrix product", on=on, per_s=gflop_per_s * 1e9)


def pair(one: str, other: str, gb_per_s: float) -> Figure:
    return Figure(hosts=(one, other), what="all-reduce", on="2 ranks, gloo", per_s=gb_per_s * 1e9)


def found(measured: list[Figure], baseline: dict[str, float] | None = None) -> list[str]:
    wrong = [check for check in checks(measured, baseline or {}) if check.state != State.OK]
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


def test_other_hardware_is_not_compared() -> None:
    assert found([product("a", 100), product("b", 10, on="1 × Xeon"), pair("a", "b", 0.1)]) == []


def test_a_host_that_is_slower_than_itself_fails_though_all_are() -> None:
    before = {figure.key: figure.per_s for figure in (product("a", 100), product("b", 100), pair("a", "b", 1.0))}
    assert found([product("a", 81), product("b", 81), pair("a", "b", 0.81)], before) == []
    assert found([product("a", 100), product("b", 79), pair("a", "b", 0.79)], before) == [
        "failed b: matrix product: 79.0 GFLOP/s (1 × EPYC) (wanted: at least 80% of its baseline, 100.0 GFLOP/s); "
        + LOOK,
        "failed all-reduce: a – b: 0.790 GB/s (2 ranks, gloo) (wanted: at least 80% of its baseline, 1.000 GB/s); "
        + LOOK,
    ]
    assert found([product("b", 10, on="2 × EPYC")], before) == []  # more ranks: nothing to compare with


def test_a_host_counts_by_its_slowest_rank() -> None:
    ranks = [
        {"node_rank": node, "device": "cuda:0 H100", "flop_per_s": speed}
        for node, speed in ((0, 5e9), (0, 4e9), (1, 6e9))
    ]
    group = {"nodes": [0, 1], "ranks": 3, "bus_bytes_per_s": 2e9}
    assert figures({"device": "cuda", "backend": "nccl", "ranks": ranks, "groups": [group]}, ["a", "b"]) == [
        Figure(hosts=("a",), what="matrix product", on="2 × H100", per_s=4e9),
        Figure(hosts=("b",), what="matrix product", on="1 × H100", per_s=6e9),
        Figure(hosts=("a", "b"), what="all-reduce", on="3 ranks, nccl", per_s=2e9),
    ]


def test_a_baseline_is_kept_beside_that_of_other_hosts_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert host_speed.baseline(tmp_path) == {}
    host_speed.save_baseline(tmp_path, [product("a", 100), product("b", 100)])
    path = host_speed.save_baseline(tmp_path, [product("b", 50)])
    assert host_speed.baseline(tmp_path) == {product("a", 1).key: 100e9, product("b", 1).key: 50e9}
    path.write_text("{")
    with pytest.raises(PacelineError, match=r"baseline\.json can't be read: .*\n  try: doit preflight baseline=save"):
        host_speed.baseline(tmp_path)


@pytest.mark.parametrize("text", ["null", "[]", '{"version": 99}', '{"hosts": 5}', '{"a | matrix product | 1": true}'])
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    path = host_speed.save_baseline(tmp_path, [product("a", 100)])
    path.write_text(text)
    with pytest.raises(PacelineError, match=r"baseline\.json is no baseline: .*\n  try: doit preflight baseline=save"):
        host_speed.baseline(tmp_path)
