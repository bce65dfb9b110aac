"""A copied run folder is hashed once."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from pipeline.core.files import sha256_file
from pipeline.runs.folder import TARGETS, RunFolder
from tests.pipeline import finished_folder
from tests.pipeline.finished_folder import key_of

KEY = key_of()


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
    monkeypatch.setattr("pipeline.runs.stamps._TICK_NS", 60_000_000_000)
    (copy.path / "predictions.json").write_bytes((copy.path / "predictions.json").read_bytes())
    assert copy.stale_because(KEY.digest) is None
    assert not (copy.path / "stamps.json").exists()


def test_a_copied_folder_that_cannot_be_written_is_intact_too(copy: RunFolder) -> None:
    (copy.path / "stamps.json").mkdir()
    assert copy.stale_because(KEY.digest) is None
    assert list(copy.path.glob(".*")) == []
    assert copy.stale_because(KEY.digest) is None
