"""Recording into a real sqlite store."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import tracking
from pipeline.config.schema import TrackingConfig
from pipeline.core.errors import PacelineError
from pipeline.tracking import recorder
from pipeline.tracking.client import Recorder
from pipeline.tracking.destinations import DONE, RECORDING, Destination
from tests.pipeline import tracking_folder as folder
from tests.pipeline import tracking_store as store
from tests.pipeline.tracking_store import EXPERIMENT
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.slow


def finished(tmp_path: Path, **more: Any) -> Path:
    run = folder.started(tmp_path, **more)
    folder.write(run / "key.json", {"key": run.name, "data": "cd" * 32})
    folder.metrics(run, range(20))
    folder.end(run)
    return run


@pytest.mark.long
def test_a_recorder_that_is_killed_while_it_makes_the_tables_leaves_no_database_that_nobody_can_open(
    tmp_path: Path,
) -> None:
    command = tracking.prepare_command(f"sqlite:///{tmp_path}/mlflow.db")
    child = subprocess.Popen(command, cwd=store.ROOT)
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("mlflow.db.*.new")), child)
    child.kill()
    child.wait()
    assert not (tmp_path / "mlflow.db").exists()
    store.prepare(tmp_path / "mlflow.db")
    assert store.client(f"sqlite:///{tmp_path}/mlflow.db").get_experiment("0").name == "Default"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_a_finished_run_is_recorded_whole(tmp_path: Path, uri: str) -> None:
    recorded = recorder.record(finished(tmp_path), uri, EXPERIMENT)
    assert recorded.state == DONE
    (run,) = store.runs(uri)
    assert run.info.run_id == recorded.run_id
    assert run.info.status == "FINISHED"
    assert (run.info.start_time, run.info.end_time) == (int(folder.T0 * 1000), int((folder.T0 + 60) * 1000))
    assert run.info.run_name == "small_cnn digits · 0123"
    assert run.data.params["optimizer.lr"] == "0.003"
    assert run.data.tags["paceline.run_key"] == folder.KEY
    assert run.data.metrics["test/accuracy"] == 0.9
    assert [step for step, _, _ in store.history(uri, run.info.run_id, "test/accuracy")] == [0]  # a bar
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("digits", "cd" * 6)
    assert [(tag.key, tag.value) for tag in data.tags] == [("mlflow.data.context", "train")]
    expected = [(step, int((folder.T0 + step) * 1000), 1.0 / (1 + step)) for step in range(20)]
    assert store.history(uri, run.info.run_id) == expected
    top = store.artifacts(uri, run.info.run_id)
    assert {"config.json", "config.yaml", "key.json", "plan.json", "provenance.json", "summary.json"} <= set(top)
    assert store.artifacts(uri, run.info.run_id, "checkpoints") == ["checkpoints/final.json", "checkpoints/final.pt"]
    assert store.artifacts(uri, run.info.run_id, "logs") == ["logs/node0.log"]
    assert "evaluation/confusion_matrix.png" in store.artifacts(uri, run.info.run_id, "evaluation")
    assert (tmp_path / "mlartifacts").is_dir()


def test_a_figure_of_the_summary_that_ends_a_curve_is_recorded_once(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        for step, values in ((10, {"val/loss": 0.5}), (20, {"val/loss": 0.4, "test/accuracy": 0.9})):
            file.write(json.dumps({"t": folder.T0 + step, "step": step, "epoch": 0, "metrics": values}) + "\n")
    folder.summary(run, metrics={"val/loss": 0.4, "test/accuracy": 0.9})
    run_id = str(recorder.record(run, uri, EXPERIMENT).run_id)
    assert [step for step, _, _ in store.history(uri, run_id, "val/loss")] == [10, 20]
    assert [step for step, _, _ in store.history(uri, run_id, "test/accuracy")] == [0]


def test_a_second_call_does_nothing_and_needs_no_mlflow(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path)
    recorder.record(run, uri, EXPERIMENT)
    before = (run / "tracking.json").read_bytes()
    code = (
        "import sys; from pathlib import Path; from pipeline.tracking import recorder; "
        f"print(recorder.record(Path({str(run)!r}), {uri!r}, {EXPERIMENT!r}).state, 'mlflow' in sys.modules)"
    )
    assert store.python(code) == f"{DONE} False\n"
    assert (run / "tracking.json").read_bytes() == before


@pytest.mark.parametrize("lost", ["everything", "run_id"])
def test_a_replay_adds_nothing(tmp_path: Path, uri: str, lost: str) -> None:
    run = finished(tmp_path)
    first = recorder.record(run, uri, EXPERIMENT)
    if lost == "everything":
        (run / "tracking.json").unlink()
    else:  # a crash right after create_run: the token stands on disk, the run id doesn't
        state = json.loads((run / "tracking.json").read_text())
        folder.write(run / "tracking.json", {name: state[name] for name in ("uri", "experiment", "token")})
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    assert len(store.runs(uri)) == 1
    assert len(store.history(uri, str(first.run_id))) == 20
    assert len(store.client(uri).get_run(first.run_id).inputs.dataset_inputs) == 1


def test_runs_that_a_lost_answer_left_behind_are_removed(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path)
    first = recorder.record(run, uri, EXPERIMENT)
    assert first.state == RECORDING
    known = json.loads((run / "tracking.json").read_text())
    token = known["token"]
    assert not known["unsure"]
    folder.write(run / "tracking.json", {**known, "unsure": True})  # as a time-out of the creation leaves it
    client, number = store.client(uri), store.runs(uri)[0].info.experiment_id
    tags = {"paceline.run_key": folder.KEY}
    client.create_run(number, tags={**tags, "paceline.recorder": token})
    other = client.create_run(number, tags={**tags, "paceline.recorder": "someone else"})
    folder.metrics(run, range(20))
    folder.end(run)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    assert {found.info.run_id for found in store.runs(uri)} == {first.run_id, other.info.run_id}


def test_a_second_attempt_continues_the_run_without_repeating_steps(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(12))
    folder.journal(run, "FAILED", at=folder.T0 + 20)
    first = recorder.record(run, uri, EXPERIMENT)
    assert store.runs(uri)[0].info.status == "FAILED"

    (run / "metrics.jsonl").unlink()  # back to the checkpoint of step 10, then on at later times
    folder.metrics(run, range(10))
    folder.metrics(run, range(10, 20), at=folder.T0 + 100)
    folder.journal(run, "PLANNED", "RUNNING", attempt=2, at=folder.T0 + 90)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    assert store.runs(uri)[0].info.status == "RUNNING"
    folder.end(run, attempt=2)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    (only,) = store.runs(uri)
    assert only.info.status == "FINISHED"
    assert only.data.tags["paceline.attempt"] == "2"
    assert [step for step, _, _ in store.history(uri, only.info.run_id)] == list(range(20))


def test_points_whose_answer_was_lost_are_not_repeated_by_an_attempt_that_does_their_steps_again(
    tmp_path: Path, uri: str
) -> None:
    from mlflow.entities import Metric

    run = folder.started(tmp_path)
    folder.metrics(run, range(10))
    first = recorder.record(run, uri, EXPERIMENT)
    taken = [Metric("train/loss", 1.0 / (1 + step), int((folder.T0 + step) * 1000), step) for step in (10, 11, 12)]
    store.client(uri).log_batch(first.run_id, taken)  # the server took them, and tracking.json doesn't know
    folder.metrics(run, range(10, 20), at=folder.T0 + 100)
    folder.journal(run, "PLANNED", "RUNNING", attempt=2, at=folder.T0 + 90)
    folder.end(run, attempt=2)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    assert [step for step, _, _ in store.history(uri, str(first.run_id))] == list(range(20))


def test_a_curve_whose_steps_begin_anew_is_the_same_live_and_in_a_replay_and_also_after_a_kill(
    tmp_path: Path, uri: str, database: Path
) -> None:
    run = folder.started(tmp_path)
    for epoch in range(3):
        folder.logged(run, *((step, {"loss": 10.0 * epoch + step}) for step in range(-1, 4)), at=folder.T0 + 10 * epoch)
        first = recorder.record(run, uri, EXPERIMENT)  # live, with a look after each epoch
    kept = "".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:12])
    (run / "metrics.jsonl").write_text(kept)  # the checkpoint's
    folder.journal(run, "KILLED")
    folder.journal(run, "RUNNING", attempt=2)
    folder.logged(run, *((step, {"loss": 20.0 + step}) for step in range(1, 6)), at=folder.T0 + 100)
    folder.journal(run, "FINISHED", attempt=2)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    (tmp_path / "new").mkdir()
    new = f"sqlite:///{shutil.copy(database, tmp_path / 'new/mlflow.db')}"
    replayed = recorder.record(run, new, EXPERIMENT)
    found = [store.history(*to, "loss") for to in ((uri, str(first.run_id)), (new, str(replayed.run_id)))]
    points = sorted((step, 10.0 * epoch + step) for epoch in range(3) for step in range(-1, 6 if epoch == 2 else 4))
    assert [[(step, value) for step, _, value in history] for history in found] == [points, points]
    (run / "tracking.json").unlink()
    folder.journal(run, "RUNNING", attempt=3)
    recorder.record(run, new, EXPERIMENT)
    assert store.history(new, str(replayed.run_id), "loss") == found[1]


def test_metrics_whose_names_mlflow_would_make_equal_are_curves_of_their_own(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path)
    folder.logged(run, (1, {"acc@1": 0.5}), (2, {"acc_1": 7.0, "acc@1": 0.6}))
    folder.logged(run, (1 << 63, {"acc@1": 1.0}))
    folder.journal(run, "FINISHED")
    run_id = str(recorder.record(run, uri, EXPERIMENT).run_id)
    found = {key: [value for _, _, value in store.history(uri, run_id, key)] for key in ("acc_1", "acc_1_")}
    assert found == {"acc_1": [0.5, 0.6], "acc_1_": [7.0]}


def test_one_bad_parameter_does_not_cost_the_others(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path, note="first")
    first = recorder.record(run, uri, EXPERIMENT)
    config = json.loads((run / "config.json").read_text())
    folder.write(run / "config.json", {**config, "note": "second", "added": 1})
    (run / "tracking.json").unlink()
    recorder.record(run, uri, EXPERIMENT)
    data = store.client(uri).get_run(first.run_id).data
    assert (data.params["note"], data.params["added"]) == ("first", "1")
    assert data.tags["paceline.changed_params"] == "note: first → second"


def test_many_points_fields_and_odd_values_arrive(tmp_path: Path, uri: str) -> None:
    run = folder.started(tmp_path, own={f"wörd {number}=[{number}]": number for number in range(250)})
    folder.metrics(run, range(2500))
    with (run / "metrics.jsonl").open("a") as file:
        odd = {"t": folder.T0, "step": 2500, "epoch": 1, "metrics": {"train/loss": math.nan, "a=b": 1, "x": math.inf}}
        file.write(json.dumps(odd) + "\n")
        file.write("torn\n")
    folder.journal(run, "KILLED")
    recorded = recorder.record(run, uri, EXPERIMENT)
    assert recorded.state == DONE
    assert len(store.history(uri, str(recorded.run_id))) == 2501
    assert store.history(uri, str(recorded.run_id), "a_b") == [(2500, int(folder.T0 * 1000), 1.0)]
    only = store.runs(uri)[0]
    assert len([name for name in only.data.params if name.startswith("own.wörd")]) == 250
    assert only.info.status == "KILLED"
    assert only.data.tags["paceline.nonfinite"] == "train/loss: NaN at step 2500; x: infinite at step 2500"
    assert "was NaN at step 2500" in only.data.tags["mlflow.note.content"]
    assert store.history(uri, only.info.run_id, "x")[0][2] > 1e308  # MLflow has no infinity


def test_a_record_whose_database_was_removed_is_missing(tmp_path: Path, uri: str) -> None:
    run, to = finished(tmp_path), Destination(uri=uri, experiment=EXPERIMENT)
    recorder.record(run, uri, EXPERIMENT)
    assert to.is_recorded(run)
    (tmp_path / "mlflow.db").unlink()
    assert not to.is_recorded(run)


def test_later_files_are_added_to_a_finished_record(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path)
    first = recorder.record(run, uri, EXPERIMENT)
    folder.write(run / "evaluation" / "more.json", {})
    assert not Destination(uri=uri, experiment=EXPERIMENT).is_recorded(run)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    assert "evaluation/more.json" in store.artifacts(uri, str(first.run_id), "evaluation")
    assert Destination(uri=uri, experiment=EXPERIMENT).is_recorded(run)


def test_no_credentials_reach_the_artifacts(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path, tracking={"uri": "http://ann:hunter2@host"})
    recorder.record(run, uri, EXPERIMENT)
    sent = [path for path in (tmp_path / "mlartifacts").rglob("*") if path.is_file()]
    assert sent
    assert not [path for path in sent if b"hunter2" in path.read_bytes()]
    assert b"hunter2" not in (tmp_path / "mlflow.db").read_bytes()


@pytest.mark.ci
@pytest.mark.long
def test_files_that_a_script_wrote_in_its_working_directory_are_recorded_up_to_a_size(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path, program={"name": "script", "script": "a.py"})
    files = {"deep/er/model.pt": 500, "workdir/sub/results.csv": 20, "workdir/index": 30}
    for name, size in files.items():
        path = run / "outputs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff" * size)
    with (run / "outputs/workdir/model.pt").open("wb") as large:
        large.truncate(101 << 20)
    said: list[str] = []
    config: Any = SimpleNamespace(tracking=TrackingConfig(uri=uri, experiment=EXPERIMENT))
    run_id = str(Recorder(run, config, tmp_path).finish(said.append))
    sent = [
        name for top in ("deep/er", "workdir/sub", "workdir") for name in store.artifacts(uri, run_id, f"outputs/{top}")
    ]
    assert sent == [
        f"outputs/{name}" for name in ("deep/er/model.pt", "workdir/sub/results.csv", "workdir/index", "workdir/sub")
    ]
    (index,) = (tmp_path / "mlartifacts").rglob("index")
    assert index.read_bytes() == b"\xff" * 30
    assert said == [
        "note: outputs/workdir/model.pt (105.9 MB) not sent to MLflow, which gets 1,000 files and 100 MiB of "
        "outputs/workdir: program.outputs=['GLOB'] sends what it names"
    ]


def test_a_deleted_run_is_recorded_anew(tmp_path: Path, uri: str) -> None:
    run = finished(tmp_path)
    first = recorder.record(run, uri, EXPERIMENT)
    store.client(uri).delete_run(first.run_id)
    (run / "config.yaml").write_text("seed: 0  # touched\n")
    second = recorder.record(run, uri, EXPERIMENT)
    assert second.run_id != first.run_id
    assert len(store.history(uri, str(second.run_id))) == 20


def test_asked_to_check_it_finds_out_that_the_store_is_a_new_one(tmp_path: Path, uri: str, database: Path) -> None:
    run = finished(tmp_path)
    first = recorder.record(run, uri, EXPERIMENT)
    assert recorder.record(run, uri, EXPERIMENT, check=True).run_id == first.run_id
    assert len(store.history(uri, str(first.run_id))) == 20
    shutil.copy(database, tmp_path / "mlflow.db")
    again = recorder.record(run, uri, EXPERIMENT, check=True)
    assert (again.state, [found.info.run_id for found in store.runs(uri)]) == (DONE, [again.run_id])
    assert len(store.history(uri, str(again.run_id))) == 20


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(PacelineError, match=r"config\.json is missing"):
        recorder.record(tmp_path, uri, EXPERIMENT)


@pytest.mark.ci
@pytest.mark.long
def test_recorders_that_begin_at_once_share_a_fresh_database(tmp_path: Path) -> None:
    """One of them in this process, which has imported mlflow: they all come to the tables at nearly the same time."""
    uri = tracking.absolute_uri(None, tmp_path)
    keys = [f"{number:012x}" for number in range(4)]
    own, *theirs = (finished(tmp_path / key, key=key) for key in keys)
    recorders = [store.spawn(run, uri, follow=False, env=dict(os.environ)) for run in theirs]
    assert recorder.record(own, uri, EXPERIMENT).state == DONE
    for process in recorders:
        _, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
    assert sorted(run.data.tags["paceline.run_key"] for run in store.runs(uri)) == keys
    assert all(len(store.history(uri, run.info.run_id)) == 20 for run in store.runs(uri))


def test_a_pruned_run_is_killed_in_mlflow_with_its_state_as_a_tag_and_finished_once_it_went_on(
    tmp_path: Path, uri: str
) -> None:
    run = folder.started(tmp_path)
    folder.metrics(run, range(12))
    folder.journal(run, "PRUNED", at=folder.T0 + 20)
    first = recorder.record(run, uri, EXPERIMENT)
    (only,) = store.runs(uri)
    assert (only.info.status, only.data.tags["paceline.state"]) == ("KILLED", "PRUNED")
    folder.journal(run, "PLANNED", "RUNNING", attempt=2, at=folder.T0 + 90)
    folder.metrics(run, range(12, 20), at=folder.T0 + 100)
    folder.end(run, attempt=2)
    assert recorder.record(run, uri, EXPERIMENT).run_id == first.run_id
    (only,) = store.runs(uri)
    assert (only.info.status, only.data.tags["paceline.state"]) == ("FINISHED", "FINISHED")
