"""system_metrics.jsonl: what the hosts tell of how busy they are, in a run's folder and in MLflow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.runs.metrics_file import EVERY_S, SystemMetrics, mean_metrics, parse
from pipeline.tracking import recorder
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_store import EXPERIMENT
from trainers.contract import run_folder
from trainers.contract.beats import Gpu, NodeBeat, Usage

IDLE = Usage(
    cpu=0.1, memory_bytes=10**9, memory_total_bytes=4 * 10**9, received_per_s=0, sent_per_s=0,
    received_bytes=5 * 10**6, sent_bytes=7 * 10**6, disk_bytes=30 * 10**9, disk_free_bytes=10 * 10**9,
)  # fmt: skip
BUSY = IDLE._replace(
    cpu=0.5, memory_bytes=3 * 10**9, received_bytes=8 * 10**6,
    gpus=(Gpu(busy=0.9, memory_bytes=2 * 10**9, memory_total_bytes=8 * 10**9),),
)  # fmt: skip


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / run_folder.SYSTEM_METRICS).read_text().splitlines()]


def test_they_have_mlflows_names_and_units() -> None:
    assert mean_metrics("node1", IDLE, [IDLE, BUSY]) == {
        "system/node1/cpu_utilization_percentage": 30.0,
        "system/node1/system_memory_usage_megabytes": 2000.0,
        "system/node1/system_memory_usage_percentage": 50.0,
        "system/node1/network_receive_megabytes": 3.0,
        "system/node1/network_transmit_megabytes": 0.0,
        "system/node1/disk_usage_percentage": 75.0,
        "system/node1/disk_usage_megabytes": 30000.0,
        "system/node1/disk_available_megabytes": 10000.0,
    }
    alone = mean_metrics("node1", BUSY, [BUSY])
    assert {name.rpartition("/")[2]: value for name, value in alone.items() if "gpu" in name} == {
        "gpu_0_utilization_percentage": 90.0,
        "gpu_0_memory_usage_megabytes": 2000.0,
        "gpu_0_memory_usage_percentage": 25.0,
    }


def test_a_host_has_a_line_every_ten_seconds_and_a_later_attempt_counts_on(tmp_path: Path) -> None:
    for attempt in range(2):
        samples = SystemMetrics(tmp_path)
        for second in range(11):
            for host in ("node0", "node1"):
                samples.add(NodeBeat(host=host, usage=BUSY if second else None), 1000 * attempt + second)
        with (tmp_path / run_folder.SYSTEM_METRICS).open("a") as file:
            file.write('{"t": 1, "host": "node')  # its writer died
    found = [
        (row["t"], row["host"], row["step"])
        for row in map(json.loads, (tmp_path / run_folder.SYSTEM_METRICS).open().readlines()[:-1])
    ]
    assert found == [(t, host, step) for step, t in enumerate([1, 1001]) for host in ("node0", "node1")]
    assert EVERY_S == 10


def test_a_run_of_a_day_has_fewer_samples(tmp_path: Path) -> None:
    samples = SystemMetrics(tmp_path)
    for second in range(0, 24 * 3600, 2):
        samples.add(NodeBeat(host="node0", usage=BUSY), float(second))
    times = [row["t"] for row in rows(tmp_path)]
    assert times[:3] == [0, 10, 20]
    assert len([at for at in times if float(str(at)) <= 3600]) == 361
    assert 1400 < len(times) < 1510


@pytest.mark.ci
@pytest.mark.long
def test_they_are_recorded_once_also_where_the_recorder_died_before_it_noted_them(
    tmp_path: Path, database: Path
) -> None:
    uri = tracking.absolute_uri(None, Path(shutil.copy(database, tmp_path / "mlflow.db")).parent)
    run = folder.started(tmp_path)
    samples = SystemMetrics(run)
    for host in ("node0", "node1"):
        for at in range(3):
            samples.add(NodeBeat(host=host, usage=IDLE), folder.T0 + 10 * at)
    assert all(parse(line.encode()) is not None for line in (run / run_folder.SYSTEM_METRICS).read_text().splitlines())
    first = recorder.record(run, uri, EXPERIMENT)
    name, number = "system/node1/system_memory_usage_percentage", str(first.run_id)
    expected = [(step, int((folder.T0 + 10 * step) * 1000), 25.0) for step in range(4)]
    assert store.history(uri, number, name) == expected[:3]
    state = json.loads((run / "tracking.json").read_text())
    folder.write(run / "tracking.json", {**state, "system_offset_bytes": 0})
    SystemMetrics(run).add(NodeBeat(host="node1", usage=IDLE), folder.T0 + 30)
    folder.end(run)
    recorder.record(run, uri, EXPERIMENT)
    assert store.history(uri, number, name) == expected
