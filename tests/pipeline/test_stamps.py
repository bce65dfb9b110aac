"""A copied run folder is hashed once; how soon a stamp tells that nobody wrote to a file since."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.core.files import fingerprint, settles_in, sha256_file
from pipeline.data import manifest
from pipeline.data.datasets.synthetic import SyntheticConfig
from pipeline.data.store import fetch, find
from pipeline.runs.folder import RunFolder
from tests.pipeline import finished_folder
from tests.pipeline.finished_folder import TARGETS, key_of

KEY = key_of()
PACKED = SyntheticConfig(size=20, test_size=5, image_size=4)


@pytest.fixture
def copy(tmp_path: Path) -> RunFolder:
    finished = finished_folder.finished(tmp_path)
    copied = RunFolder(Path(shutil.copytree(finished.path, tmp_path / "elsewhere" / finished.key)))
    time.sleep(0.03)
    return copied


def _altered(path: Path) -> None:
    before = path.read_bytes()
    path.write_bytes(bytes([before[0] ^ 1]) + before[1:])


def test_a_copied_folder_is_hashed_once(copy: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def noted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr("pipeline.runs.result.sha256_file", noted)
    assert copy.stale_because(KEY.digest) is None
    assert len(hashed) == len(TARGETS)
    assert copy.stale_because(KEY.digest) is None
    assert len(hashed) == len(TARGETS)
    _altered(copy.path / "predictions.json")
    assert copy.stale_because(KEY.digest) == "predictions.json was altered"
    _altered(copy.path / "predictions.json")
    (copy.path / "stamps.json").write_text('{"targets": 1}')
    assert copy.stale_because(KEY.digest) is None


def test_what_was_written_to_an_instant_ago_is_hashed_once_more(
    copy: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.core.files._TICK_NS", 60_000_000_000)
    (copy.path / "predictions.json").write_bytes((copy.path / "predictions.json").read_bytes())
    assert copy.stale_because(KEY.digest) is None
    assert not (copy.path / "stamps.json").exists()


def test_a_copied_folder_that_cannot_be_written_is_intact_too(copy: RunFolder) -> None:
    (copy.path / "stamps.json").mkdir()
    assert copy.stale_because(KEY.digest) is None
    assert list(copy.path.glob(".*")) == []
    assert copy.stale_because(KEY.digest) is None


def test_a_second_writing_may_leave_the_same_stamp_for_as_long_as_the_file_system_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_800_000_000 * 10**9
    monkeypatch.setattr("time.time_ns", lambda: now)
    assert settles_in(now - 5_000_001) == pytest.approx(0.015, abs=1e-6)
    assert settles_in(now - 30_000_001) == 0
    assert settles_in(now - 1_000_000_000) == pytest.approx(1.5)  # whole seconds
    assert settles_in(now - 3_000_000_000) == 0
    assert settles_in(now + 1) == math.inf


def test_a_file_on_a_file_system_of_whole_seconds_is_hashed_when_its_stamp_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("pipeline.core.files.settles_in", lambda changed_ns: 1.5)
    (tmp_path / "a").write_text("1")
    assert fingerprint(tmp_path / "a")[1] == sha256_file(tmp_path / "a")
    assert slept == [1.5]
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "a").write_text("22"))
    with pytest.raises(DataError, match="a was changed while it was read"):
        fingerprint(tmp_path / "a")


def test_a_pack_that_is_altered_just_after_it_was_hashed_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def altered_behind(path: Path) -> str:
        digest = sha256_file(path)
        path.write_bytes(path.read_bytes()[::-1])
        return digest

    pack = fetch(PACKED, tmp_path)
    (pack.path / manifest.STAMPS).unlink()
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "sha256_file", altered_behind)
        find(PACKED, tmp_path)
    assert find(PACKED, tmp_path) is None
