"""From the start of the controller to "all hosts run", with a stub in place of torchrun, beside a bare parallel-ssh.

    python benchmarks/start.py [pairs] [--hosts 2 8 16]                  (Linux, root; raises its own lab hosts)
    python benchmarks/start.py [pairs] --simulate 32 300 1000            (Linux, a C compiler)

Lab hosts are real ones that share this computer's cores, and its table of neighbours: 32 of them that connect to each
other overflow the 1,024 entries that it usually has. Their files are in memory where the system has /dev/shm: on one
ext4 for all of them, a new file's inode is searched for among those that the pair before has deleted, 8 ms a host.
The other way around is simulated: the controller, pssh and
all its children are the real ones, but ``ssh`` is a program that passes everything on to one process, in which each
host's agent is a coroutine that answers after LOGIN_S. So it tells what the controller takes for many hosts, and
nothing of ssh's own cost (about 10 MB and 20 ms of a core a connection) or the hosts'. The bare command then is
parallel-ssh of ``true`` over the same program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from measure import ROOT, checked, interleaved, spread, surroundings

from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.specs import Cluster, Host
from pipeline.lab import down, up
from tests.contract.stub import SLEEP, make

FACTOR, PLUS_S = 1.5, 1.0  # the target: of the bare command, and on top of it
CONTROLLER_MB, HOST_MB = 300, 10
LIMIT_S = 300.0
TORCHRUN = "import signal\nsignal.pause()\n"  # what stands for it: ranks, which it would start, are not measured


@dataclasses.dataclass
class Cost:
    """What the controller and all its children took at the most, in MB, and how many children those were."""

    own_mb: float = 0.0
    children_mb: float = 0.0
    children: int = 0

    def look(self, pid: int) -> None:
        process = psutil.Process(pid)
        below = [child for child in process.children(recursive=True) if child.is_running()]
        self.own_mb = max(self.own_mb, process.memory_info().rss / 1e6)
        self.children_mb = max(self.children_mb, sum(_private_mb(child) for child in below))
        self.children = max(self.children, len(below))


def _private_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().uss) / 1e6
    except psutil.Error:  # it has just ended
        return 0.0


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its hosts are taken down
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="?", type=int, default=5)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 8, 16])
    parser.add_argument("--simulate", nargs="+", type=int)
    given = parser.parse_args()
    print(surroundings())
    missed = 0
    for count in given.simulate or given.hosts:
        with simulated(count) if given.simulate else lab_hosts(count) as (hosts, ssh_config, env):
            missed += measure(hosts, ssh_config, env, given.pairs)
    return int(missed > 0)


@contextmanager
def lab_hosts(count: int) -> Iterator[tuple[list[str], str | None, dict[str, str]]]:
    """Real hosts that have this computer's cores; their names, the ssh configuration and the environment."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="paceline-start-", dir=memory if memory.is_dir() else None))
    try:
        lab = up(root, count)
        yield [host.name for host in lab.hosts], str(lab.ssh_config), {}
    finally:
        down(root)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def simulated(count: int) -> Iterator[tuple[list[str], str | None, dict[str, str]]]:
    """Hosts that one process plays; ``ssh`` in PATH leads there."""
    root = Path(tempfile.mkdtemp(prefix="paceline-start-"))
    here = Path(__file__).parent
    checked(["cc", "-O2", "-o", str(root / "ssh"), str(here / "simulated_ssh.c")], cwd=ROOT)
    env = {"PATH": f"{root}:{os.environ['PATH']}", "SIMULATED_HOSTS": str(root / "socket")}
    played = subprocess.Popen([sys.executable, str(here / "simulated_hosts.py"), env["SIMULATED_HOSTS"]], cwd=ROOT)
    try:
        while not (root / "socket").exists():
            time.sleep(0.05)
        yield [f"host{number}" for number in range(count)], None, env
    finally:
        played.terminate()
        played.wait()
        shutil.rmtree(root)


def measure(hosts: list[str], ssh_config: str | None, env: dict[str, str], pairs: int) -> bool:
    """Print what these hosts took. True: a target was missed."""
    cost = Cost()

    def paceline(_: int) -> float:
        with tempfile.TemporaryDirectory(prefix="paceline-start-") as folder:
            return started_s(Path(folder), hosts, ssh_config, env, cost)

    def bare(_: int) -> float:
        return bare_s(hosts, ssh_config, env)

    bare(0)
    a, b = interleaved(paceline, bare, pairs)
    within = [seconds - (FACTOR * other + PLUS_S) for seconds, other in zip(a, b, strict=True)]
    allowed_mb = CONTROLLER_MB + HOST_MB * len(hosts)
    print(f"{len(hosts)} hosts: all run after {spread(a, 's')}; parallel-ssh of true {spread(b, 's')}")
    print(f"  beyond {FACTOR} × bare + {PLUS_S:g} s: {spread(within, 's')} (at most 0 keeps the target)")
    print(
        f"  controller {cost.own_mb:.0f} MB, {cost.children} children {cost.children_mb:.0f} MB; target {allowed_mb} MB"
    )
    return statistics.median(within) > 0 or cost.own_mb + cost.children_mb > allowed_mb


def bare_s(hosts: list[str], ssh_config: str | None, env: dict[str, str]) -> float:
    """parallel-ssh of ``true``."""
    program = shutil.which("parallel-ssh") or shutil.which("pssh") or sys.exit("pssh is not there")
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("".join(f"{host}\n" for host in hosts))
        names.flush()
        argv = [str(program), "-h", names.name, "-p", str(len(hosts)), "-t", "60"]
        argv += ["-x", f"-F {ssh_config}"] if ssh_config else []
        began = time.perf_counter()
        checked([*argv, "true"], cwd=ROOT, env=env)
        return time.perf_counter() - began


def started_s(folder: Path, hosts: list[str], ssh_config: str | None, env: dict[str, str], cost: Cost) -> float:
    """One run, ended as soon as all of it runs."""
    stub = make(folder, SLEEP, stand_in=True)
    cluster = Cluster(
        launcher="pssh",
        hosts=tuple(Host(name=name) for name in hosts),
        ssh_config=ssh_config,
        device="cpu",
        settings=PsshConfig(connect_timeout_s=60.0),
    )
    (stub.run_dir / "code" / "torch" / "distributed" / "run.py").write_text(TORCHRUN)
    (stub.run_dir / "config.json").write_text(
        (stub.run_dir / "config.json")
        .read_text()
        .replace('"global_batch_size": 8', f'"global_batch_size": {len(hosts)}')
    )
    told = {"run_dir": str(stub.run_dir), "pack_dir": str(stub.pack_dir), "digest": stub.digest}
    (folder / "spec.json").write_text(json.dumps({"cluster": dataclasses.asdict(cluster), "stub": told}))
    argv = [sys.executable, "-m", "tests.contract.attempt_process", str(folder / "spec.json")]
    began = time.perf_counter()
    child = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    lines = []
    try:
        for line in child.stdout:
            lines.append(line)
            if line == "started\n":
                seconds = time.perf_counter() - began
                time.sleep(2.0)  # until the live streams are all there
                cost.look(child.pid)
                return seconds
        sys.exit(f"it ended before all hosts ran:\n{''.join(lines)[:2000]}")
    finally:
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
