"""How busy a host is, as its agent tells."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.cluster.agent.host import usage
from trainers.contract.beats import Gpu, NodeBeat
from trainers.contract.records import as_json, from_json


def test_processor_time_leaves_idle_and_waiting_out() -> None:
    assert usage.processor_time("cpu  100 5 20 800 50 3 2 10 7 0") == (140, 990)


def test_traffic_is_that_of_all_interfaces_but_the_loopback() -> None:
    text = "head\nhead\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0:1000 1 0 0 0 0 0 0 50 1\n  ib0: 1 0 0 0 0 0 0 0 2 0\n"
    assert usage.traffic(text) == (1001, 52)


def test_what_lies_between_two_looks() -> None:
    found = usage.between((100, 1000, 0, 500), (250, 1200, 4000, 300), 2.0)
    assert found == (0.75, 2000, 0)  # a counter that began anew is no speed


def test_a_gpu_that_says_nothing_is_left_out() -> None:
    assert usage.gpus("97, 1024, 81920\n[N/A], [N/A], 1\n\n") == (
        Gpu(busy=0.97, memory_bytes=2**30, memory_total_bytes=80 * 2**30),
    )


def test_it_is_sampled_at_most_every_two_seconds_and_travels_in_the_beat(tmp_path: Path) -> None:
    looks = usage.UsageSampler(str(tmp_path))
    assert looks.look() is None
    looks._at = time.monotonic() - 3.0
    told = looks.look()
    assert told is not None
    assert looks.look() is told
    beat = from_json(NodeBeat, as_json(NodeBeat("node0", usage=told))).usage
    assert beat is not None
    assert 0 <= beat.cpu <= 1
    assert 0 < beat.memory_bytes < beat.memory_total_bytes
    assert beat.disk_bytes > 0
    assert beat.disk_free_bytes > 0
