"""TensorBoard's event files: read by TensorBoard's own reader, each point once after a kill at any byte."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import TrackingConfig
from pipeline.core.errors import UsageError
from pipeline.tracking import recorder
from pipeline.tracking.destinations import DONE, PENDING, TENSORBOARD, TrackingState, refuse_missing
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.waiting import wait_until


def record(run: Path, **more: Any) -> TrackingState:
    return recorder.record(run, TENSORBOARD, "paceline", tracker=TENSORBOARD, **more)


def seen(run: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, unix time, value) of each point of each scalar, as TensorBoard itself reads the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(file_of(run)), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(e.step, e.wall_time, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def file_of(run: Path) -> Path:
    (path,) = (run / "tensorboard").glob("*/*")
    return path


def test_each_point_is_there_once_with_its_time_and_what_the_run_is_as_a_text(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 21))
    folder.end(run)
    assert record(run).state == DONE
    assert file_of(run).parent.name == "small_cnn digits · 0123"
    points = seen(run)
    assert [step for step, _, _ in points["train/loss"]] == list(range(1, 21))
    (told,) = points["test/accuracy"]
    assert [*points["train/loss"][4], *told] == pytest.approx([5, folder.T0 + 5, 1 / 6, 20, folder.T0 + 32, 0.9])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (text,) = EventAccumulator(str(file_of(run))).Reload().Tensors("run")
    assert b"small_cnn" in text.tensor_proto.string_val[0]
    before = file_of(run).read_bytes()
    again = record(run, check=True)
    assert (again.state, file_of(run).read_bytes()) == (DONE, before)


@pytest.mark.parametrize("cut", [0, 5, 12, 300, -1, -7])
def test_a_writer_killed_at_any_byte_is_gone_on_with_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 21))
    folder.end(run)
    record(run)
    whole = file_of(run).read_bytes()
    file_of(run).write_bytes(whole[:cut])
    assert record(run, check=True).state == DONE
    assert file_of(run).read_bytes() == whole


def test_an_attempt_that_repeats_steps_from_its_checkpoint_adds_only_what_is_new(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 15))
    folder.journal(run, "KILLED", at=folder.T0 + 30)
    assert record(run).state == DONE
    (run / "metrics.jsonl").unlink()
    folder.metrics(run, range(1, 11))
    folder.metrics(run, range(11, 21), at=folder.T0 + 100)
    folder.journal(run, "RUNNING", attempt=2, at=folder.T0 + 100)
    folder.end(run, attempt=2)
    assert record(run).state == DONE
    points = seen(run)["train/loss"]
    assert [step for step, _, _ in points] == list(range(1, 21))
    assert (points[13][1], points[14][1]) == (folder.T0 + 14, folder.T0 + 115)


def test_a_curve_whose_steps_begin_anew_is_there_whole_also_where_its_writer_was_killed(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.logged(run, *((step, {"a|b": 1.0, "a#b": 2.0}) for step in (-1, 0, 1, 0, 1)))
    record(run)
    folder.logged(run, (1, {"a|b": 3.0}), (0, {"a|b": 4.0}))
    folder.journal(run, "FINISHED")
    record(run)
    live = seen(run)
    file_of(run).unlink()
    record(run, check=True)
    assert seen(run) == live
    assert [(step, value) for step, _, value in live["a_b"]] == [
        *((-1, 1.0), (0, 1.0), (1, 1.0), (0, 1.0), (1, 1.0), (1, 3.0), (0, 4.0))
    ]
    assert {value for _, _, value in live["a_b_"]} == {2.0}


@pytest.mark.slow
def test_points_appear_while_the_run_goes_on_and_a_killed_recorder_is_gone_on_with(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 8))
    env = {**os.environ, "PACELINE_TRACKER_SETTINGS": "{}"}
    first = store.spawn(run, TENSORBOARD, follow=True, env=env, tracker=TENSORBOARD)
    wait_until(lambda: list(run.glob("tensorboard/*/*")) and len(seen(run).get("train/loss", ())) == 7, first)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    folder.metrics(run, range(8, 21))
    folder.end(run)
    second = store.spawn(run, TENSORBOARD, follow=True, env=env, tracker=TENSORBOARD)
    out, err = second.communicate()
    assert (second.returncode, out) == (0, "done tensorboard\n"), err
    assert [step for step, _, _ in seen(run)["train/loss"]] == list(range(1, 21))


def test_a_folder_that_cannot_be_written_leaves_the_record_pending_and_it_is_made_later(tmp_path: Path) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(1, 5))
    folder.end(run, steps=4)
    (run / "tensorboard").write_text("in the way")
    recorded = record(run, give_up_s=0.1)
    assert recorded.state == PENDING
    assert recorded.message.startswith("TensorBoard's event files took no (more) records: FileExistsError")
    assert json.loads((run / "tracking.tensorboard.json").read_text())["state"] == PENDING
    (run / "tensorboard").unlink()
    assert record(run).state == DONE
    assert len(seen(run)["train/loss"]) == 4


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"tracking\.tensorboard=true needs tensorboard, which is not") as error:
        refuse_missing(TrackingConfig(tensorboard=True))
    assert error.value.hint == "pip install 'paceline[tensorboard]'"
    run = folder.started(tmp_path)
    folder.end(run)
    recorded = record(run)
    assert recorded.state == PENDING
    assert "which is not installed (pip install 'paceline[tensorboard]')" in recorded.message
