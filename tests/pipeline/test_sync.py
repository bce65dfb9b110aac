"""doit sync without hosts: what goes where, how rsync is called, how trees differ, what is printed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import invocation
from pipeline.cli.commands.hosts import copy_line
from pipeline.cluster import sync
from pipeline.cluster.agent.host import trees
from pipeline.cluster.launchers.pssh import PsshConfig
from pipeline.cluster.sync import Folder, Tree, TreeState, folders
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with a file, an executable one and a link in it."""
    folder = tmp_path / "-it's"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b").write_text("one")
    (folder / "run").write_text("#!/bin/sh")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("inner")
    return folder


def test_what_is_named_goes_below_the_workdir_or_to_a_folder_of_its_own(tree: Path) -> None:
    words = [tree.name, f"{tree.name}/", f"./{tree.name}/run"]
    found = folders(words, to=None, workdir="~/work", root=tree.parent)
    assert [(one.place, one.is_file) for one in found] == [
        (f"~/work/folders/{tree.name}", False),
        ("~/work/folders/run", True),
    ]
    assert folders(["."], to="/data/", workdir="", root=tree)[0].place == f"/data/{tree.name}"
    assert folders(["inner/.."], to="/data", workdir="", root=tree)[0].place == f"/data/{tree.name}"


@pytest.mark.parametrize(
    ("words", "to", "why"),
    [
        (["nope"], None, r"/nope can't be copied to the hosts: No such file or directory"),
        (["/"], None, "it is the whole disk"),
        (["run"], "relative", "to=relative must be an absolute folder"),
        (["run"], "/data/../etc", "must be an absolute folder"),
        ([], "/data", "no file or folder is named"),
        (["run", "inner/run"], None, "would both go to ~/work/folders/run"),
        (["/dev/null"], None, "no file"),
    ],
)
def test_what_cannot_be_brought_is_refused(tree: Path, words: list[str], to: str | None, why: str) -> None:
    (tree / "inner" / "run").touch()
    with pytest.raises(UsageError, match=why):
        folders(words, to=to, workdir="~/work", root=tree)


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync: apt-get install rsync")
def test_rsync_gets_every_value_as_one_word(tree: Path) -> None:
    folder = Folder(name=tree.name, source=tree, place="/d $(x)")
    shell = ["ssh", "-F", "/it's here/config", "-o", "BatchMode=yes"]
    argv = sync.Copy(host=Host(name="fe80::1"), folder=folder, place="/d $(x)", shell=shell).argv(delete=False)
    assert argv[-4:] == ["'ssh' '-F' '/it''s here/config' '-o' 'BatchMode=yes'", "--", f"{tree}/", "[fe80::1]:/d $(x)/"]
    assert {"--protect-args", "--checksum"} <= set(argv)
    assert "--delete" not in argv
    one_file = Folder(name="run", source=tree / "run", place="/d")
    argv = sync.Copy(host=Host(name="a"), folder=one_file, place="/d", shell=shell).argv(delete=True)
    assert argv[-2:] == [str(tree / "run"), "a:/d"]
    assert "--delete" not in argv, "beside a single file lies what is nobody's business"


def test_an_absent_or_old_rsync_is_told_with_the_command_that_brings_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    sync._program.cache_clear()
    with pytest.raises(HostError, match="needs rsync on this computer") as absent:
        sync._program()
    assert "apt-get install rsync" in str(absent.value)
    (tmp_path / "rsync").write_text("#!/bin/sh\necho 'openrsync: protocol version 29'\n")
    (tmp_path / "rsync").chmod(0o755)
    with pytest.raises(HostError, match=r"needs rsync 3\.1 or newer; .*openrsync"):
        sync._program()
    sync._program.cache_clear()


def test_hosts_without_rsync_are_named(tree: Path) -> None:
    class Launcher:
        cluster = Cluster(launcher="pssh", hosts=(Host(name="a"), Host(name="b")), settings=PsshConfig())

        def demand(self, *_: object, **__: object) -> dict[str, Any]:
            return {"a": {"rsync": True, "places": []}, "b": {"rsync": False, "places": []}}

    with pytest.raises(HostError, match="b: there is no rsync") as caught:
        sync._places(Launcher(), [], Launcher.cluster.hosts, delete=False)  # type: ignore[arg-type]
    assert "there: sudo apt-get install rsync" in str(caught.value)


def test_what_stands_in_the_way_of_a_file_or_a_folder_is_told(tmp_path: Path) -> None:
    one = ("file", 1, "digest")
    wanted = {"a": one, "b/c": one, "b/d/e": one, "f": one}
    there = {"a/x": one, "b/d": one, "f": one, "more/g": one}
    assert trees.in_the_way(wanted, there) == ["a", "b/d"]
    assert trees.in_the_way(wanted, wanted) == []
    (tmp_path / "link").symlink_to(tmp_path)
    asked = {"delete": True, "places": [{"place": str(tmp_path / "link"), "is_file": False}]}
    with pytest.raises(SystemExit, match=f"link is a link to {tmp_path} there, in which delete=1 would remove files"):
        trees.make_places(asked)


def test_contents_kinds_and_names_make_a_trees_digest(tree: Path) -> None:
    first = trees.listing(str(tree))
    assert {name: kind for name, (kind, _, _) in first.items()} == {
        "inner/a b": "file",
        "link": "link",
        "run": "executable",
    }
    os.utime(tree / "run", (1, 1))
    assert trees.tree_digest(trees.listing(str(tree))) == trees.tree_digest(first)
    (tree / "run").chmod(0o644)
    assert trees.tree_digest(trees.listing(str(tree))) != trees.tree_digest(first)
    assert list(trees.listing(str(tree / "run"))) == ["."]
    assert trees.listing(str(tree / "nope")) == {}


def test_a_tree_that_differs_is_told_by_counts_and_names(tree: Path) -> None:
    wanted = trees.listing(str(tree))
    (tree / "inner" / "a b").write_text("two")
    (tree / "link").unlink()
    (tree / "later").touch()
    told = trees.difference(wanted, trees.listing(str(tree), wanted))
    assert told.pop("sha256") != trees.tree_digest(wanted)
    assert told == {
        "differ": 2,
        "absent": 1,
        "named": ["inner/a b", "link"],
        "more": 1,
        "more_named": ["later"],
        "in_the_way": [],
    }


def test_a_pipe_among_the_files_is_refused(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(UsageError, match="pipe is neither a file nor a folder nor a link"):
        sync.tree_of(Folder(name="x", source=tree, place="/x"))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, "ok, 2 files, 1.2 MB, sha256 0123456789abcdef"),
        ({"more": 1, "more_named": ("c",), "differ": 2, "absent": 2},
         "absent, 2 files, 1.2 MB; 1 file more there (c), which delete=1 would remove"),
        ({"differ": 1, "named": ("a",)}, "1 of 2 files, 1.2 MB differ (a)"),
        ({"differ": 2, "absent": 2, "named": ("a", "b")}, "absent, 2 files, 1.2 MB"),
    ],
)  # fmt: skip
def test_a_line_tells_what_a_host_has(change: dict[str, Any], shown: str) -> None:
    wanted = Tree(name="x", place="/x", files={"a": ("file", 600_000, "1"), "b": ("file", 600_000, "2")})
    as_wanted: dict[str, Any] = {"differ": 0, "absent": 0, "named": (), "more": 0, "more_named": (), "in_the_way": ()}
    told = {**as_wanted, **change}
    found = TreeState(host="node0", tree=wanted, place="/x", sha256="0123456789abcdef0123", **told)
    assert copy_line(found, removed=False) == f"node0: x in /x: {shown}"


def test_bare_words_behind_sync_are_paths_and_a_sign_of_equality_in_one_is_no_override() -> None:
    asked = invocation.parse(["sync", "cluster=two_node", "train", "./a=b", "/c=d", "to=/x"])
    assert asked.paths == ("train", "./a=b", "/c=d")
    assert asked.overrides == ("cluster=two_node",)
    assert asked.options == {"to": "/x"}
    assert invocation.parse(["train", "cluster=two_node"]).paths == ()
