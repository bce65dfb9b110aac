"""Raising and removing labs: twice, half-way, side by side, and where none can run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import lab as labs
from pipeline.core.errors import HostError, UsageError
from pipeline.lab import Lab, network
from tests.lab_fixture import on, require_lab
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.lab
PROJECT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for a lab of the test's own."""
    require_lab()
    yield tmp_path
    labs.down(tmp_path)


def traces(lab_id: str, root: Path) -> list[str]:
    """Everything in the system that bears the lab's id or path."""
    seen = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    seen += [str(path) for path in (*Path("/run").glob("netns/*"), *Path("/etc").glob("netns/*"))]
    seen += Path("/proc/self/mountinfo").read_text().splitlines()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            seen.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in seen if lab_id in line or f"{root}/.lab" in line]


def test_two_labs_live_side_by_side(lab: Lab, root: Path) -> None:
    other = labs.up(root, 1)
    assert other.subnet != lab.subnet
    assert on(other, "node0", "hostname").stdout == on(lab, "node0", "hostname").stdout == "node0\n"
    labs.down(root)
    assert on(lab, "node0", "hostname").stdout == "node0\n"
    assert on(lab, "node1", "hostname").stdout == "node1\n"


def test_up_twice_finds_the_same_lab_and_another_number_of_hosts_says_what_to_do(root: Path) -> None:
    first = labs.up(root, 1)
    assert labs.up(root, 1) == first == labs.status(root)
    with pytest.raises(
        UsageError,
        match=r"a lab of 1 host runs here already, and not one of 2.*\n.*doit lab --down && doit lab --hosts 2",
    ):
        labs.up(root, 2)


@pytest.mark.parametrize("hosts", [0, 65])
def test_a_number_out_of_range_is_refused(root: Path, hosts: int) -> None:
    with pytest.raises(UsageError, match=rf"hosts={hosts} is out of range; valid: 1 to 64"):
        labs.up(root, hosts)


def test_down_ends_what_runs_on_the_hosts_and_removes_its_own_and_nothing_else(root: Path) -> None:
    lab = labs.up(root, 2)
    notes = root / ".lab/notes.txt"
    notes.touch()
    on(lab, "node0", "setsid sleep 4567 >/dev/null 2>&1 </dev/null &")
    inside = subprocess.Popen(["ip", "netns", "exec", lab.hosts[0].namespace, "sleep", "4567"])
    assert set(labs.down(root)) == {lab.switch, *(host.namespace for host in lab.hosts), network.uplink(lab.id)}
    assert inside.wait(timeout=HANG_S) == -signal.SIGKILL
    assert traces(lab.id, root) == []
    assert list((root / ".lab").iterdir()) == [notes]
    assert (labs.down(root), labs.status(root)) == ((), None)


def test_down_finds_a_lab_whose_folder_was_lost(root: Path) -> None:
    lab = labs.up(root, 1)
    shutil.rmtree(root / ".lab")
    assert lab.hosts[0].namespace in labs.down(root)
    assert traces(lab.id, root) == []


def test_down_copes_with_pieces_that_vanished(root: Path) -> None:
    lab = labs.up(root, 2)
    subprocess.run(["ip", "netns", "delete", lab.switch], check=True)
    subprocess.run(["ip", "netns", "delete", lab.hosts[1].namespace], check=True)
    os.kill(lab.hosts[1].init_pid or 0, signal.SIGKILL)
    labs.down(root)
    assert traces(lab.id, root) == []


def test_a_host_whose_server_died_is_started_again_alone(root: Path) -> None:
    lab = labs.up(root, 2)
    os.kill(lab.hosts[0].sshd_pid or 0, signal.SIGKILL)
    wait_until(lambda: (broken := labs.status(root)) is not None and not broken.running)  # the kernel takes a moment
    again = labs.up(root, 2)
    assert again.running
    assert on(again, "node0", "hostname").stdout == "node0\n"
    assert again.hosts[1] == lab.hosts[1]


def test_a_restart_of_the_machine_is_recovered_from(root: Path) -> None:
    lab = labs.up(root, 1)
    network.disconnect(lab.id)  # what a restart does: the folder stays, the kernel forgets
    (lab.hosts[0].folder / "init").write_text(f"{os.getpid()} 1\n")  # another process has the host's number now
    seen = labs.status(root)
    assert seen is not None
    assert seen.hosts[0].init_pid is None
    assert on(labs.up(root, 1), "node0", "hostname").stdout == "node0\n"


def test_a_copied_checkout_does_not_own_the_lab(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    lab = labs.up(root, 1)
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(root / ".lab", copy / ".lab")
    assert labs.status(copy) is None
    assert labs.down(copy) == ()
    assert not (copy / ".lab").exists()
    assert labs.status(root) == lab


def test_a_moved_checkout_still_removes_its_lab(root: Path) -> None:
    old, new = root / "old", root / "new"
    old.mkdir()
    lab = labs.up(old, 1)
    old.rename(new)
    assert lab.hosts[0].namespace in labs.down(new)
    assert traces(lab.id, new) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.12])
def test_down_cleans_up_after_a_killed_up(root: Path, delay_s: float) -> None:
    script = (
        "import sys; from pathlib import Path; from pipeline import lab;"
        "print('go', flush=True); lab.up(Path(sys.argv[1]), 2)"
    )
    raising = subprocess.Popen(
        [sys.executable, "-c", script, str(root)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert raising.stdout is not None
    assert raising.stdout.readline() == "go\n"
    time.sleep(delay_s)
    raising.kill()
    raising.communicate()
    labs.down(root)
    assert traces(network.lab_id(root), root) == []
    assert list(root.iterdir()) == []


SNAPSHOTS = """
import subprocess, sys
from pathlib import Path
from pipeline import lab

def lines(*argv):
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()

def snapshot():
    seen = lines("ip", "-o", "addr") + lines("ip", "route", "show", "table", "all") + lines("ip", "netns")
    seen += [str(path) for path in (*Path("/run").glob("**/*"), *Path("/etc").glob("*"))]
    return set(seen + Path("/proc/self/mountinfo").read_text().splitlines())

root = Path(sys.argv[1])
subprocess.run(sys.argv[2], shell=True, check=True)
before = snapshot()
for _ in range(2):
    lab.up(root, 2)
    assert snapshot() - before
    lab.down(root)
    assert snapshot() == before, snapshot() ^ before
"""


@pytest.mark.parametrize(
    "already",
    ["true", "ip netns add pl-mine && ip link add plmine type bridge && ip addr add 10.83.0.1/17 dev plmine"],
    ids=["on a bare system", "beside namespaces, bridges and addresses of others"],
)
def test_the_system_is_afterwards_as_it_was_before(root: Path, already: str) -> None:
    # a /run and a network of its own, so that labs of parallel tests don't show
    private = 'umount -lR /run/netns 2>&-; mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'
    argv = ["unshare", "--mount", "--net", "sh", "-c", private, "sh"]
    done = subprocess.run(
        [*argv, sys.executable, "-c", SNAPSHOTS, str(root), already],
        cwd=PROJECT, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- where it can't run


@pytest.mark.parametrize(
    ("target", "name", "value", "said"),
    [
        (os, "geteuid", lambda: 1000, r"needs root .* uid 1000\n  try: sudo .* lab --hosts 2"),
        (
            shutil,
            "which",
            lambda name, path: None if name in ("ip", "sshd") else name,
            r"needs ip, sshd, .*\n  try: sudo apt-get install iproute2 openssh-server",
        ),
        (sys, "platform", "darwin", r"needs Linux .* darwin\n  try: .*cluster\.hostfile="),
    ],
)
def test_where_no_lab_can_run_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: object, name: str, value: object, said: str
) -> None:
    require_lab()
    monkeypatch.setattr(target, name, value)
    with pytest.raises(HostError, match=said):
        labs.up(tmp_path, 2)


def test_a_path_that_ssh_config_cannot_quote_is_refused(tmp_path: Path) -> None:
    require_lab()
    with pytest.raises(HostError, match="ssh_config can't quote"):
        labs.up(tmp_path / 'a"b', 2)


@pytest.mark.long
def test_many_hosts_are_told_their_neighbours_which_a_kernel_learns_1024_of(root: Path) -> None:
    many = labs.up(root, 26)
    argv = ["ip", "-n", many.hosts[3].namespace, "neigh", "show", "dev", "eth0", "nud", "permanent"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == 25
    dial = "import socket; print(socket.create_connection(('node25', 22), timeout=60).recv(4))"
    assert on(many, "node3", f'python3 -c "{dial}"').stdout == "b'SSH-'\n"
