"""doit mesh on real ssh servers: keys brought to all pairs, nothing twice, and taken back to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeline.cluster import mesh
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.lab_fixture import on

pytestmark = pytest.mark.lab

OWN_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPiMzrg6Mq4xrh9Jd0Bj3fLbWVrZ8Wq0m8Zl1vY0Zz1A somebody else's"


def cluster(lab: Lab, *hosts: Host) -> Cluster:
    return Cluster(
        launcher="pssh", hosts=hosts or (Host(name="node0"), Host(name="node1")), ssh_config=str(lab.ssh_config)
    )


def state(lab: Lab, host: str) -> str:
    """Names, modes and content of ~/.ssh."""
    return on(lab, host, "cd ~/.ssh 2>/dev/null && stat -c '%n %a' . * && cat authorized_keys known_hosts").stdout


@pytest.fixture
def hosts(lab: Lab) -> Iterator[Lab]:
    """The lab's hosts with an authorized_keys of their own, which lacks its last newline."""
    for host in ("node0", "node1"):
        on(lab, host, f"rm -rf ~/.ssh; mkdir -m 700 ~/.ssh; printf '%s' \"{OWN_KEY}\" > ~/.ssh/authorized_keys")
    yield lab
    for host in ("node0", "node1"):
        on(lab, host, "rm -rf ~/.ssh")


def test_every_pair_connects_afterwards_and_a_second_call_adds_nothing(hosts: Lab) -> None:
    made = mesh.connect(cluster(hosts))
    assert made.failures == {}
    assert [(one.made_key, one.added_keys, one.added_hosts) for one in made.members] == [(True, 2, 4), (True, 2, 4)]
    assert on(hosts, "node0", f"ssh -o BatchMode=yes {made.members[1].address} hostname").stdout == "node1\n"
    before = [state(hosts, host) for host in ("node0", "node1")]
    assert OWN_KEY in before[0]
    assert "authorized_keys 600" in before[0]

    again = mesh.connect(cluster(hosts))
    assert [(one.made_key, one.added_keys, one.added_hosts) for one in again.members] == [(False, 0, 0), (False, 0, 0)]
    assert [state(hosts, host) for host in ("node0", "node1")] == before


@pytest.mark.long  # a pair that can't connect: test_check_names_the_pairs
def test_a_plain_name_that_the_hosts_own_configuration_leads_elsewhere_is_named(hosts: Lab) -> None:
    on(hosts, "node0", "printf 'Host *\\n Port 2222\\n' > ~/.ssh/config")
    made = mesh.connect(cluster(hosts))
    assert list(made.failures) == [("node0", "node1")]
    with pytest.raises(HostError, match=r"node0 can't log in to node1 .*: `ssh \S+`: .*port 2222") as hit:
        mesh.refuse_failures(made, checked_only=True)
    assert "on node0: its ssh configuration changes what 'ssh " in str(hit.value)
    assert "without --check" not in str(hit.value)


def test_undo_leaves_what_was_there_before_and_what_came_since(hosts: Lab) -> None:
    mesh.connect(cluster(hosts))
    on(hosts, "node0", "echo 'ssh-ed25519 AAAAlater later' >> ~/.ssh/authorized_keys")
    undone = mesh.undo(cluster(hosts))
    assert [(one.keys, one.hosts, one.key_removed) for one in undone] == [(2, 4, True), (2, 4, True)]
    assert on(hosts, "node0", "ls -A ~/.ssh").stdout == "authorized_keys\n"
    kept = on(hosts, "node0", "cat ~/.ssh/authorized_keys").stdout
    assert kept == f"{OWN_KEY}\nssh-ed25519 AAAAlater later\n"
    assert [(one.keys, one.hosts, one.key_removed) for one in mesh.undo(cluster(hosts))] == [(0, 0, False)] * 2


def test_check_names_the_pairs_and_changes_nothing(hosts: Lab) -> None:
    before = state(hosts, "node0")
    found = mesh.check(cluster(hosts))
    assert set(found.failures) == {("node0", "node1"), ("node1", "node0")}
    assert "Host key verification failed" in found.failures["node0", "node1"]
    assert state(hosts, "node0") == before


def test_another_host_key_under_the_same_name_is_left_and_named(hosts: Lab) -> None:
    address = mesh.check(cluster(hosts)).members[1].address
    wrong = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPiMzrg6Mq4xrh9Jd0Bj3fLbWVrZ8Wq0m8Zl1vY0Zz1A"
    on(hosts, "node0", f"echo '{address} {wrong}' > ~/.ssh/known_hosts")
    made = mesh.connect(cluster(hosts))
    assert made.members[0].conflicts == (address,)
    with pytest.raises(HostError, match="node0 can't log in to node1") as caught:
        mesh.refuse_failures(made, checked_only=False)
    assert f"on node0: ssh-keygen -R '{address}'" in str(caught.value)
    assert f"{address} {wrong}" in on(hosts, "node0", "cat ~/.ssh/known_hosts").stdout


def test_a_key_with_a_passphrase_is_named_and_kept(hosts: Lab) -> None:
    on(hosts, "node1", "ssh-keygen -q -t ed25519 -N secret-words -f ~/.ssh/id_ed25519")
    with pytest.raises(
        HostError, match=r"node1: ~/\.ssh/id_ed25519 there can't be used without somebody who types"
    ) as hit:
        mesh.connect(cluster(hosts))
    assert str(hit.value).endswith("node1 -t 'ssh-keygen -p -f ~/.ssh/id_ed25519'")


def test_this_computer_alone_has_nobody_to_connect_with() -> None:
    with pytest.raises(UsageError, match="reaches none"):
        mesh.connect(Cluster(launcher="local", hosts=(Host(name="localhost"),)))
