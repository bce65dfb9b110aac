"""doit sync on real hosts: the data pack is sent to those that lack it."""

from __future__ import annotations

import pytest

from pipeline.cluster import hosts
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.integration.commands import Project
from tests.lab_fixture import on

pytestmark = pytest.mark.lab


def test_hosts_that_share_this_computers_files_need_nothing_brought() -> None:
    with pytest.raises(UsageError, match="lets ranks read files of this computer"):
        hosts.remote_launcher(Cluster(launcher="local", hosts=(Host(name="localhost"),)))


@pytest.mark.ci
@pytest.mark.long
def test_the_command_brings_the_data_pack_and_says_what_each_host_has(project: Project, lab: Lab) -> None:
    hosts = ["cluster=pssh", "cluster.hosts=[node0]", "cluster.spares=[node1]"]  # a spare gets the same
    words = ["experiment=quickstart", *hosts, f"cluster.ssh_config='{lab.ssh_config}'"]
    for name in ("node0", "node1"):
        on(lab, name, "rm -rf ~/.cache/paceline/data")  # where an earlier test has trained
    done = project.doit("sync", *words)
    assert done.returncode == 0, done.stdout
    for name in ("node0", "node1"):
        assert f"{name}: data pack /root/.cache/paceline/data/" in done.stdout
        (pack,) = (lab.host(name).home / ".cache" / "paceline" / "data").iterdir()
        assert f"{name}: data pack /root/.cache/paceline/data/{pack.name}: ok\n" in done.stdout
        assert (pack / "manifest.json").is_file()
