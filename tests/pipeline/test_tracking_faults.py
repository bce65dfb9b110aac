"""Stores that can't take a record: a full disk, a folder that nobody may write to, a database that is none."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import PacelineError
from pipeline.core.locks import FileLock
from pipeline.tracking import recorder
from pipeline.tracking.client import DestinationRecorder
from pipeline.tracking.destinations import DONE, PENDING, Destination
from tests import read_only, small_disk
from tests.pipeline import tracking_store as store
from tests.pipeline.test_tracking_recording import finished
from tests.pipeline.tracking_store import EXPERIMENT
from tests.waiting import HANG_S

pytestmark = pytest.mark.slow


@pytest.mark.ci
@pytest.mark.long
def test_a_full_disk_under_the_artifacts_is_said_and_the_rest_of_the_record_comes_when_there_is_room(
    tmp_path: Path, uri: str
) -> None:
    run = finished(tmp_path)
    (run / "checkpoints" / "final.pt").write_bytes(bytes(3 << 20))
    with small_disk.mounted(tmp_path / "mlartifacts"):
        recorded = recorder.record(run, uri, EXPERIMENT, give_up_s=0.1)
        assert recorded.state == PENDING
        assert "No space left on device" in recorded.message
        assert len(store.history(uri, str(recorded.run_id))) == 20
    assert recorder.record(run, uri, EXPERIMENT).run_id == recorded.run_id
    assert "checkpoints/final.pt" in store.artifacts(uri, str(recorded.run_id), "checkpoints")
    assert len(store.history(uri, str(recorded.run_id))) == 20


@pytest.mark.ci
@pytest.mark.long
def test_a_full_disk_under_the_database_is_said_at_once_whatever_sqlite_calls_it(tmp_path: Path) -> None:
    run = finished(tmp_path)
    with small_disk.mounted(tmp_path / "store") as disk:
        (disk / "filler").write_bytes(bytes(2_000_000))
        child = store.spawn(
            run, f"sqlite:///{disk}/mlflow.db", follow=False, env={**os.environ}
        )  # whose end lets the file go
        _, said = child.communicate(timeout=HANG_S)
    assert child.returncode == 1
    assert re.search(rf"records: the disk of {disk} is full, [\d,]+ bytes are free: make room on it", said), said
    assert f"try: doit record {run.name}, once that is fixed" in said


def test_on_a_full_disk_of_runs_that_is_the_reason_and_no_piece_of_the_recorders_log(tmp_path: Path) -> None:
    with small_disk.mounted(tmp_path / "runs") as runs_dir:
        run = runs_dir / "abcdefabcdef"
        run.mkdir()
        (run / "recorder.log").write_text('  File "/usr/li')  # where the disk has cut it off
        (runs_dir / "filler").write_bytes(bytes(2_080_000))
        waits = DestinationRecorder(run, Destination(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment=EXPERIMENT))
        assert re.fullmatch(rf"the disk of {run} is full, [\d,]+ bytes are free: make room on it", waits.why())


def test_why_another_process_keeps_a_run_from_being_recorded_stands_before_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finished(tmp_path)
    monkeypatch.setattr(recorder, "_WAIT_S", 0.0)
    lock = FileLock(run / ".tracking.lock")
    assert lock.take()
    try:
        with pytest.raises(PacelineError) as refused:
            recorder.record(run, "sqlite:///mlflow.db", EXPERIMENT)
    finally:
        lock.release()
    (run / "recorder.log").write_text(f"{refused.value}\n")  # as the recorder's process leaves it
    waits = DestinationRecorder(run, Destination(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment=EXPERIMENT))
    assert waits.why() == f"another process is recording {run.name}; see {run}/recorder.log"
    assert waits.hint() == f"doit record {run.name}, when it is done"


@pytest.mark.ci
@pytest.mark.long
def test_an_artifact_folder_that_nobody_may_write_to_is_said_at_once(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path)
    (tmp_path / "empty").mkdir()
    with read_only.mounted(tmp_path / "empty", tmp_path / "mlartifacts"):
        recorded = recorder.record(run, uri, EXPERIMENT, give_up_s=HANG_S)  # it doesn't wait for a mending
        assert recorded.state == PENDING
        assert "Read-only file system" in recorded.message
        assert len(store.history(uri, str(recorded.run_id))) == 20
    assert recorder.record(run, uri, EXPERIMENT).state == DONE


@pytest.mark.parametrize("place", ["mlartifacts", f"mlartifacts/{EXPERIMENT}"])
def test_a_file_where_artifacts_should_be_is_named_at_once(tmp_path: Path, uri: str, place: str) -> None:
    run, file = finished(tmp_path), tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.touch()
    recorded = recorder.record(run, uri, EXPERIMENT, give_up_s=HANG_S)
    assert recorded.state == PENDING
    assert f"records: {file} is a file, where a folder of artifacts should be: move it away" in recorded.message
    file.unlink()
    assert recorder.record(run, uri, EXPERIMENT).run_id == recorded.run_id


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda database: database.write_bytes(b"no database " * 500), "its database is damaged: move the file away"),
        (lambda database: (database / "one").mkdir(parents=True), "its database can't be opened: a file is meant"),
    ],
)
def test_a_database_that_is_none_is_said_at_once(tmp_path: Path, damage: Callable[[Path], object], why: str) -> None:
    run = finished(tmp_path)
    damage(tmp_path / "mlflow.db")
    began = time.monotonic()
    recorded = recorder.record(run, f"sqlite:///{tmp_path}/mlflow.db", EXPERIMENT, give_up_s=HANG_S)
    assert recorded.state == PENDING
    assert why in recorded.message
    assert time.monotonic() - began < 50  # MLflow itself tries for 101 s
