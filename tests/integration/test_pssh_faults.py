"""Faults in the middle of a run over real ssh: cut links, dead agents, broken streams, a port that got taken."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import plan as plan_module
from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import TrainingError
from pipeline.core.files import temporary_prefix
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab, cut, restore
from tests.contract.conftest import Bench, count_here
from tests.contract.listening import listener
from tests.contract.stub import RUN_TO_END, SLEEP, Stub
from tests.lab_fixture import answers_lost, on, uplink_cut
from tests.waiting import HANG_S, promised_s

pytestmark = pytest.mark.lab

SAVED = "checkpoints/step-00000001.pt"


@pytest.fixture
def pssh(lab: Lab, tmp_path: Path) -> Bench:
    hosts = tuple(Host(name=host.name, env={"OMP_NUM_THREADS": "1"}) for host in lab.hosts)
    cluster = Cluster(
        launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), settings=PsshConfig(connect_timeout_s=30.0)
    )
    return Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)


class Then(list[LogLine]):
    """Does something once when both ranks are up."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act, self.up = act, 0

    def append(self, line: LogLine) -> None:
        super().append(line)
        self.up += line.text == "up"
        if self.up == 2 and line.text == "up":
            self.act()


def processes(text: str, word: str) -> list[int]:
    """Processes of this machine (and so of the lab) whose command line holds both words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace")
            if text in command and word in command:
                found.append(int(path.parent.name))
    return found


def test_cut_link_ends_the_run_on_both_sides_within_ten_seconds(pssh: Bench, lab: Lab) -> None:
    stub = pssh.stub(SLEEP, stand_in=True)
    times: list[float] = []
    done = threading.Event()

    def watch() -> None:
        time.sleep(2)  # an agent that never reached another one waits for its lease
        cut(lab, "node1")
        began = time.monotonic()
        while pssh.left(stub) and not done.wait(0.1):
            pass
        times.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    try:
        with pytest.raises(TrainingError, match="node1 no longer answers"):
            pssh.run(stub, Then(watcher.start), connect_timeout_s=5.0)
        watcher.join(timeout=HANG_S)
    finally:
        done.set()
        restore(lab, "node1")
    assert pssh.left(stub) == 0
    assert times[0] < promised_s(10)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "silent", "seen"),
    [
        (uplink_cut, ["node0", "node1"], ""),
        (partial(answers_lost, host="node1"), ["node1"], "its ssh server answers node0"),
    ],
    ids=["no way to any host", "no answers of one host"],
)
def test_a_break_between_here_and_hosts_ends_nothing_and_is_said(
    pssh: Bench, lab: Lab, broken: Callable[..., AbstractContextManager[None]], silent: list[str], seen: str
) -> None:
    counting = "print('up', flush=True)\nfor i in range(130): print(i, flush=True); time.sleep(0.1)\n"
    stub, said = pssh.stub(counting + RUN_TO_END, stand_in=True), list[str]()

    def break_it() -> None:
        with broken(lab):
            time.sleep(9)

    breaking = threading.Thread(target=break_it)
    lines = Then(breaking.start)
    hosts = Hosts(pssh.cluster.with_settings(connect_timeout_s=5.0))
    run_attempt(stub.spec(), closing(hosts), listener(lines.append, on_notice=said.append))
    breaking.join()
    for rank in (0, 1):
        assert [line.text for line in lines if line.rank == rank and line.text.isdigit()] == [*map(str, range(130))]
    waits = r"its ranks may train on until \d\d:\d\d:\d\d \(cluster.lease_s=600\), so it is waited for"
    told = [line for line in said if "no longer answers: " in line]
    assert sorted(line.split()[0] for line in told) == silent
    assert all(re.search(waits, line) and seen in line for line in told), told
    assert sorted(line.split()[0] for line in said if " answers again, after " in line) == silent


@pytest.mark.ci
@pytest.mark.long
def test_a_break_after_a_good_end_delays_the_results_and_loses_nothing(pssh: Bench, lab: Lab) -> None:
    stub, said = pssh.stub("print('up', flush=True)\n" + RUN_TO_END, stand_in=True), list[str]()
    with ExitStack() as broken:

        def say(text: str) -> None:
            said.append(text)
            broken.close()

        listening = listener(on_end=lambda _: broken.enter_context(uplink_cut(lab)), on_notice=say)
        run_attempt(stub.spec(), closing(Hosts(pssh.cluster.with_settings(connect_timeout_s=5.0))), listening)
    assert (stub.run_dir / "checkpoints" / "final.pt").exists()
    assert [line.partition(":")[0] for line in said] == ["node0 ended well, but its outputs could not be collected yet"]
    assert said[0].endswith("; it is tried again for 600 s")


@pytest.mark.ci
@pytest.mark.long
def test_killed_agent_is_noticed_and_its_workers_are_swept(pssh: Bench, lab: Lab) -> None:
    stub = pssh.stub(SLEEP, stand_in=True)

    def kill_agent() -> None:
        registered = json.loads((stub.run_dir / "plan.json").read_text())["nodes"][1]["state_dir"]
        on(lab, "node1", f"kill -9 $(grep -o '\"pid\": [0-9]*' '{registered}/agent.json' | tr -dc 0-9)")

    with pytest.raises(
        TrainingError, match="on node1: the run's supervisor on this host was killed; the host itself answers"
    ) as caught:
        pssh.run(stub, Then(kill_agent))
    assert "from here" not in str(caught.value), "the way there is fine"
    assert pssh.left(stub) == 0


@pytest.mark.long  # streams that break: below
def test_stopped_ssh_clients_cost_no_line_also_where_all_share_one(pssh: Bench) -> None:
    counting = "print('up', flush=True)\nfor i in range(80): print(i, flush=True); time.sleep(0.1)\n"
    stub = pssh.stub(counting + RUN_TO_END, stand_in=True)
    stopped: list[int] = []

    def freeze() -> None:
        for pid in processes(f"/tmp/{temporary_prefix('paceline')}", ""):  # streams and shared connections of this test
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    lines = Then(freeze)
    try:
        pssh.run(stub, lines)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert len(stopped) >= 4, "a stream and a shared connection for each host"
    for rank in (0, 1):
        numbers = [line.text for line in lines if line.rank == rank and line.text.isdigit()]
        assert numbers == [str(number) for number in range(80)]
    assert pssh.left(stub) == 0


def test_a_removed_folder_on_the_controller_ends_the_run_on_every_host(pssh: Bench) -> None:
    stub = pssh.stub(SLEEP, stand_in=True)
    removed = re.escape(f"the run's folder {stub.run_dir} was removed, or was taken by another command")
    with pytest.raises(TrainingError, match=removed):
        pssh.run(stub, Then(lambda: shutil.rmtree(stub.run_dir)))
    assert pssh.left(stub) == 0


def go_on_from_what_was_saved(pssh: Bench, stub: Stub) -> None:
    config = json.loads((stub.run_dir / "config.json").read_text())
    config["program"] = f"assert rank or (run / '{SAVED}').exists(), 'lost'\n{RUN_TO_END}"
    (stub.run_dir / "config.json").write_text(json.dumps(config))
    pssh.run(stub)


@pytest.mark.ci
@pytest.mark.long
def test_what_hosts_have_saved_outlives_a_runs_folder_that_is_away_for_a_while(pssh: Bench) -> None:
    stub = pssh.stub(f"{RUN_TO_END}; {SLEEP}", stand_in=True)
    away = stub.run_dir.with_name("not mounted")

    def unmount() -> None:
        stub.run_dir.rename(away)

    with pytest.raises(TrainingError, match="was removed, or was taken by another command"):
        pssh.run(stub, Then(unmount))
    shutil.rmtree(stub.run_dir, ignore_errors=True)
    away.rename(stub.run_dir)
    assert not (stub.run_dir / SAVED).exists()
    go_on_from_what_was_saved(pssh, stub)


@pytest.mark.ci
@pytest.mark.long
def test_what_hosts_have_saved_outlives_a_full_disk_here(pssh: Bench) -> None:
    prints = "while True: print('x' * 20_000, flush=True); time.sleep(0.01)"
    stub = pssh.stub(f"{RUN_TO_END}\n{prints}", stand_in=True)
    log = stub.run_dir / "attempts" / "1" / "node0.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        pssh.run(stub)
    assert pssh.left(stub) == 0
    log.unlink()
    go_on_from_what_was_saved(pssh, stub)


@pytest.mark.long  # an agent that is killed, a folder that is removed here: above
def test_a_removed_workdir_on_a_host_leaves_nothing_alive_though_no_registration_is_left(pssh: Bench, lab: Lab) -> None:
    stub = pssh.stub(SLEEP, stand_in=True)

    def remove() -> None:
        on(lab, "node1", "kill -9 $(grep -o '\"pid\": [0-9]*' ~/.cache/paceline/agents/*.json | tr -dc '0-9 ')")
        on(lab, "node1", "rm -rf ~/.cache/paceline")

    with pytest.raises(
        TrainingError,
        match=r"training failed on node1: the run's (supervisor on this host was killed|folder /\S+ was removed)",
    ):
        pssh.run(stub, Then(remove))
    assert pssh.left(stub) == 0


def test_killed_torchrun_leaves_no_orphans(pssh: Bench) -> None:
    stub = pssh.stub(SLEEP, stand_in=True)  # its ranks too have sessions of their own and outlive it

    def kill_torchrun() -> None:
        for pid in processes("trainers/torchrun.py", f"--rdzv-id={stub.digest[:12]}"):
            if "--node-rank=1" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"torchrun ended with signal 9 \(SIGKILL\)"):
        pssh.run(stub, Then(kill_torchrun))
    assert pssh.left(stub) == 0


def test_broken_stream_is_taken_up_again_without_losing_or_repeating_a_line(pssh: Bench, lab: Lab) -> None:
    counting = "print('up', flush=True)\nfor i in range(40): print(i, flush=True); time.sleep(0.1)\n"
    stub = pssh.stub(counting + RUN_TO_END, stand_in=True)

    def break_streams() -> None:
        for pid in [*processes("[mux]", "/tmp/paceline-"), *processes(str(lab.ssh_config), "ServerAliveInterval")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    lines = Then(break_streams)
    pssh.run(stub, lines)
    for rank in (0, 1):
        numbers = [line.text for line in lines if line.rank == rank and line.text.isdigit()]
        assert numbers == [str(number) for number in range(40)]
    assert len((stub.run_dir / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.ci
@pytest.mark.long  # what torchrun says of such a port: tests/pipeline/test_launch_first_error.py
def test_port_that_was_taken_after_the_probe_is_replaced(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []
    render = plan_module.render

    def render_first_on_taken(*what: Any, master_port: int, **how: Any) -> object:
        ports.append(taken if not ports else master_port)
        return render(*what, master_port=ports[-1], **how)

    monkeypatch.setattr("pipeline.cluster.attempt.run.render", render_first_on_taken)
    host = Host(name="localhost", nproc_per_node=1, env={"OMP_NUM_THREADS": "1"})
    local = Bench(
        cluster=Cluster(launcher="local", hosts=(host,)), folder=tmp_path, count=count_here, shares_run_dir=True
    )
    stub = local.stub(RUN_TO_END)
    ran = local.run(stub)
    assert ports[0] == taken
    assert ran.master_port == ports[1] != taken
