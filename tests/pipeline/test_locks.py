"""A lock on a file: taken by one, free when its holder has ended in whatever way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.core.locks import FileLock, held, is_held
from pipeline.runs.journal import append_lines
from tests.waiting import HANG_S

HOLD = """
import sys, time
from pathlib import Path
from pipeline.core.locks import FileLock
from tests.waiting import HANG_S
assert FileLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_holder_frees_it_and_who_waits_is_told_for_how_long(tmp_path: Path) -> None:
    path, rounds = tmp_path / "lock", 0
    root = Path(__file__).parents[2]
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, cwd=root)
    assert holder.stdout
    assert holder.stdout.readline() == b"held\n"
    lock = FileLock(path)
    assert (lock.take(), is_held(path)) == (False, True)
    with pytest.raises(TimeoutError, match=rf"another process has held {path} for 0\.2 s"):
        lock.wait(timeout_s=0.2)

    def end_it_in_the_second_round() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            holder.kill()

    lock.wait(timeout_s=HANG_S, meanwhile=end_it_in_the_second_round)
    assert (rounds >= 2, lock.lost(), is_held(path)) == (True, False, True)
    lock.release()
    assert not is_held(path)
    holder.communicate()


def test_an_error_in_the_block_frees_it_and_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(TimeoutError, match="of the block"), held(path, timeout_s=0):
        raise TimeoutError("of the block")
    with held(path, timeout_s=0):
        assert is_held(path)


def test_a_copy_of_the_holder_that_lives_on_does_not_hold_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.take()
    child = os.fork()
    if child == 0:
        time.sleep(HANG_S)
        os._exit(0)
    try:
        assert is_held(lock.path)
        lock.release()
        assert not is_held(lock.path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_who_may_hold_it_is_decided_by_the_umask_as_for_any_file(tmp_path: Path, umask: int, mode: int) -> None:
    """A team with umask 002 shares a project: each of them may train what another began."""
    lock, journal = FileLock(tmp_path / "lock"), tmp_path / "journal.jsonl"
    before = os.umask(umask)
    try:
        assert lock.take()
        append_lines(journal, [])
    finally:
        os.umask(before)
        lock.release()
    assert [path.stat().st_mode & 0o777 for path in (lock.path, journal)] == [mode, mode]
