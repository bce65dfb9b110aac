"""All-reduces of two real ranks add up right; bandwidths, wrong sums, and the peaks of GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.trainers.ranks import call_on_ranks, next_port
from trainers.measuring import speeds
from trainers.measuring.speeds import Timing, count_wrong, fill
from trainers.measuring.throughput import peak_flop_per_s


def measure_on_this_rank(folder: Path) -> None:
    next_port()
    speeds.run("gloo", folder / "out.json", side=64, size_bytes=1 << 16)


def test_two_ranks_say_who_they_are_and_add_up_right(tmp_path: Path) -> None:
    call_on_ranks("tests.trainers.test_allreduce:measure_on_this_rank", tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(info["rank"], info["node_rank"], info["device"][:3]) for info in result["ranks"]] == [
        (0, 0, "cpu"),
        (1, 0, "cpu"),
    ]
    (group,) = result["groups"]
    assert (group["size_bytes"], group["ranks"], group["wrong_elements"]) == (1 << 16, 2, 0)
    assert 0 < group["min_s"] <= group["median_s"] <= group["max_s"]


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


def test_peaks_are_those_of_the_precision_and_unknown_for_other_devices() -> None:
    assert peak_flop_per_s("NVIDIA H200", "bf16", tf32=True) == 989.4e12
    assert peak_flop_per_s("NVIDIA A100-SXM4-40GB", "fp32", tf32=True) == 156e12
    assert peak_flop_per_s("NVIDIA A100-SXM4-40GB", "fp32", tf32=False) == 19.5e12
    assert peak_flop_per_s("NVIDIA L4", "bf16", tf32=True) == 121e12
    assert peak_flop_per_s("Tesla T4", "bf16", tf32=True) is None
    assert peak_flop_per_s("NVIDIA RTX A4000", "bf16", tf32=True) is None
    assert peak_flop_per_s("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", tf32=True) is None
    assert peak_flop_per_s("Some processor", "fp32", tf32=True) is None
