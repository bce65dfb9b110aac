"""The fixture ``lab``: two real hosts, raised once per test process (xdist worker) and removed at its end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.lab import Lab, down, missing, up
from tests.waiting import HANG_S


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running lab of two hosts in a folder of its own (its path has a space). Leave it as it was."""
    require_lab()
    root = tmp_path_factory.mktemp("two hosts")
    try:
        yield up(root, 2)
    finally:
        down(root)


def require_lab() -> None:
    """Skip the test, with the reason, where no lab can run."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason.what)


def require_mpirun() -> None:
    """Skip the test where there is no Open MPI."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")


@contextmanager
def firewall(lab: Lab, host: str, verdict: str) -> Iterator[None]:
    """The host lets new TCP connections to its ssh server through; others that come over eth0 meet ``verdict``
    (``drop``, ``reject with tcp reset``)."""
    with _filtered(lab, host, f"ct state established,related accept; tcp dport 22 accept; {_OVER_ETH0} {verdict}"):
        yield


@contextmanager
def uplink_cut(lab: Lab) -> Iterator[None]:
    """No host and this computer reach each other; the hosts reach each other as before."""
    argv = ["ip", "-n", lab.switch, "link", "set", "uplink"]
    subprocess.run([*argv, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*argv, "up"], check=True)


@contextmanager
def answers_lost(lab: Lab, host: str) -> Iterator[None]:
    """What the host sends to this computer is lost on the way; all else comes through."""
    here = lab.subnet.rpartition(".")[0] + ".1"
    with _filtered(lab, host, f"ip daddr {here} drop", hook="output"):
        yield


@contextmanager
def large_packets_lost(lab: Lab, host: str) -> Iterator[None]:
    """A router before the host drops what is larger than 600 bytes, but for ssh's, and nobody is told."""
    with _filtered(lab, host, f"tcp dport 22 accept; tcp sport 22 accept; {_OVER_ETH0} meta length > 600 drop"):
        yield


_OVER_ETH0 = 'iifname "eth0" meta l4proto tcp'


@contextmanager
def _filtered(lab: Lab, host: str, rules: str, hook: str = "input") -> Iterator[None]:
    """The host's incoming packets (``hook``: others) meet ``rules``. Skips the test where there is no nftables."""
    program = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin")
    if program is None:
        pytest.skip("needs nft: apt-get install nftables")
    nft = ["ip", "netns", "exec", lab.host(host).namespace, program]
    table = f"table inet paceline_test {{ chain met {{ type filter hook {hook} priority 0; {rules}; }}; }}"
    subprocess.run([*nft, "-f", "-"], input=table, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "inet", "paceline_test"], check=True)


@contextmanager
def second_network(lab: Lab, prefix: str = "10.99.0.") -> Iterator[list[str]]:
    """An interface eth1 on every host, on a bridge of its own; the addresses, in the order of the hosts.

    ``prefix`` may be that of an IPv6 network: then eth1 has no IPv4 address.
    """
    addresses = [f"{prefix}{number + 1}" for number in range(len(lab.hosts))]
    length, flags = (64, "nodad") if ":" in prefix else (24, "")  # no wait for somebody else with that address
    lines = ["link add br1 type bridge stp_state 0 forward_delay 0", "link set br1 up"]
    for host in lab.hosts:
        lines.append(f"link add {host.name}b type veth peer name eth1 netns {host.namespace}")
        lines.append(f"link set {host.name}b master br1 up")
    _ip(lab.switch, lines)
    try:
        for host, address in zip(lab.hosts, addresses, strict=True):
            _ip(host.namespace, [f"addr add {address}/{length} dev eth1 {flags}", "link set eth1 up"])
        yield addresses
    finally:
        _ip(lab.switch, ["link delete br1", *(f"link delete {host.name}b" for host in lab.hosts)])


def _ip(namespace: str, lines: list[str]) -> None:
    subprocess.run(["ip", "-n", namespace, "-batch", "-"], input="\n".join(lines), text=True, check=True)


def on(lab: Lab, host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command on a lab host over ssh, to its end; at most 60 s."""
    argv = ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", *options, host, command]
    return subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
