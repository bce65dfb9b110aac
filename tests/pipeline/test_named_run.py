"""The hosts on which a run is stopped: those of its newest attempt, and those that the command names."""

from __future__ import annotations

from pipeline.cli.named_run import with_hosts_of
from pipeline.core.cluster import Cluster, Host


def named(launcher: str, *names: str) -> Cluster:
    return Cluster(launcher=launcher, hosts=tuple(Host(name=name) for name in names))


def test_hosts_that_were_typed_are_asked_beside_those_of_the_newest_attempt() -> None:
    newest = named("pssh", "node1", "node2")
    assert with_hosts_of(named("pssh", "node0", "node1"), newest) == named("pssh", "node1", "node2", "node0")
    assert with_hosts_of(named("local", "localhost"), newest) == newest
