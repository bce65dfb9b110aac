"""What a killed process left is removed, and nothing of one that is alive, that is somebody else's, or elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.core.files import remove_leftovers, temporary_prefix, write_atomic

WRITER = """
import os, sys, time
from pathlib import Path
from pipeline.core import files
def stop(descriptor):
    print(flush=True)
    time.sleep(60)
os.fsync = stop
files.write_atomic(Path(sys.argv[1]), "content")
"""


def writer(path: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing ``path``."""
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_what_a_killed_writer_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    killed, living = writer(tmp_path / "config.json"), writer(tmp_path / "changes.patch")
    try:
        os.kill(killed.pid, signal.SIGKILL)
        time.sleep(0.05)  # not waited for: a process that has ended owns nothing, though its number is still taken
        (gone,) = remove_leftovers([tmp_path, tmp_path / "no such folder"])
        assert gone.name.startswith(".config.json.")
        (kept,) = tmp_path.iterdir()
        assert kept.name.startswith(".changes.patch.")
    finally:
        for child in (killed, living):
            child.kill()
            child.communicate()
    assert remove_leftovers([tmp_path]) == [kept]
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_was_given_owns_nothing(tmp_path: Path) -> None:
    mine = tmp_path / f"{temporary_prefix('.x')}abc"
    place, pid, start = mine.name.split(".")[2].split("-")
    of_another_start = tmp_path / f".x.{place}-{pid}-{int(start, 16) + 1:x}.abc"
    for folder in (mine, of_another_start):
        (folder / "inside").mkdir(parents=True)
    assert remove_leftovers([tmp_path]) == [of_another_start]
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_what_another_computer_has_in_a_shared_folder_stays_for_a_day(tmp_path: Path) -> None:
    other = tmp_path / ".x.0000000-1-1.abc"
    for age_s, gone in ((3600, []), (90_000, [other])):
        other.touch()
        os.utime(other, (time.time() - age_s,) * 2)
        assert remove_leftovers([tmp_path]) == gone


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_files_of_another_user_stay(tmp_path: Path) -> None:
    theirs = tmp_path / ".x.0000000-1-1.abc"
    theirs.touch()
    os.utime(theirs, (0, 0))
    os.chown(theirs, 12345, -1)
    assert remove_leftovers([tmp_path]) == []


@pytest.mark.parametrize("name", ["key.json", ".lock", ".config.json.Xa9_kq1z", "a.b-c-d.e", ".x.0000000-zz-1.abc"])
def test_a_file_with_another_kind_of_name_is_never_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    os.utime(tmp_path / name, (0, 0))
    assert remove_leftovers([tmp_path]) == []


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / ".x.0000000-1-1.abc"
    link.symlink_to(tmp_path / "data")
    os.utime(link, (0, 0), follow_symlinks=False)
    assert remove_leftovers([tmp_path]) == [link]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_long_name_can_still_be_written_whole(tmp_path: Path) -> None:
    for name in ("n" * 255, "ü" * 127):
        write_atomic(tmp_path / name, "content")
        assert (tmp_path / name).read_text() == "content"
    assert len(list(tmp_path.iterdir())) == 2
