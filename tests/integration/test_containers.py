"""Runs in containers of podman: the same bits as on the bare host, and nothing left of them however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipeline.cluster.launchers.local import LocalConfig
from pipeline.core.specs import Cluster, Host
from tests.container_fixture import Image, podman
from tests.contract.conftest import Bench, count_here
from tests.contract.stub import Stub
from tests.integration.commands import ALONE, Project
from tests.waiting import wait_until

LEASE_S = 5.0  # the shortest that there is
LOOKED = """
print('inside', os.path.exists('/etc/in-image'), os.environ['HOME'], os.environ.get('CONDA_PREFIX'), flush=True)
print('up', flush=True)
time.sleep(600)
"""


def bench(image: Image, folder: Path, program_env: dict[str, str] | None = None) -> Bench:
    """Two ranks of this computer in a container."""
    host = Host(name="localhost", nproc_per_node=2, env={"OMP_NUM_THREADS": "1", **(program_env or {})})
    cluster = Cluster(
        launcher="local",
        hosts=(host,),
        device="cpu",
        settings=LocalConfig(lease_s=LEASE_S),
        container=image.name,
        container_mounts=image.mounts,
        asks_environment=True,
    )
    return Bench(cluster=cluster, folder=folder, count=count_here, shares_run_dir=True)


def agent_of(stub: Stub) -> int:
    (path,) = stub.run_dir.glob("attempts/*/agent-*/agent.json")
    return int(json.loads(path.read_text())["pid"])


def engine_of(stub: Stub) -> int:
    """The process of podman that waits for the container."""
    return min(child.pid for child in psutil.Process(agent_of(stub)).children())


def monitor_of(stub: Stub) -> int:
    """The process of podman that is the container's parent."""
    name = json.loads(next(stub.run_dir.glob("attempts/*/agent-*/agent.json")).read_text())["container"]["name"]
    return int(podman("inspect", "--format", "{{.State.ConmonPid}}", name).stdout)


def rank_of(stub: Stub) -> int:
    name = json.loads(next(stub.run_dir.glob("attempts/*/agent-*/agent.json")).read_text())["container"]["name"]
    return int(podman("inspect", "--format", "{{.State.Pid}}", name).stdout)


KILLS: dict[str, Callable[[Stub, subprocess.Popen[str]], None]] = {
    "the command (-9)": lambda _, command: command.kill(),
    "the command (Ctrl-C)": lambda _, command: command.send_signal(signal.SIGINT),
    "the agent (-9)": lambda stub, _: os.kill(agent_of(stub), signal.SIGKILL),
    "podman (-9)": lambda stub, _: os.kill(engine_of(stub), signal.SIGKILL),
    "podman's monitor (-9)": lambda stub, _: os.kill(monitor_of(stub), signal.SIGKILL),
    "torchrun (-9)": lambda stub, _: os.kill(rank_of(stub), signal.SIGKILL),
}
"""What is killed while ranks run in a container."""


def kill_and_wait(bench: Bench, image: Image, stub: Stub, what: str, wait_s: float = 0.0) -> float:
    """Kill it ``wait_s`` after the ranks were up, and wait for the end of all processes and containers; the seconds."""
    with bench.spawn(stub) as command:
        bench.see_both_up(command)
        time.sleep(wait_s)
        KILLS[what](stub, command)
        began = time.monotonic()
        wait_until(lambda: not bench.left(stub) and not image.left(stub.digest[:12]), every_s=0.1)
        return time.monotonic() - began


@pytest.mark.long
@pytest.mark.parametrize("what", KILLS)
def test_no_process_and_no_container_is_left_of_a_run_of_which_something_was_killed(
    what: str, image: Image, tmp_path: Path
) -> None:
    own = bench(image, tmp_path)
    kill_and_wait(own, image, own.stub("print('up', flush=True); time.sleep(600)", stand_in=True), what)


@pytest.mark.ci
@pytest.mark.long
def test_ranks_have_the_images_files_and_podman_is_told_none_of_their_variables(image: Image, tmp_path: Path) -> None:
    own = bench(image, tmp_path, {"HIDDEN": "a secret"})
    stub = own.stub(LOOKED, stand_in=True)
    with own.spawn(stub) as command:
        assert command.stdout is not None
        lines = [command.stdout.readline()]
        while "inside" not in lines[-1]:
            assert lines[-1], "".join(lines)
            lines.append(command.stdout.readline())
        assert lines[-1].endswith("inside True /tmp None\n")
        (name,) = image.left(stub.digest[:12])
        inspected = podman("inspect", name).stdout
        assert "paceline" in inspected
        assert "a secret" not in inspected
        command.send_signal(signal.SIGINT)
        command.wait()
    assert image.left(stub.digest[:12]) == []


@pytest.mark.ci
@pytest.mark.long
def test_a_training_in_a_container_has_the_weights_of_the_bare_host_and_a_key_of_its_own(
    project: Project, image: Image
) -> None:
    words = ("experiment=quickstart", "trainer.epochs=2", *ALONE, "tracking=none")
    for more in ((), image.words):
        done = project.doit("train", *words, *more)
        assert done.returncode == 0, done.stdout
    again = project.doit("train", *words, *image.words)
    assert "is finished" in again.stdout
    bare, inside = sorted((project.folder / "runs").glob("*/key.json"), key=lambda path: path.stat().st_mtime)
    assert (inside.parent / "checkpoints/final.pt").read_bytes() == (bare.parent / "checkpoints/final.pt").read_bytes()
    keys = [json.loads(path.read_text())["environment"] for path in (bare, inside)]
    assert keys[1] == {**keys[0], "container image": image.digest}
    about = json.loads((inside.parent / "provenance.json").read_text())["environments"]["localhost"]["container"]
    assert about["digest"] == image.digest
    assert image.left(inside.parent.name) == []
