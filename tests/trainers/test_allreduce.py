"""All-reduce bandwidth over two real ranks, and its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.core.errors import TrainerError
from trainers.measuring.bandwidth import Settings, Timing, count_wrong, fill, message_sizes, run
from trainers.measuring.hardware import peak_flop_per_s


def measure_up_to_64k_on_this_rank(folder: Path) -> None:
    next_port()
    run(Settings(max_bytes=1 << 16, iterations=3), folder / "out.json")


def test_two_ranks_say_who_they_are_and_add_up_right(tmp_path: Path) -> None:
    out, _ = call_on_ranks("tests.trainers.test_allreduce:measure_up_to_64k_on_this_rank", tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(card["rank"], card["node_rank"], card["device"][:3]) for card in result["ranks"]] == [
        (0, 0, "cpu"),
        (1, 0, "cpu"),
    ]
    assert [row["size_bytes"] for row in result["rows"]] == [8, 32, 128, 512, 2048, 8192, 32768, 65536]
    assert [row["wrong_elements"] for row in result["rows"]] == [0] * 8
    for row in result["rows"]:
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["n"] == 3
        assert row["bus_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["median_s"])  # 2(n−1)/n is 1 for two
    assert "rank 1  node 0" in out


def measure_on_this_rank(folder: Path) -> None:
    next_port()
    run(Settings(max_bytes=1024, iterations=2), folder / "out.json")


@pytest.mark.ci
@pytest.mark.long
def test_three_nodes_are_also_measured_two_at_a_time(tmp_path: Path) -> None:
    outputs = call_on_ranks("tests.trainers.test_allreduce:measure_on_this_rank", tmp_path, nnodes=3, nproc=1)
    assert "two nodes at a time, 1024 bytes" in outputs[0]
    pairs = json.loads((tmp_path / "out.json").read_text())["pairs"]
    assert [pair["nodes"] for pair in pairs] == [[0, 1], [0, 2], [1, 2]]
    assert [(pair["ranks"], pair["wrong_elements"], pair["n"]) for pair in pairs] == [(2, 0, 2)] * 3


def test_one_rank_alone_is_refused() -> None:
    with pytest.raises(TrainerError, match="an all-reduce needs at least 2 ranks"):
        run(Settings(), None)


def test_bus_bandwidth_of_four_ranks_is_half_as_much_again() -> None:
    timing = Timing(size_bytes=4000, ranks=4, n=1, calls=1, min_s=0.001, median_s=0.002, max_s=0.003, wrong_elements=0)
    assert timing.algorithm_bytes_per_s == 2e6
    assert timing.bus_bytes_per_s == 3e6


def test_a_single_wrong_element_is_counted() -> None:
    buffer = torch.empty(2_000_001)
    fill(buffer, 3)
    assert buffer[:9].tolist() == [3, 6, 9, 12, 15, 18, 21, 3, 6]
    assert count_wrong(buffer, 3) == 0
    buffer[1_900_000] += 1
    assert count_wrong(buffer, 3) == 1


def test_message_sizes_end_with_the_largest() -> None:
    assert message_sizes(Settings(min_bytes=8, max_bytes=100), "gloo") == [8, 32, 100]
    assert message_sizes(Settings(), "gloo")[-1] == 64 << 20
    assert message_sizes(Settings(), "nccl")[-1] == 1 << 30
    with pytest.raises(TrainerError, match=r"min_bytes=64 must lie in 4.+max_bytes=8"):
        message_sizes(Settings(min_bytes=64, max_bytes=8), "gloo")


def test_peaks_are_those_of_the_precision_and_unknown_for_other_devices() -> None:
    assert peak_flop_per_s("NVIDIA H200", "bf16", tf32=True) == 989.4e12
    assert peak_flop_per_s("NVIDIA A100-SXM4-40GB", "fp32", tf32=True) == 156e12
    assert peak_flop_per_s("NVIDIA A100-SXM4-40GB", "fp32", tf32=False) == 19.5e12
    assert peak_flop_per_s("NVIDIA L4", "bf16", tf32=True) == 121e12
    assert peak_flop_per_s("Tesla T4", "bf16", tf32=True) is None
    assert peak_flop_per_s("NVIDIA RTX A4000", "bf16", tf32=True) is None
    assert peak_flop_per_s("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", tf32=True) is None
    assert peak_flop_per_s("Some processor", "fp32", tf32=True) is None
