"""Hosts that can't take part, over real ssh servers: each error names the host, the value and the fix."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.lab_fixture import on
from tests.waiting import wait_until

pytestmark = pytest.mark.lab


def check(ssh_config: Path, *hosts: Host) -> None:
    cluster = Cluster(
        launcher="pssh", hosts=hosts, ssh_config=str(ssh_config), settings=PsshConfig(connect_timeout_s=30.0)
    )
    preflight.examine(cluster).raise_if_failed()


def error(ssh_config: Path, *hosts: Host) -> str:
    with pytest.raises(HostError) as caught:
        check(ssh_config, *hosts)
    return str(caught.value)


def changed(lab: Lab, tmp_path: Path, **options: str) -> Path:
    """The lab's ssh_config with options in front (ssh takes the first value that it meets)."""
    path = tmp_path / "ssh_config"
    first = "".join(f"{name} {value}\n" for name, value in options.items())
    path.write_text(first + lab.ssh_config.read_text())
    return path


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def listens(address: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((address, port)) == 0


def test_no_host_reachable_lists_every_host(lab: Lab) -> None:
    one, two = closed_port(), closed_port()
    text = error(lab.ssh_config, Host(name="127.0.0.1", port=one), Host(name="127.0.0.1", port=two, user="me"))
    assert "2 of 2 hosts" in text
    assert f"127.0.0.1:{one}: unreachable: Connection refused" in text
    assert f"me@127.0.0.1:{two}: unreachable: Connection refused" in text


def test_one_of_two_unreachable_names_only_that_one(lab: Lab) -> None:
    text = error(lab.ssh_config, Host(name="node0"), Host(name="no-such-host.invalid"))
    assert "1 of 2 hosts" in text
    assert "no-such-host.invalid: unreachable: Could not resolve hostname" in text
    assert "node0" not in text


def test_unknown_host_key_is_never_accepted_but_the_way_is_shown(lab: Lab, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text("")
    config = changed(lab, tmp_path, UserKnownHostsFile=str(known), GlobalKnownHostsFile="/dev/null")
    text = error(config, Host(name="node0"), Host(name="node1"))
    assert "node0: its host key is not in known_hosts" in text
    assert "node0 true, compare the fingerprint, answer yes, and the same for node1" in text
    assert known.read_text() == ""


def test_changed_host_key_is_removed_from_the_file_and_under_the_name_that_ssh_gives(lab: Lab, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    key = (lab.root / ".lab" / "id_ed25519.pub").read_text().split()  # any key but the host's
    address = lab.hosts[0].address  # by which ssh looks for the key of node0, an alias in ssh_config
    known.write_text(f"{address} {key[0]} {key[1]}\n")
    config = changed(lab, tmp_path, UserKnownHostsFile=str(known), GlobalKnownHostsFile="/dev/null")
    text = error(config, Host(name="node0"))
    assert "node0: its host key is another one than known_hosts has" in text
    assert f"ssh-keygen -f {known} -R {address} " in text


def test_wrong_key_names_the_ways_to_a_right_one(lab: Lab, tmp_path: Path) -> None:
    key = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config = changed(lab, tmp_path, IdentityFile=str(key), IdentitiesOnly="yes", IdentityAgent="none")
    lines = [line for line in config.read_text().splitlines() if "id_ed25519" not in line]
    config.write_text("\n".join(lines) + "\n")
    text = error(config, Host(name="node0"))
    assert "node0: Permission denied" in text
    assert "ssh-copy-id" in text


def test_missing_interpreter_shows_the_value_and_the_field(lab: Lab) -> None:
    text = error(lab.ssh_config, Host(name="node0"), Host(name="node1", python="/opt/none/bin/python"))
    assert "node1: no such interpreter there: cluster.python='/opt/none/bin/python'" in text
    assert "node0:" not in text


def test_hostile_interpreter_path_is_not_run_by_the_remote_shell(lab: Lab) -> None:
    text = error(lab.ssh_config, Host(name="node0", python="/x/$(touch /tmp/pwned)'; touch /tmp/pwned; '"))
    assert "no such interpreter" in text
    argv = ["ssh", "-F", str(lab.ssh_config), "node0", "ls /tmp"]
    assert "pwned" not in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_host_without_torch_shows_its_interpreter(lab: Lab, tmp_path: Path) -> None:
    bare = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if (
        bare is None
        or "True"
        in subprocess.run(
            [bare, "-c", "from importlib.util import find_spec as f; print(f('torch') is not None)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    ):
        pytest.skip("needs a system Python without torch")
    text = error(lab.ssh_config, Host(name="node0"), Host(name="node1", python=bare))
    assert f"node1: {bare} has no torch" in text


def test_two_names_of_one_host_are_refused(lab: Lab, tmp_path: Path) -> None:
    address = lab.hosts[0].address
    config = changed(lab, tmp_path)
    config.write_text(config.read_text().replace("Host node0\n", "Host node0 twin\n"))
    text = error(config, Host(name="node0"), Host(name="twin"))
    assert f"node0 ({address}) and twin ({address}) are the same host (node0)" in text


def test_one_machine_by_two_addresses_and_two_ssh_servers_is_refused(lab: Lab, tmp_path: Path) -> None:
    first = lab.hosts[0].address
    second = f"{first.rpartition('.')[0]}.200"
    alias = ["ip", "-n", lab.hosts[0].namespace, "address"]
    subprocess.run([*alias, "add", f"{second}/24", "dev", "eth0"], check=True)
    server = f"/usr/sbin/sshd -D -p 2200 -o PidFile=none -o ListenAddress={second}"
    pid = on(lab, "node0", f"{server} >/dev/null 2>&1 & echo $!").stdout.strip()
    try:
        wait_until(lambda: listens(second, 2200))
        config = changed(lab, tmp_path)
        entry = config.read_text().partition("\nHost node1")[0].replace("Host node0", "Host twin", 1)
        entry = entry.replace(f"HostName {first}", f"HostName {second}\n  HostKeyAlias node0")
        entry = entry.replace("Port 22", "Port 2200")
        config.write_text(f"{config.read_text()}\n{entry}\n")
        text = error(config, Host(name="node0"), Host(name="twin"))
    finally:
        on(lab, "node0", f"kill {pid}")
        subprocess.run([*alias, "delete", f"{second}/24", "dev", "eth0"], check=True)
    assert f"node0 ({first}) and twin ({second}) are the same host (node0)" in text


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "a b", "a/b", ""])
def test_host_name_that_ssh_could_misread_is_refused(lab: Lab, name: str) -> None:
    with pytest.raises(UsageError, match="is not a host name"):
        check(lab.ssh_config, Host(name=name))


def test_missing_pssh_names_the_package_to_install(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        HostError, match=r"needs the program pssh \(or parallel-ssh\), which is not in PATH=.*\n  try: "
    ):
        check(lab.ssh_config, Host(name="node0"))
