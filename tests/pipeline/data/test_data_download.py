from __future__ import annotations

import gzip
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest

from pipeline.core.errors import DataError
from pipeline.data.sources import download
from pipeline.data.sources.download import DownloadRequest, retrieve
from pipeline.data.sources.transfer import TransferError
from tests.pipeline.data.data_server import Server
from tests.s3_fixture import BUCKET
from tests.waiting import promised_s

if TYPE_CHECKING:
    from tests.object_store_fixture import ObjectStore

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def silent(what: str, done: int, total: int | None) -> None:
    """No progress."""


def wanted(*urls: str, sha256: str | None = SHA256) -> DownloadRequest:
    return DownloadRequest(name="set.bin", urls=[f"{url}set.bin" for url in urls], sha256=sha256)


@pytest.fixture
def served(server: Server) -> Server:
    server.script.files["set.bin"] = CONTENT
    return server


def content(got: Path | list[TransferError]) -> bytes:
    assert isinstance(got, Path), got
    return got.read_bytes()


def failures(got: Path | list[TransferError]) -> list[TransferError]:
    assert isinstance(got, list), got
    return got


def test_a_verified_file_is_not_asked_for_again(served: Server, tmp_path: Path) -> None:
    for _ in range(2):
        retrieve(wanted(served.url), tmp_path, silent)
    assert len(served.script.seen) == 1


def test_a_kept_file_that_was_altered_is_fetched_anew(served: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(b"altered")
    assert content(retrieve(wanted(served.url), tmp_path, silent)) == CONTENT


def test_a_file_without_a_known_digest_is_always_fetched(served: Server, tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(b"old")
    assert content(retrieve(wanted(served.url, sha256=None), tmp_path, silent)) == CONTENT


@pytest.mark.slow
def test_a_broken_download_is_tried_again(served: Server, tmp_path: Path) -> None:
    served.script.cut_after = [700_000, 200_000]
    assert content(retrieve(wanted(served.url), tmp_path, silent)) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


@pytest.mark.slow
def test_a_busy_server_is_asked_again(served: Server, tmp_path: Path) -> None:
    served.script.statuses = [503, 429]
    assert content(retrieve(wanted(served.url), tmp_path, silent)) == CONTENT


def test_an_absent_file_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    (failure,) = failures(retrieve(wanted(server.url), tmp_path, silent))
    assert (failure.text, failure.final, failure.absent) == ("HTTP 404 Not Found", True, True)
    assert len(server.script.seen) == 1


def test_a_wrong_checksum_leaves_nothing_and_the_next_mirror_is_taken(served: Server, tmp_path: Path) -> None:
    with Server() as bad:
        bad.script.files["set.bin"] = CONTENT[:-1] + b"\0"
        (failure,) = failures(retrieve(wanted(bad.url), tmp_path, silent))
        assert f"expected {SHA256} but got" in failure.text
        assert list(tmp_path.iterdir()) == []
        assert content(retrieve(wanted(bad.url, served.url), tmp_path, silent)) == CONTENT


@pytest.mark.slow
def test_every_refusing_address_is_named_and_the_end_comes_soon(
    server: Server, refused_url: str, tmp_path: Path
) -> None:
    begin_s = time.monotonic()
    got = failures(retrieve(wanted(refused_url, server.url), tmp_path, silent))
    assert [(f.url, f.text) for f in got] == [
        (f"{refused_url}set.bin", "Connection refused"),
        (f"{server.url}set.bin", "HTTP 404 Not Found"),
    ]
    assert time.monotonic() - begin_s < promised_s(15)


def test_a_full_disk_is_found_before_anything_is_written(
    served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=rf"no room in {tmp_path}: 1286144 bytes .* needed, 1000 free"):
        retrieve(wanted(served.url), tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_other_protocols_come_through_fsspec(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe(f"{tmp_path}/set.bin", CONTENT)
    assert content(retrieve(wanted(f"memory://{tmp_path}/"), tmp_path, silent)) == CONTENT
    (failure,) = failures(retrieve(wanted(f"memory://{tmp_path}/absent/"), tmp_path / "other", silent))
    assert failure.absent


@pytest.mark.slow
def test_a_file_of_an_object_store_comes_to_who_may_read_it(tmp_path: Path, s3: ObjectStore) -> None:
    fsspec.filesystem("s3").pipe(f"{BUCKET}/set.bin", CONTENT)
    assert content(retrieve(wanted(f"s3://{BUCKET}/"), tmp_path, silent)) == CONTENT
    s3.refuse_all()
    with pytest.raises(DataError) as caught:
        retrieve(wanted(f"s3://{BUCKET}/"), tmp_path / "other", silent)
    assert caught.value.what == f"dataset.source=s3://{BUCKET}/set.bin can't be read: PermissionError: Forbidden"
    assert str(caught.value.hint).startswith("AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… (or AWS_PROFILE=…), ")
    with pytest.raises(
        DataError, match=r"dataset.source=s3://b/set.bin: an address with s3:// holds no login\n"
    ) as told:
        retrieve(wanted("s3://me:a-secret@b/"), tmp_path / "other", silent)
    assert "a-secret" not in str(told.value)


def test_a_missing_driver_gives_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"driver of gs:// is not installed .*\n  try: .*pip install .*gcsfs"):
        retrieve(wanted("gs://bucket/folder/"), tmp_path, silent)


def test_an_unknown_protocol_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset.source=nfs4://x/set.bin: .*protocols: http, https, .*s3"):
        retrieve(wanted("nfs4://x/"), tmp_path, silent)


def test_a_server_that_encodes_unasked_costs_one_download(served: Server, tmp_path: Path) -> None:
    served.script.encoding = "gzip"
    served.script.files["set.bin"] = gzip.compress(CONTENT)
    assert content(retrieve(wanted(served.url), tmp_path, silent)) == CONTENT
    assert len(served.script.seen) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set.bin"]


def test_an_archive_that_the_server_calls_encoded_stays_as_it_is(server: Server, tmp_path: Path) -> None:
    server.script.encoding = "x-gzip"
    server.script.files["set.tar.gz"] = gzip.compress(CONTENT)
    sha256 = hashlib.sha256(server.script.files["set.tar.gz"]).hexdigest()
    asked = DownloadRequest(name="set.tar.gz", urls=[f"{server.url}set.tar.gz"], sha256=sha256)
    assert content(retrieve(asked, tmp_path, silent)) == server.script.files["set.tar.gz"]


def test_a_length_that_is_never_reached_is_told(
    served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "PAUSES_S", (0.01,))
    served.script.claimed = str(len(CONTENT) + 100)
    (failure,) = failures(retrieve(wanted(served.url), tmp_path, silent))
    assert "1024000 bytes read, 100 more expected" in failure.text
    assert len(served.script.seen) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("claimed", ["no number", "-5"])
def test_a_length_that_is_none_is_not_counted_on(served: Server, tmp_path: Path, claimed: str) -> None:
    served.script.claimed = claimed
    assert content(retrieve(wanted(served.url), tmp_path, silent)) == CONTENT
