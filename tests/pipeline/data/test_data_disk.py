"""A data folder that cannot take a pack says so, and nothing half-made is left in it."""

from __future__ import annotations

import io
import queue
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.core.processes import threads
from pipeline.data import packing, progress
from pipeline.data.datasets.synthetic import SyntheticConfig
from pipeline.data.store import fetch
from tests.small_disk import mounted
from tests.waiting import HANG_S
from trainers.core.config import DatasetConfig

CONFIG = SyntheticConfig(size=200, test_size=50, image_size=8, val_size=20)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "mean_std", lambda counts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fetch(CONFIG, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".synthetic.lock"]


def test_a_data_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"dataset=synthetic could not be packed: .*/file"):
        fetch(CONFIG, tmp_path / "file" / "data")


def test_a_source_that_cannot_be_opened_is_not_mended_by_another_data_folder(tmp_path: Path) -> None:
    loop = tmp_path / "loop.npz"
    loop.symlink_to(loop)
    arrays = DatasetConfig(name="arrays", source=str(loop), holdout=1)
    with pytest.raises(DataError, match=r"symbolic links \(.*loop.npz\)\n  try: dataset.source=<what you can read>"):
        fetch(arrays, tmp_path / "data")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    with mounted(tmp_path / "disk") as disk:
        yield disk


LARGE = replace(CONFIG, size=1000, test_size=100, image_size=32)


def test_a_disk_too_small_is_refused_before_writing(small_disk: Path) -> None:
    needed_bytes = 1100 * (3 * 32 * 32 + 8) + (1 << 18)
    with pytest.raises(DataError, match=rf"no room in {small_disk}/.*: {needed_bytes} bytes .* needed, \d+ free"):
        fetch(LARGE, small_disk)
    assert sorted(path.name for path in small_disk.iterdir()) == [".synthetic.lock"]


def test_a_disk_that_fills_up_while_packing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "require_room", lambda path, needed_bytes: None)
    with pytest.raises(DataError, match=r"no room in .*: \d+ bytes .* needed, \d+ free\n  try: free some space"):
        fetch(LARGE, small_disk)
    assert sorted(path.name for path in small_disk.iterdir()) == [".synthetic.lock"]
    assert fetch(CONFIG, small_disk).manifest.count == 250


@pytest.mark.slow
def test_a_log_gets_a_line_every_few_seconds_also_while_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Log(io.StringIO):
        def write(self, text: str) -> int:
            lines.put(text)
            return len(text)

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(sys, "stderr", Log())
    monkeypatch.setattr(threads.WaitReports.__init__, "__defaults__", (0.05,))

    def next_line(after: str) -> str:
        """The first that isn't ``after``, without its seconds."""
        while (line := lines.get(timeout=HANG_S).partition(" (")[0]) in (after, "\n"):
            pass
        return line

    with progress.reporting(None) as report:
        assert (first := next_line("")) == "still preparing the data"
        report("downloading x.gz", 6_000_000, 20_000_000)
        assert (second := next_line(first)) == "still downloading x.gz: 6.0 MB of 20.0 MB"
        report("unpacking x.gz", 3_000_000, None)
        assert (third := next_line(second)) == "still unpacking x.gz: 3.0 MB"
        report("hashing x", 0, None)
        assert next_line(third) == "still hashing x"
