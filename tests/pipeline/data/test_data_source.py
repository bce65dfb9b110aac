from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.datasets import DATASETS
from pipeline.data.sources.source import file_name, files_below, local_path, without_login
from pipeline.data.store import fetch, refuse
from trainers.core.config import DatasetConfig


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (None, None),
        ("https://host/x.tar.gz", None),
        ("s3://bucket/x", None),
        ("file:///data/my%20set", Path("/data/my set")),
        ("FILE:///data/x.npz", Path("/data/x.npz")),
        ("file://localhost/data/x.npz", Path("/data/x.npz")),
        ("Local:///data/x.npz", Path("/data/x.npz")),
        ("/data/a/../b/", Path("/data/b")),
        ("sub/x.npz", Path.cwd() / "sub" / "x.npz"),
        ("~/x.npz", Path.home() / "x.npz"),
    ],
)
def test_which_sources_are_local(source: str | None, path: Path | None) -> None:
    assert local_path(source) == path


def test_secrets_of_an_address_are_not_shown() -> None:
    assert without_login("https://me:word@host:8/a/b.npz?sig=x#y") == "https://host:8/a/b.npz"


def test_a_file_name_never_holds_a_slash() -> None:
    assert file_name("https://host/a/%2e%2e%2Fb%20c.npz?sig=x/y") == "b c.npz"
    assert file_name("https://host/a/") == ""


def test_a_host_in_a_file_address_is_refused() -> None:
    with pytest.raises(DataError, match=r"data is taken for a host there.*\n  try: dataset.source=file:///data/x.npz"):
        local_path("file://data/x.npz")


@pytest.mark.parametrize("name", ["arrays", "mnist", "cifar10"])
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a folder", "nothing"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "x.npz"
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    text = "does not exist" if kind == "nothing" else rf"is {kind}; wanted: a file"
    if kind == "a folder" and name != "arrays":
        text = f"none of its files is in {path}"
    with pytest.raises(DataError, match=text):
        fetch(DatasetConfig(name=name, source=str(path), holdout=5), tmp_path / "data")


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        ("digits", "https://x.invalid/a.npz", r"is of no use to dataset=digits: it needs no files"),
        ("synthetic", "x", r"is of no use to dataset=synthetic"),
        ("arrays", None, r"dataset=arrays needs your file"),
        ("arrays", "/nope.npz", r"/nope.npz does not exist"),
        ("arrays", "nfs4://x/y", r"dataset.source=nfs4://x/y: .*protocols: http, https, .*s3"),
        ("cifar10", "simplecache::nfs4://x/y", r"dataset.source=simplecache::nfs4://x/y.*: .*protocols: http"),
        ("mnist", "file://host/x", r"host is taken for a host there"),
    ],
)
def test_what_fetch_would_refuse_is_known_without_it(tmp_path: Path, name: str, source: str | None, said: str) -> None:
    config = DATASETS.settings(name)(name=name, source=source)
    with pytest.raises(DataError, match=said):
        refuse(config)
    with pytest.raises(DataError, match=said):
        fetch(config, tmp_path)


def test_files_behind_links_to_folders_are_found_and_a_link_that_leads_up_ends_nothing(tmp_path: Path) -> None:
    for name in ("set/b/2.png", "elsewhere/1.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "set/a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "set")
    (tmp_path / "set/gone").symlink_to(tmp_path / "nowhere")
    assert [*files_below(tmp_path / "set")] == ["a/1.png", "b/2.png"]
