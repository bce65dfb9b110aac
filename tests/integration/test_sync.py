"""doit sync on real hosts: files and a data pack brought, compared, and repaired where they were changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.cluster import sync
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.core.errors import HostError, UsageError
from pipeline.core.processes.heartbeat import Heartbeat
from pipeline.core.specs import Cluster, Host
from pipeline.lab import Lab
from tests.integration.commands import Project
from tests.lab_fixture import on

pytestmark = pytest.mark.lab

NAME = '-it\'s "a" [b]* $(touch x) \\ ü'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / NAME
    (folder / NAME).mkdir(parents=True)
    (folder / NAME / "-n").write_text("one")
    (folder / "line\nfeed").write_text("two")
    (folder / "link").symlink_to("/nowhere")
    return folder


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Cluster]:
    hosts = tuple(Host(name=host.name) for host in lab.hosts)
    yield Cluster(
        launcher="pssh", hosts=hosts, ssh_config=str(lab.ssh_config), settings=PsshConfig(workdir="~/a 'workdir'")
    )
    for host in lab.hosts:
        on(lab, host.name, "rm -rf ~/a*workdir*")


def brought(cluster: Cluster, source: Path, *, delete: bool = False) -> tuple[list[sync.TreeState], list[str]]:
    """What the hosts have then, and the lines that were said."""
    lines: list[str] = []
    with closing(sync.remote(cluster)) as launcher:
        what = sync.folders([str(source)], to=None, workdir=launcher.workdir, root=source.parent)
        found = sync.send(launcher, what, delete=delete, heartbeat=Heartbeat(lines.append))
    return found, lines


def test_what_differs_is_sent_and_what_is_more_stays_until_it_is_not_wanted(
    cluster: Cluster, source: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, lines = brought(cluster, source)
    there = lab.host("node1").home / "a 'workdir'" / "folders" / NAME
    assert [(one.host, one.differ, one.more, one.sha256) for one in found] == [
        (host.label, 0, 0, found[0].tree.sha256) for host in cluster.hosts
    ]
    assert (there / NAME / "-n").read_text() == "one"
    assert (there / "link").readlink() == Path("/nowhere")
    assert lines == [lines[0]]
    assert lines[0].startswith("sending files: node0 0.0 of 0.0 MB (")

    (there / NAME / "-n").write_text("two")
    (there / "more").touch()
    found, _ = brought(cluster, source)
    assert [(one.differ, one.more) for one in found] == [(0, 0), (0, 1)]
    assert (there / NAME / "-n").read_text() == "one"
    (source / "more").mkdir()  # empty, so it takes nothing's place
    assert [one.more for one in brought(cluster, source)[0]] == [0, 1]
    (source / "more" / "now").touch()
    with pytest.raises(HostError, match=r"nothing is removed unasked:\n  node1: in .*: more\n"):
        brought(cluster, source)
    assert (there / "more").is_file()
    (there / "else").touch()
    found, lines = brought(cluster, source, delete=True)
    assert [one.more for one in found] == [0, 0]
    assert lines[1:] == [f"node1: removed from /root/a 'workdir'/folders/{NAME} what isn't here: else, more"]
    assert (there / "more" / "now").exists()

    monkeypatch.setattr(sync, "copy_all", None)  # nothing differs, so nothing is sent
    assert [one.differ for one in brought(cluster, source)[0]] == [0, 0]


def test_a_file_where_a_folder_belongs_is_named_with_its_host(cluster: Cluster, source: Path, lab: Lab) -> None:
    place = lab.host("node1").home / "a 'workdir'" / "folders"
    place.mkdir(parents=True)
    (place / NAME).touch()
    with pytest.raises(HostError, match=r"node1: .* is no folder there; move it away, or name another to="):
        brought(cluster, source)


def test_a_host_that_prints_at_login_is_told_so(cluster: Cluster, source: Path, lab: Lab) -> None:
    on(lab, "node0", "echo 'echo welcome' > ~/.bashrc")
    try:
        with pytest.raises(
            HostError, match=r"node0: its login prints something, which rsync mistakes for its own data"
        ):
            brought(cluster, source)
    finally:
        on(lab, "node0", "rm ~/.bashrc")


def test_hosts_that_share_this_computers_files_need_nothing_brought() -> None:
    with pytest.raises(UsageError, match="lets ranks read files of this computer"):
        sync.remote(Cluster(launcher="local", hosts=(Host(name="localhost"),)))


@pytest.mark.ci
@pytest.mark.long
def test_the_command_brings_the_data_pack_and_says_what_each_host_has(project: Project, lab: Lab) -> None:
    hosts = ["cluster=pssh", "cluster.hosts=[node0]", "cluster.spares=[node1]"]  # a spare gets the same
    words = ["experiment=quickstart", *hosts, f"cluster.ssh_config='{lab.ssh_config}'"]
    for name in ("node0", "node1"):
        on(lab, name, "rm -rf ~/.cache/paceline/data")  # where an earlier test has trained
    before = project.doit("sync", *words, "check=1")
    assert before.returncode == 1, before.stdout
    assert before.stdout.count(": absent, 3 files, 130.4 kB") == 2
    assert "ERROR: node0, node1: not everything is there as it is here" in before.stdout
    done = project.doit("sync", *words, "LICENSE")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": ok, 3 files, 130.4 kB, sha256 ") == 2
    assert done.stdout.count(": LICENSE in /root/.cache/paceline/folders/LICENSE: ok, 1 file, ") == 2
