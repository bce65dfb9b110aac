"""Two runs on the same lab hosts, of two controllers: the second is refused, or waits until the first has ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.attempt import run as attempt
from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.contract.conftest import Bench, count_here
from tests.contract.listening import listener
from tests.contract.stub import RUN_TO_END, SLEEP
from tests.lab_fixture import on
from tests.waiting import HANG_S
from trainers.contract import run_folder

pytestmark = pytest.mark.lab


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Bench:
    hosts = tuple(Host(name=host.name, env={"OMP_NUM_THREADS": "1"}) for host in lab.hosts)
    cluster = Cluster(launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), device="cpu", settings=PsshConfig())
    return Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)


def part(bench: Bench, name: str, when_busy: str, *, turned: bool = False) -> Bench:
    """The same hosts in a folder of its own; ``turned``: listed the other way round."""
    folder = bench.folder / name
    folder.mkdir()
    hosts = bench.cluster.hosts[::-1] if turned else bench.cluster.hosts
    return replace(bench, folder=folder, cluster=replace(bench.cluster, hosts=hosts).with_settings(when_busy=when_busy))


@contextlib.contextmanager
def running(bench: Bench) -> Iterator[int]:
    """A run whose ranks are up, in a controller of its own; its process id."""
    stub = bench.stub(SLEEP, stand_in=True)
    with bench.spawn(stub) as attempt:
        try:
            bench.see_both_up(attempt)
            yield attempt.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(attempt.pid, signal.SIGINT)
            attempt.stdout.read()  # type: ignore[union-attr]


def claims(lab: Lab, host: str) -> str:
    """What stands in all claims there."""
    return on(lab, host, "cat /tmp/paceline-claims/* 2>/dev/null").stdout


@pytest.mark.ci
@pytest.mark.long
def test_the_second_run_is_refused_with_who_and_since_when_and_a_restart_waits_and_then_runs(
    bench: Bench, lab: Lab
) -> None:
    refused, waits = part(bench, "refused", "refuse"), part(bench, "waits", "refuse", turned=True)
    said: list[str] = []
    with running(part(bench, "first", "share")) as controller:
        stub = refused.stub(RUN_TO_END, stand_in=True)
        with pytest.raises(HostError) as caught:
            refused.run(stub)
        who = r"root's run [0-9a-f]{12} has its processors since \d\d:\d\d"
        told = rf"2 of 2 hosts are busy:\n  node0 is busy: {who}\n  node1 is busy: {who}"
        assert re.fullmatch(told, caught.value.what)
        assert caught.value.hint is not None
        assert caught.value.hint.startswith("cluster.when_busy=wait waits until it is free")

        def on_job(text: str) -> None:
            said.append(text)
            os.killpg(controller, signal.SIGINT)

        stub = waits.stub(RUN_TO_END, stand_in=True)
        listening = listener(on_notice=on_job)
        run_attempt(replace(stub.spec(), is_restart=True), closing(Hosts(waits.cluster)), listening)
    assert re.fullmatch(rf"waiting for node[01]: {who}", said[0])
    assert (stub.run_dir / "checkpoints" / "final.pt").read_bytes() == b"weights of final"
    for host in lab.hosts:
        assert claims(lab, host.name) == "", "a claim is left"


@pytest.mark.ci
@pytest.mark.long
def test_a_run_that_waits_and_is_forestalled_at_its_start_waits_again_and_then_runs(
    bench: Bench, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the hosts had been free when they were asked."""
    waits, said, looks = part(bench, "waits", "wait"), list[str](), list[int]()
    until_free = attempt.until_free

    def blind_at_first(*args: Any) -> None:
        looks.append(1)
        if len(looks) > 1:
            until_free(*args)

    monkeypatch.setattr(attempt, "until_free", blind_at_first)
    monkeypatch.setattr(attempt, "PROBE_AGAIN_S", 0.1)
    with running(part(bench, "first", "share")) as controller:
        stub = waits.stub(RUN_TO_END, stand_in=True)

        def on_job(text: str) -> None:
            said.append(text)
            os.killpg(controller, signal.SIGINT)

        run_attempt(stub.spec(), closing(Hosts(waits.cluster)), listener(on_notice=on_job))
    assert said[0].startswith("waiting for node0: root's run ")
    assert (stub.run_dir / "checkpoints" / "final.pt").read_bytes() == b"weights of final"


@pytest.mark.long  # a run that waits and then runs: above
@pytest.mark.parametrize("by_doit_stop", [False, True])
def test_a_waiting_run_that_is_stopped_holds_nothing(bench: Bench, lab: Lab, by_doit_stop: bool) -> None:
    waits = part(bench, "waits", "wait")
    with running(part(bench, "first", "share")):
        stub = waits.stub(SLEEP, stand_in=True)
        with waits.spawn(stub) as attempt:
            assert attempt.stdout is not None
            kill = threading.Timer(HANG_S, attempt.kill)
            kill.start()
            line = next(line for line in attempt.stdout if line.startswith("waiting for"))
            assert "has its processors since" in line
            if by_doit_stop:
                (stub.run_dir / run_folder.STOP).touch()
            else:
                os.killpg(attempt.pid, signal.SIGINT)
            ended = "doit stop has ended the wait for the hosts" if by_doit_stop else "KILLED stopped by SIGINT"
            assert ended in attempt.stdout.read()
            kill.cancel()
        assert [claims(lab, host.name).count('"attempts"') for host in lab.hosts] == [1, 1], "of the first run"
