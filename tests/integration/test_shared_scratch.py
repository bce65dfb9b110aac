"""Hosts whose scratch folder (``cluster.workdir``) is one and the same, as with homes on NFS."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.contract.conftest import Bench, count_here
from tests.contract.stub import SLEEP, Stub

pytestmark = [pytest.mark.lab, pytest.mark.long]


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="paceline-test-", dir="/srv") as folder:  # both hosts have this root
        hosts = tuple(Host(name=host.name) for host in lab.hosts)
        cluster = Cluster(
            launcher="pssh",
            hosts=hosts,
            ssh_config=str(lab.ssh_config),
            settings=PsshConfig(workdir=f"{folder}/it's one"),
        )
        yield Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)


def there(bench: Bench, stub: Stub) -> dict[str, list[str]]:
    """What lies in the hosts' folder: its parts → their entries."""
    root = Path(str(bench.cluster.settings.workdir))
    assert (root / "data" / stub.digest / "labels.bin").stat().st_size == 32
    return {part.name: sorted(entry.name for entry in part.iterdir()) for part in root.iterdir()}


def test_each_node_has_its_own_part_the_pack_lies_there_once_and_nothing_else_stays(bench: Bench) -> None:
    program = "(run / f'part-{rank}').touch(); assert len([*run.glob('part-*')]) == 1; finish(rank, run)"
    stub = bench.stub(program, stand_in=True)
    for _ in range(2):  # the second start finds the pack
        bench.run(stub)
        assert there(bench, stub) == {"agents": [], "data": [stub.digest], "runs": []}
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert bench.left(stub) == 0


def test_a_signal_ends_the_agents_of_all_hosts_that_register_in_one_folder(bench: Bench) -> None:
    stub = bench.stub(SLEEP, stand_in=True)
    with bench.spawn(stub) as attempt:
        lines = bench.see_both_up(attempt)
        registered = there(bench, stub)["agents"]
        os.kill(attempt.pid, signal.SIGTERM)
        rest = lines.read()
    assert len(registered) == 2, registered
    assert "KILLED stopped by SIGTERM" in rest
    assert bench.left(stub) == 0
    assert there(bench, stub)["agents"] == []
