"""A real mpirun over two lab hosts: a run to its end, and hosts that it can't reach."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.contract.conftest import Bench, count_here
from tests.contract.stub import RUN_TO_END
from tests.lab_fixture import require_mpirun

pytestmark = pytest.mark.lab

TELL = "print('MPI', sorted(name for name in os.environ if name.startswith(('OMPI_', 'PMIX_', 'PMI_'))), flush=True)\n"


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Bench:
    require_mpirun()
    cluster = Cluster(
        launcher="mpi",
        hosts=tuple(Host(name=host.name, env={"OMP_NUM_THREADS": "1"}) for host in lab.hosts),
        ssh_config=str(lab.ssh_config),
        device="cpu",
        settings=LAUNCHERS.settings("mpi")(btl_tcp_if_include=lab.subnet),
    )
    return Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)


def test_a_run_ends_well_and_its_ranks_see_nothing_of_the_agents_mpirun(bench: Bench) -> None:
    stub, lines = bench.stub(TELL + RUN_TO_END, stand_in=True), list[LogLine]()
    plan = bench.run(stub, lines)
    assert {(line.host, line.rank, line.text) for line in lines if line.text.startswith("MPI")} == {
        ("node0", 0, "MPI []"),
        ("node1", 1, "MPI []"),
    }
    assert plan.submission.startswith("mpirun --host node0 -n 1 ")
    assert (stub.run_dir / "checkpoints" / "final.pt").read_bytes() == b"weights of final"
    assert bench.left(stub) == 0


def test_hosts_that_mpirun_cannot_reach_are_named_with_its_words_and_what_mends_them(bench: Bench, lab: Lab) -> None:
    hosts = (bench.cluster.hosts[0], Host(name="nowhere"), Host(name="node1", python="/no/such/python"))
    with closing(Hosts(replace(bench.cluster, hosts=hosts))) as cluster, pytest.raises(HostError) as caught:
        cluster.facts(None)
    what = caught.value.what
    assert what.startswith("probe: 2 of 3 hosts can't take part\n  nowhere: unreachable: Could not resolve hostname")
    assert "\n  node1: no such interpreter there: cluster.python='/no/such/python'" in what
    absent = replace(bench.cluster, hosts=hosts[:1]).with_settings(mpirun=["--mca", "orte_launch_agent", "/no/orted"])
    with closing(Hosts(absent)) as cluster, pytest.raises(HostError) as caught:
        cluster.facts(None)
    assert "node0: Open MPI isn't there, or not on the PATH of its login: " in caught.value.what
    assert "/no/orted: No such file or directory" in caught.value.what
