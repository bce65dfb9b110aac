"""Recording into a real sqlite store while the training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline import tracking
from pipeline.tracking import recorder
from pipeline.tracking.client import DestinationRecorder
from pipeline.tracking.destinations import DONE, RECORDING, Destination, TrackingState
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_store import EXPERIMENT
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow


def is_logged(run: Path, step: int) -> bool:
    """Whether the recorder has noted that the points up to ``step`` are in the store."""
    path = run / "tracking.json"
    return path.exists() and json.loads(path.read_text())["marks"].get("train/loss") == [0, step]


@pytest.mark.ci
@pytest.mark.long
def test_the_follower_records_while_training_goes_on_and_ends_with_it(tmp_path: Path, uri: str) -> None:
    """In a process of its own: the test of one that leaves, and every recorded run of tests/integration."""
    run = folder.started(tmp_path)
    with ThreadPoolExecutor() as threads:
        follower = threads.submit(recorder.record, run, uri, EXPERIMENT, follow=True)
        try:
            folder.metrics(run, range(5))
            wait_until(lambda: is_logged(run, 4))
            assert store.runs(uri)[0].info.status == "RUNNING"
            folder.metrics(run, range(5, 20))
        finally:
            folder.end(run)
        recorded = follower.result(HANG_S)
    (only,) = store.runs(uri)
    assert (recorded.state, recorded.run_id) == (DONE, only.info.run_id)
    assert only.info.status == "FINISHED"
    assert len(store.history(uri, only.info.run_id)) == 20


def test_the_follower_of_a_removed_folder_leaves_what_stands_there_now_alone(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(5))
    follower = threading.Thread(target=recorder.record, args=(run, uri, EXPERIMENT), kwargs={"follow": True})
    follower.start()
    try:
        wait_until(lambda: is_logged(run, 4))  # it has written all it knows, and only looks from now on
    finally:
        run.rename(tmp_path / "removed")  # which ends it
    folder.started(tmp_path)
    follower.join(HANG_S)
    assert not follower.is_alive()
    assert not (run / "tracking.json").exists()


def test_what_is_saved_goes_into_the_folder_that_was_opened_and_into_no_other_at_its_path(tmp_path: Path) -> None:
    told = TrackingState(uri="u", experiment="e", token="t")
    (tmp_path / "run").mkdir()
    folder = os.open(tmp_path / "run", os.O_RDONLY)
    try:
        (tmp_path / "run").rename(tmp_path / "removed")
        (tmp_path / "run").mkdir()
        told.save(folder)
        assert [path.name for path in tmp_path.rglob("*.json")] == ["tracking.json"]
        assert (tmp_path / "removed/tracking.json").exists()
        shutil.rmtree(tmp_path / "removed")
        with pytest.raises(FileNotFoundError):
            told.save(folder)
    finally:
        os.close(folder)
    assert not (tmp_path / "removed").exists()


@pytest.mark.ci
@pytest.mark.long
def test_the_follower_leaves_when_its_controller_is_gone(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path)
    argv = tracking.recorder_command(run, uri, EXPERIMENT, follow=True)
    code = (
        "import os, subprocess, sys; "
        f"argv = {argv!r}; argv[argv.index('--parent') + 1] = str(os.getpid()); "
        f"child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "sys.stdout.write(str(child.pid)); sys.stdout.flush(); sys.stdin.read()"
    )
    controller = subprocess.Popen(
        [argv[0], "-c", code], cwd=store.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout
    folder.metrics(run, range(5))
    wait_until(lambda: is_logged(run, 4))
    controller.kill()
    follower = int(controller.stdout.read())
    controller.communicate()
    with contextlib.suppress(ProcessLookupError):
        wait_until(lambda: os.kill(follower, 0) is not None or _is_zombie(follower))
    assert json.loads((run / "tracking.json").read_text())["state"] == RECORDING
    folder.end(run)
    assert recorder.record(run, uri, EXPERIMENT).state == DONE
    assert len(store.runs(uri)) == 1


def test_the_follower_of_a_controller_that_was_gone_before_it_began_holds_the_lock_for_no_next_one(
    tmp_path: Path, uri: str
) -> None:
    """Beside busy ranks it gets hardly any processor at first, and a parent that it looks up then is another one."""
    run = folder.started(tmp_path)
    folder.metrics(run, range(5))
    with subprocess.Popen(["true"]) as gone:
        pass
    argv = tracking.recorder_command(run, uri, EXPERIMENT, follow=True)
    argv[argv.index("--parent") + 1] = str(gone.pid)
    assert subprocess.run(argv, cwd=store.ROOT, timeout=HANG_S, check=False).returncode in (0, 1)
    folder.end(run)
    assert recorder.record(run, uri, EXPERIMENT).state == DONE
    assert len(store.runs(uri)) == 1


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_the_recorder_of_an_earlier_attempt_is_waited_for_as_it_holds_the_lock(tmp_path: Path) -> None:
    class Sleeping(DestinationRecorder):
        def _spawn(self, *, follow: bool = False, check: bool = False) -> subprocess.Popen[bytes]:
            children.append(subprocess.Popen(["sleep", "0" if children else "1"]))
            return children[-1]

        def _left_no_reason(self) -> bool:
            ended.append(children[0].poll() is not None)
            return False

    children, ended = list[subprocess.Popen[bytes]](), list[bool]()
    one = Sleeping(tmp_path, Destination(uri="sqlite:///x", experiment=EXPERIMENT))
    one.start()
    one.start()
    one.finish()
    assert ended == [True]
