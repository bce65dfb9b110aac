"""Logins as people have them, on a real ssh server: each takes part, or is told with what mends it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.contract.conftest import Bench, count_here
from tests.contract.stub import RUN_TO_END
from tests.lab_fixture import on

pytestmark = pytest.mark.lab

Bashrc = Callable[[str], None]


@pytest.fixture
def bashrc(lab: Lab) -> Iterator[Bashrc]:
    """Writes ~/.bashrc of node0, which is removed after the test."""
    path = lab.hosts[0].home / ".bashrc"
    yield lambda text: (path.write_text(text), None)[1]
    path.unlink(missing_ok=True)


def check(lab: Lab, ssh_config: str | None = None, **settings: Any) -> None:
    config = ssh_config or str(lab.ssh_config)
    cluster = Cluster(launcher="pssh", hosts=(Host(name="node0"),), ssh_config=config, settings=PsshConfig(**settings))
    preflight.examine(cluster).raise_if_failed()


def error(lab: Lab, **settings: Any) -> str:
    with pytest.raises(HostError) as caught:
        check(lab, **settings)
    return str(caught.value)


TALKS = r"""
echo '@paceline {"evil"'
read -p 'Continue? ' answer; read -p 'Sure? ' answer; read -p 'Really? ' answer
(sleep 0.2; echo '@paceline {"identity": "forged"}'; printf 'still here') &
printf '@paceline {"error": "forged: Permission denied"}\n\033]0;a title\007'
"""


def test_a_login_that_talks_asks_and_forges_takes_part_also_with_a_remote_command_in_the_ssh_config(
    lab: Lab, bashrc: Bashrc, tmp_path: Path
) -> None:
    bashrc(TALKS)
    config = tmp_path / "ssh_config"
    config.write_text(f"RemoteCommand tmux\nRequestTTY force\nLogLevel QUIET\n{lab.ssh_config.read_text()}")
    check(lab, ssh_config=str(config))


@pytest.mark.parametrize(
    ("text", "meaning", "mends"),
    [
        ("echo Welcome; exec sh", "puts another shell in the place of the login shell", "[[ $- == *i* ]] && exec"),
        ("cat >/dev/null", "a start file of its login reads standard input", "[[ $- == *i* ]]"),
        ("echo maintenance: Permission denied; exit 0", "ended with exit code 0 and no answer", "echo ok"),
    ],
)
def test_a_login_that_gets_in_the_way_is_told_with_its_words(
    lab: Lab, bashrc: Bashrc, text: str, meaning: str, mends: str
) -> None:
    bashrc(text)
    told = error(lab)
    assert told.startswith("probe: 1 of 1 hosts can't take part\n  node0: ")
    assert meaning in told
    assert mends in told.rpartition("try: ")[2]
    if "echo" in text:
        assert f"\n      {text.split(';')[0].removeprefix('echo ')}\n" in told


def test_a_login_that_prints_without_end_is_told_before_its_time_is_up(lab: Lab, bashrc: Bashrc) -> None:
    bashrc("yes no end")
    began = time.monotonic()
    told = error(lab, connect_timeout_s=60.0)
    assert "node0: its login prints without end (32 MiB so far); it said:\n      no end\n" in told
    assert time.monotonic() - began < 60.0


def test_a_home_that_cannot_be_written_is_told_before_anything_starts(lab: Lab) -> None:
    on(lab, "node0", "mkdir /tmp/full && mount -t tmpfs -o size=4k tmpfs /tmp/full")
    try:
        told = error(lab, workdir="/tmp/full/paceline")
    finally:
        on(lab, "node0", "umount -l /tmp/full; rmdir /tmp/full")
    assert "node0: has a full disk ([Errno 28] No space left on device: '/tmp/full/paceline/" in told
    assert "cluster.workdir=" in told.rpartition("try: ")[2]
    told = error(lab, workdir="/proc/sys/paceline")
    assert "node0: can't " in told
    assert "cluster.workdir=" in told.rpartition("try: ")[2]


@pytest.mark.ci
@pytest.mark.long
def test_a_login_that_takes_longer_than_its_limit_is_told_with_the_setting(lab: Lab, bashrc: Bashrc) -> None:
    bashrc("echo Loading modules; sleep 60")
    told = error(lab, connect_timeout_s=1.0)
    assert "node0: it hadn't answered after 9 s (cluster.connect_timeout_s=1 and some for the answer)" in told
    assert "\n      Loading modules\n  try: cluster.connect_timeout_s=3 if it is only slow" in told


def slow_login(lab: Lab, tmp_path: Path, stack: ExitStack) -> Path:
    """Logins that take 15 s; the ssh configuration."""
    for host in lab.hosts:
        stack.callback((host.home / ".bashrc").unlink)
        (host.home / ".bashrc").write_text("sleep 15")
    return lab.ssh_config


def slow_way(lab: Lab, tmp_path: Path, stack: ExitStack) -> Path:
    """A jump that takes 7 s to let anybody through."""
    proxy = tmp_path / "jump"
    proxy.write_text(f"#!/bin/sh\nsleep 7\nexec {sys.executable} {tmp_path}/pipe.py $1 $2\n")
    proxy.chmod(0o755)
    (tmp_path / "pipe.py").write_text(PIPE)
    config = tmp_path / "ssh_config"
    config.write_text(f"ProxyCommand {proxy} %h %p\n{lab.ssh_config.read_text()}")
    return config


PIPE = """
import os, socket, sys, threading
there = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while block := os.read(0, 65536):
        there.sendall(block)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while block := there.recv(65536):
    os.write(1, block)
"""


@pytest.mark.long
@pytest.mark.parametrize("slow", [slow_login, slow_way])
def test_hosts_that_are_slow_to_reach_pass_preflight_and_train_with_the_usual_limits(
    lab: Lab, tmp_path: Path, slow: Callable[[Lab, Path, ExitStack], Path]
) -> None:
    """Longer than a stream may be silent: what the probe took lengthens the limits of connections."""
    with ExitStack() as stack:
        config = slow(lab, tmp_path, stack)
        hosts = (Host(name="node0"), Host(name="node1"))
        cluster = Cluster(launcher="pssh", hosts=hosts, ssh_config=str(config), settings=PsshConfig())
        preflight.examine(cluster, deep=True).raise_if_failed()
        pssh = Bench(cluster=cluster, folder=tmp_path, count=count_here, shares_run_dir=False)
        stub = pssh.stub(RUN_TO_END)
        pssh.run(stub)
    assert (stub.run_dir / "summary.json").exists()
    assert pssh.left(stub) == 0
