"""Which keys go where, and what is said of pairs that don't connect."""

import pytest

from pipeline.cluster.mesh import Member, Mesh, accepted, known_name, member, refuse_failures, table, unreached_by_name
from pipeline.core.errors import HostError
from pipeline.core.specs import Host


def offer(host: Host, address: str, port: int = 22) -> Member:
    value = {
        "user": "ann",
        "address": address,
        "port": port,
        "public_key": f"ssh-ed25519 KEY{address}",
        "made": True,
        "host_keys": [f"ssh-ed25519 HOST{address}"],
        "warnings": [],
    }
    return member(host, value)


def test_a_host_is_known_by_its_name_and_by_both_addresses() -> None:
    found = offer(Host(name="gpu1", address="10.1.0.1"), "192.168.0.1", port=2222)
    assert found.names == ("[gpu1]:2222", "[10.1.0.1]:2222", "[192.168.0.1]:2222")
    assert found.address == "10.1.0.1"
    assert known_name("gpu1", 22) == "gpu1"


def test_every_host_accepts_every_key_under_a_comment_that_says_whose() -> None:
    members = [offer(Host(name="a"), "10.0.0.1"), offer(Host(name="b", user="ann"), "10.0.0.2")]
    wanted = accepted(members)
    assert wanted["keys"] == [
        "ssh-ed25519 KEY10.0.0.1 ann@a (doit mesh)",
        "ssh-ed25519 KEY10.0.0.2 ann@b (doit mesh)",
    ]
    assert wanted["known"][1] == {"names": ("b", "10.0.0.2"), "keys": ("ssh-ed25519 HOST10.0.0.2",)}


def test_a_pair_that_does_not_connect_is_named_with_the_reason_and_the_command() -> None:
    members = (offer(Host(name="a"), "10.0.0.1"), offer(Host(name="b"), "10.0.0.2"))
    mesh = Mesh(members=members, failures={("a", "b"): "ann@10.0.0.2: Permission denied (publickey)."})
    assert [line.split()[-3:] for line in table(mesh).splitlines()[1:]] == [["0", "of", "1"], ["1", "of", "1"]]
    with pytest.raises(HostError) as caught:
        refuse_failures(mesh, checked_only=True)
    text = str(caught.value)
    assert "1 of 2 connections can't be made" in text
    assert "a can't log in to b (ann@10.0.0.2 port 22): ann@10.0.0.2: Permission denied (publickey)." in text
    assert "doit mesh with the same words, without --check" in text


def test_a_host_with_a_port_of_its_own_tells_which_entry_the_plain_name_needs() -> None:
    members = (offer(Host(name="a"), "10.0.0.1"), offer(Host(name="b"), "10.0.0.2", port=2222))
    why = "`ssh b`: connect to host b port 22: Connection refused"
    mesh = Mesh(members=members, failures={}, exact={("a", "b"): why})
    refuse_failures(mesh, checked_only=True)
    assert unreached_by_name(mesh) == [
        f"b: reached only as ssh -p 2222 ann@10.0.0.2 from a ({why}); mpirun types the plain name: it needs there in "
        "~/.ssh/config: Host b / HostName 10.0.0.2 / Port 2222 / User ann"
    ]
