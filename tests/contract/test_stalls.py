"""A rank that stands still is named, with its host, before the run is ended for it: on every launcher."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from pipeline.cluster.events import LogLine
from pipeline.core.errors import TrainingError
from tests.contract.conftest import Bench, over_ssh_first
from trainers.distributed import heartbeat

STOPS = """
from trainers.distributed.heartbeat import HEARTBEAT
HEARTBEAT.publish(pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent)
HEARTBEAT.begin_step(3)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
HEARTBEAT.wait()
time.sleep(600)
"""


@over_ssh_first
def test_a_stopped_rank_is_named_with_its_host_and_nothing_is_left(bench: Bench) -> None:
    stub = bench.stub(STOPS, stand_in=True)
    shutil.copytree(Path(heartbeat.__file__).parent, stub.run_dir / "code" / "trainers" / "distributed")
    lines: list[LogLine] = []
    with pytest.raises(TrainingError) as caught:
        bench.run(stub, lines, stall_s=5.0)
    host = bench.hosts[-1]
    said = re.search(
        rf"training failed on {host}: no rank has moved for (\d+) s: "
        rf"rank 1 on {host} hangs in step 3 \(loading data\): "
        r"process \d+ is stopped .*; rank 0 on \S+ waits for it",
        caught.value.what,
    )
    assert said is not None, caught.value.what
    assert 5 <= int(said[1]) <= 10, "within stall_s + 5 s"
    assert caught.value.cause == "host"
    assert [line.text in caught.value.what for line in lines if line.text.startswith("no rank")] == [True]
    told = json.loads((stub.run_dir / "attempts" / "1" / "ranks.json").read_text())
    assert [(row["rank"], row["host"], row["step"]) for row in told["ranks"]] == [(0, bench.hosts[0], 3), (1, host, 3)]
    assert bench.left(stub) == 0
