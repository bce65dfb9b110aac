"""What the launcher contract runs on: each launcher with a way to look for processes on its hosts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.core.specs import Cluster, Host, LaunchPlan
from tests.contract.listening import listener
from tests.contract.stub import Stub, make
from tests.kubernetes_cluster import FakeCluster
from tests.lab_fixture import on, require_mpirun
from tests.slurm_fixture import Slurm

HOSTILE = "a 'b' \"c\" $(touch x) `id`; \\ \n#ü|&"


@dataclass(kw_only=True)
class Bench:
    """One launcher on real hosts: two ranks, one name that is unique to the test in every process."""

    cluster: Cluster
    folder: Path
    count: Callable[[str], int]  # processes on all hosts whose environment holds the text
    shares_run_dir: bool
    labels: tuple[str, ...] = ()  # of the hosts, where they have their names only once they are granted
    shell: Callable[[str, str], object] = lambda _, command: subprocess.run(["sh", "-c", command], check=True)

    @property
    def hosts(self) -> tuple[str, ...]:
        """How events and files name the hosts, in the order of their ranks."""
        return self.labels or tuple(host.label for host in self.cluster.hosts)

    def stub(self, program: str, *, record: bool = False, stand_in: bool = False) -> Stub:
        return make(self.folder, program, record=record, stand_in=stand_in)

    def run(self, stub: Stub, lines: list[LogLine] | None = None, **settings: object) -> LaunchPlan:
        hosts = Hosts(self.cluster.with_settings(**settings))
        listening = listener((lines if lines is not None else []).append)
        return run_attempt(stub.spec(), closing(hosts), listening)

    def spawn(self, stub: Stub) -> subprocess.Popen[str]:
        """The same in a process of its own, whose lines come on its stdout."""
        spec = {
            "cluster": dataclasses.asdict(self.cluster),
            "stub": {"run_dir": str(stub.run_dir), "pack_dir": str(stub.pack_dir), "digest": stub.digest},
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec))
        argv = [sys.executable, "-m", "tests.contract.attempt_process", str(path)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)

    @staticmethod
    def see_both_up(attempt: subprocess.Popen[str]) -> IO[str]:
        """Read the lines of a spawned attempt until both ranks have said ``up``; where the rest of them comes."""
        assert attempt.stdout is not None
        ups = 0
        while ups < 2:
            line = attempt.stdout.readline()
            assert line, "it ended before both ranks were up"
            ups += line.endswith("| up\n")
        return attempt.stdout

    def left(self, stub: Stub) -> int:
        """Processes of the run that are alive on any host."""
        return self.count(f"PACELINE_NODE={stub.digest[:12]}")


def slurm_bench(slurm: Slurm, folder: Path, env: dict[str, str]) -> Bench:
    """Two nodes that Slurm grants. They see this machine's files and processes."""
    hosts = tuple(Host(name=f"granted{number}", env=env) for number in range(2))
    settings = LAUNCHERS.settings("slurm")(nnodes=2)
    cluster = Cluster(launcher="slurm", hosts=hosts, device="cpu", settings=settings)
    return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=True, labels=slurm.nodes)


def kubernetes_bench(kubernetes: FakeCluster, folder: Path, env: dict[str, str], **change: object) -> Bench:
    """Two pods of the test's cluster. They see this machine's files and processes."""
    hosts = tuple(Host(name=f"granted{number}", python=sys.executable, env=env) for number in range(2))
    given = {"nnodes": 2, "image": "image", "pvc": "claim", "mount_path": str(folder), "run_as_user": 0}
    settings = LAUNCHERS.settings("kubernetes")(**{**given, **change})
    cluster = Cluster(launcher="kubernetes", hosts=hosts, device="cpu", settings=settings)
    return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=True, labels=("pod0", "pod1"))


def count_here(text: str) -> int:
    """Processes of this machine whose environment holds ``text``."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += text.encode() in path.read_bytes()
        except OSError:
            continue
    return found


PARAMS = [
    "local",
    pytest.param("pssh", marks=pytest.mark.lab),
    pytest.param("mpi", marks=[pytest.mark.lab, pytest.mark.long]),
    pytest.param("slurm", marks=[pytest.mark.lab, pytest.mark.long]),
    pytest.param("kubernetes", marks=[pytest.mark.lab, pytest.mark.long]),
    pytest.param("container", marks=pytest.mark.long),
]


over_ssh_first = pytest.mark.parametrize(
    "bench", [pytest.param("local", marks=pytest.mark.long), *PARAMS[1:]], indirect=True
)
"""For what is harder on other hosts: make test leaves this computer out."""


@pytest.fixture(params=PARAMS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    folder = tmp_path / "it's a $(touch x) folder"
    folder.mkdir()
    env = {"HOSTILE": HOSTILE, "OMP_NUM_THREADS": "1"}
    if request.param in ("local", "container"):
        hosts: tuple[Host, ...] = (Host(name="localhost", nproc_per_node=2, env=env),)
        cluster = Cluster(launcher="local", hosts=hosts, device="cpu")
        if request.param == "container":
            image = request.getfixturevalue("image")
            cluster = replace(cluster, container=image.name, container_mounts=image.mounts, asks_environment=True)
        return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=True)
    if request.param == "slurm":
        return slurm_bench(request.getfixturevalue("slurm"), folder, env)
    if request.param == "kubernetes":
        return kubernetes_bench(request.getfixturevalue("kubernetes"), folder, env)
    lab = request.getfixturevalue("lab")
    hosts = tuple(Host(name=host.name, env=env) for host in lab.hosts)
    if request.param == "mpi":
        require_mpirun()
    cluster = Cluster(
        launcher=request.param,
        hosts=hosts,
        ssh_config=str(lab.ssh_config),
        device="cpu",
        settings=LAUNCHERS.settings(request.param)(connect_timeout_s=30.0, workdir="~/it's a $HOME"),
    )

    # lab hosts have process-id namespaces of their own, which the machine around them sees into
    return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=False, shell=partial(on, lab))
