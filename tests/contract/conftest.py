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

import pytest

from pipeline.cluster.attempt import run_attempt
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.running import Watchers
from pipeline.core.specs import Cluster, Host, LaunchPlan, LogLine
from tests.contract.stub import Stub, make
from tests.lab_fixture import on

HOSTILE = "a 'b' \"c\" $(touch x) `id`; \\ \n#ü|&"


@dataclass(kw_only=True)
class Bench:
    """One launcher on real hosts: two ranks, one name that is unique to the test in every process."""

    cluster: Cluster
    folder: Path
    count: Callable[[str], int]  # processes on all hosts whose environment holds the text
    shares_run_dir: bool
    shell: Callable[[str, str], object] = lambda _, command: subprocess.run(["sh", "-c", command], check=True)

    def stub(self, program: str, *, record: bool = False, stand_in: bool = False) -> Stub:
        return make(self.folder, program, record=record, stand_in=stand_in)

    def run(self, stub: Stub, lines: list[LogLine] | None = None, **change: object) -> LaunchPlan:
        hosts = Hosts(replace(self.cluster, **change))  # type: ignore[arg-type]
        watchers = Watchers(on_line=(lines if lines is not None else []).append)
        return run_attempt(stub.spec(), closing(hosts), watchers)

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

    def left(self, stub: Stub) -> int:
        """Processes of the run that are alive on any host."""
        return self.count(f"PACELINE_NODE={stub.digest[:12]}")


def count_here(text: str) -> int:
    """Processes of this machine whose environment holds ``text``."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += text.encode() in path.read_bytes()
        except OSError:
            continue
    return found


@pytest.fixture(params=["local", pytest.param("pssh", marks=pytest.mark.lab)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    folder = tmp_path / "it's a $(touch x) folder"
    folder.mkdir()
    env = {"HOSTILE": HOSTILE, "OMP_NUM_THREADS": "1"}
    if request.param == "local":
        hosts: tuple[Host, ...] = (Host(name="localhost", nproc_per_node=2, env=env),)
        return Bench(
            cluster=Cluster(launcher="local", hosts=hosts, device="cpu"),
            folder=folder,
            count=count_here,
            shares_run_dir=True,
        )
    lab = request.getfixturevalue("lab")
    hosts = tuple(Host(name=host.name, env=env) for host in lab.hosts)
    cluster = Cluster(
        launcher="pssh",
        hosts=hosts,
        ssh_config=str(lab.ssh_config),
        connect_timeout_s=30.0,
        workdir="~/it's a $HOME",
        device="cpu",
    )

    # lab hosts have process-id namespaces of their own, which the machine around them sees into
    return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=False, shell=partial(on, lab))
