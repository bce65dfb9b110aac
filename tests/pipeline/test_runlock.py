"""One command at a time works on a run, also where somebody removes the lock's file."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from pipeline.core.errors import Killed, PacelineError, TrainingError
from pipeline.core.locks import is_held
from pipeline.core.processes.signals import Stop
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import RunLock, ask_to_stop, locked
from tests.read_only import mounted
from tests.waiting import HANG_S


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "0123456789ab")


def test_a_folder_of_runs_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(PacelineError, match=rf"the folder of runs {tmp_path}/runs can't be made: ") as caught:
        RunLock(RunFolder(tmp_path / "runs" / "0123456789ab")).take()
    assert caught.value.hint == "paths.runs=<another folder>"


@pytest.mark.slow
def test_a_second_command_waits_and_is_told(folder: RunFolder) -> None:
    said: list[str] = []
    done = threading.Event()

    def second() -> None:
        with locked(folder, said.append):
            done.set()

    with locked(folder, said.append) as lock:
        assert (lock.lost(), is_held(folder.lock)) == (False, True)
        assert not RunLock(folder).take()
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not done.wait(0.3)
    assert done.wait(HANG_S)
    waiting.join()
    assert said == ["another command is training 0123456789ab; waiting for it"]
    assert not is_held(folder.lock)
    assert lock.lost()


def test_whose_lock_file_was_removed_may_write_no_more(folder: RunFolder) -> None:
    with locked(folder, print) as first:
        shutil.rmtree(folder.path.parent)
        assert first.lost()
        with pytest.raises(TrainingError, match=r"\.0123456789ab\.lock, the lock of run 0123456789ab, was removed"):
            first.check()
        with locked(folder, print) as second:  # of another file at the same path
            assert (first.lost(), second.lost()) == (True, False)
        assert first.lost()


def test_a_lock_that_is_removed_while_it_is_taken_counts_for_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the opening of the file and its lock another command may put a new one there."""
    real, removed = fcntl.flock, list[int]()

    def flock(descriptor: int, how: int) -> None:
        real(descriptor, how)
        if not removed:
            removed.append(os.fstat(descriptor).st_ino)
            folder.lock.rename(folder.lock.with_suffix(".old"))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(folder, print) as lock:
        assert (lock.lost(), folder.lock.stat().st_ino != removed[0]) == (False, True)


def test_waiting_ends_when_the_command_is_stopped(folder: RunFolder) -> None:
    stop = Stop()
    stop.request("SIGINT")
    with (
        locked(folder, print),
        pytest.raises(Killed, match="stopped by SIGINT while it waited"),
        locked(folder, lambda _: None, stop),
    ):
        pass


def test_a_command_that_only_waited_ends_when_the_run_is_stopped(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    said: list[str] = []

    def stop_then(text: str) -> None:
        said.append(text)
        threading.Timer(0.3, ask_to_stop, [folder]).start()

    with (
        locked(folder, print),
        pytest.raises(Killed, match=f"doit stop has ended {folder.key}; what only waited for it ends too"),
        locked(folder, stop_then),
    ):
        pass
    assert said


def test_a_command_typed_after_the_stop_waits_and_begins(folder: RunFolder) -> None:
    folder.path.mkdir(parents=True)
    first = RunLock(folder)
    assert first.take()
    ask_to_stop(folder)
    threading.Timer(0.3, first.release).start()
    with locked(folder, lambda _: None) as lock:
        assert not lock.lost()


def test_a_look_at_the_lock_writes_nothing_and_needs_no_file(folder: RunFolder, tmp_path: Path) -> None:
    assert not is_held(folder.lock)
    assert not folder.path.parent.exists()
    folder.lock.mkdir(parents=True)
    assert not is_held(folder.lock)
    with pytest.raises(IsADirectoryError):
        RunLock(folder).take()
    folder.lock.rmdir()
    with locked(folder, print):
        there = tmp_path / "read only"
        with mounted(folder.path.parent, there):
            assert is_held(RunFolder(there / folder.key).lock)
