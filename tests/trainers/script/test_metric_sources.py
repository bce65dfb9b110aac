"""Metrics as scripts write them, and what becomes of them in metrics.jsonl."""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from trainers.script.metrics import sources
from trainers.script.metrics.metrics_file import MetricsFile, Row
from trainers.script.metrics.recorder import Recorder
from trainers.script.metrics.sources import CsvTables, EventFiles, JsonLines, Logged, PatternLines, WatchedFiles
from trainers.script.metrics.tensorboard import EventFile, Scalar
from trainers.script.settings import ScriptConfig


def _told(rows: Iterable[Row]) -> list[tuple[int, int | None, dict[str, float]]]:
    return [(row.step, row.epoch, row.metrics) for row in rows]


def _file(folder: Path, *, attempt: str = "", resumes: bool = False) -> MetricsFile:
    aside = folder / "attempts/2/before/metrics.jsonl"
    return MetricsFile(folder / "metrics.jsonl", aside=aside, say=print, attempt=attempt, resumes=resumes)


def _losses(path: Path) -> list[float]:
    return [json.loads(line)["metrics"]["loss"] for line in path.read_text().splitlines()]


def _looked(source: CsvTables | EventFiles | JsonLines, *, last: bool) -> Iterator[Row]:
    source._watched.refresh(last=last)
    return source.rows(last=last)


def test_json_lines_with_a_step_are_metrics_and_half_a_line_waits(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "logs" / "new.jsonl"
    old.write_text('{"step": 1, "loss": 9}\n')
    source = JsonLines(WatchedFiles(tmp_path))
    new.parent.mkdir()
    new.write_text('{"step": 1, "loss": 2, "epoch": 1, "name": "a", "ok": true}\n{"step": 2.0, "lo')
    assert _told(_looked(source, last=False)) == [(1, 1, {"loss": 2.0})]
    with new.open("a") as file:
        file.write('ss": 1.5, "epoch": 0.5}\n[1]\n{"loss": 3}\n{"step": 1.5, "x": 1}\nno JSON\n{"step": 3, "loss": 1}')
    assert _told(_looked(source, last=False)) == [(2, None, {"loss": 1.5, "epoch": 0.5})]
    assert _told(_looked(source, last=True)) == [(3, None, {"loss": 1.0})]
    assert _told(_looked(source, last=True)) == []
    assert list(source.notes) == ["logs/new.jsonl: a line of it is no JSON and was left out"]


def test_json_lines_may_have_an_epoch_instead_of_a_step_and_objects_within(tmp_path: Path) -> None:
    source = JsonLines(WatchedFiles(tmp_path))
    lines = [{"Epoch": 2, "train": {"loss": 3, "name": "a"}, "val": {"loss": 4}}, {"global_step": 7, "acc": 0.5}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert _told(_looked(source, last=True)) == [(2, 2, {"train/loss": 3, "val/loss": 4}), (7, None, {"acc": 0.5})]


def test_a_name_that_two_files_give_is_told_apart(tmp_path: Path) -> None:
    source = JsonLines(WatchedFiles(tmp_path))
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert [row.metrics for row in _looked(source, last=True)] == [{"loss": 2.0}, {"val/loss": 2.0}]


def test_event_files_of_further_folders_carry_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PAUSE_FACTOR", 0.0)  # on busy cores the first listing may take long
    (tmp_path / "events.out.tfevents.0.old").write_bytes(WRITTEN)
    source = EventFiles(WatchedFiles(tmp_path))
    for folder, name in (("tb/train", "1"), ("tb/val", "2"), ("tb/val/deep", "3")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"events.out.tfevents.{name}").write_bytes(WRITTEN)
    names = [name for row in _looked(source, last=False) for name in row.metrics if name.endswith("acc")]
    assert names == ["acc", "val/acc", "val/deep/acc"]
    assert list(_looked(source, last=True)) == []


def test_of_lightnings_scalars_the_epoch_is_no_metric_and_its_placeholder_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "events.out.tfevents.0").write_bytes(b"")
    scalars = [Scalar(1.0, 0, "hp_metric", -1.0), Scalar(2.0, 9, "epoch", 3.0), Scalar(2.0, 9, "val_acc", 0.5)]
    monkeypatch.setattr(EventFile, "scalars", lambda _: iter([*scalars, Scalar(3.0, 9, "hp_metric", 0.5)]))
    assert _told(_looked(EventFiles(WatchedFiles(tmp_path, earlier={})), last=False)) == [
        (9, 3, {"val_acc": 0.5}),
        (9, None, {"hp_metric": 0.5}),
    ]


def test_a_folder_called_like_event_files_and_a_file_that_goes_end_nothing(tmp_path: Path) -> None:
    source, path = EventFiles(WatchedFiles(tmp_path)), tmp_path / "tfevents" / "events.out.tfevents.1"
    path.parent.mkdir()
    path.write_bytes(WRITTEN)
    assert len([*_looked(source, last=False)]) > 0
    file = EventFile(path)
    path.unlink()
    assert [*file.scalars()] == []


def test_half_a_line_of_paceline_log_is_left_out_and_told(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"t": 1, "st{"t": 2, "step": 2, "metrics": {"loss": 1}}\n' * 2)
    with (tmp_path / "log").open("a") as file:
        file.write('{"t": 3, "step": 3, "metrics": {"loss": 0.5}}\n')
    source = Logged(tmp_path / "log", lambda: None)
    assert _told(source.rows(last=True)) == [(3, None, {"loss": 0.5})]
    assert [*source.notes] == ["a line of paceline.log breaks off and was left out"]


def test_lines_of_rank_0_are_searched_for_the_pattern(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        folder = tmp_path / "k_x" / "attempt_0" / rank
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"loss=1,000.5 lr=1e-3\r 50%| loss={rank}.25 lr=a\rloss=nan\n loss=7")
    source = PatternLines(r"loss=(?P<loss>\S+)(?: lr=(?P<lr>\S+))?", tmp_path)
    rows = [*source.rows(last=False)]
    assert [(row.step, sorted(row.metrics)) for row in rows] == [(1, ["loss", "lr"]), (2, ["loss"]), (3, ["loss"])]
    assert [row.metrics["loss"] for row in rows[:2]] == [1000.5, 0.25]
    assert _told(source.rows(last=True)) == [(4, None, {"loss": 7.0})]
    stepped = PatternLines(r"(?P<epoch>1),000.5 lr=(?P<lr>1e-(?P<step>3))|(?P<x>7)", tmp_path)
    assert _told(stepped.rows(last=True)) == [(3, 1, {"lr": 1e-3}), (2, None, {"x": 7.0})]


def test_what_is_not_finite_is_left_out_and_noted(tmp_path: Path) -> None:
    file = _file(tmp_path, attempt="k-1")
    for row in (
        Row(time_s=1.5, step=1, metrics={"a": 1.0, "b": float("nan")}, epoch=2),
        Row(time_s=2, step=2, metrics={"b": float("inf")}),
    ):
        file.append(row)
    written = (tmp_path / "metrics.jsonl").read_text()
    same = {"t": 1.5, "step": 1, "epoch": 2, "metrics": {"a": 1.0}, "attempt": "k-1", "doing": "training"}
    assert written == json.dumps(same) + "\n"
    assert [(name, str(some.first), some.step, some.count) for name, some in file.left_out.items()] == [
        ("b", "nan", 1, 2)
    ]
    assert (file.step, file.last) == (1, {"a": 1.0})


def test_a_step_that_no_tracker_keeps_is_left_out_and_noted(tmp_path: Path) -> None:
    settings = ScriptConfig(script="a.py")
    (tmp_path / "work/node0").mkdir(parents=True)
    recorder = Recorder(
        settings,
        tmp_path,
        logged=tmp_path / "log",
        log_dir=None,
        attempt="k-1",
        resumes=False,
        aside=tmp_path / "before.jsonl",
        say=print,
    )
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/x.jsonl").write_text('{"step": 1e300, "loss": 1}\n{"step": 7, "loss": 2, "": 3}\n')
    recorder.look(last=True)
    assert (recorder.metrics.step, recorder.metrics.last) == (7, {"loss": 2.0})
    assert recorder.notes(ended_well=True) == ["metrics of a step of more than 64 bits were not recorded: step 1e+300"]


def test_what_no_terminal_shows_of_a_name_is_written_out(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.append(Row(time_s=0, step=1, metrics={"a\nb": 1.0, "\x1b[31mred": 2.0, "val/größe": 3.0, "n\r": math.nan}))
    assert file.last == {"a\\nb": 1.0, "\\x1b[31mred": 2.0, "val/größe": 3.0}
    assert [*file.left_out] == ["n\\r"]


def test_a_pipe_and_a_link_to_nowhere_end_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("gone.jsonl", "tfevents.gone"):
        (tmp_path / name).symlink_to("nowhere")
    assert [
        *JsonLines(WatchedFiles(tmp_path)).rows(last=True),
        *EventFiles(WatchedFiles(tmp_path)).rows(last=True),
    ] == []


@pytest.mark.parametrize(
    ("resumes", "begun", "stays"), [(True, 0, [0, 1, 2, 3, 4, 5]), (False, 0, []), (False, 1, [0, 1, 2, 3, 4, 5, 6])]
)
def test_of_steps_that_are_counted_anew_earlier_epochs_stay_unless_the_script_may_start_over(
    tmp_path: Path, resumes: bool, begun: int, stays: list[float]
) -> None:
    """One that was told no checkpoint may start over with step 0, as the run did, and not with step 1."""
    first = _file(tmp_path, attempt="k-1")
    for at, step in enumerate([0, 1, 2, 0, 1, 2, 0, 1]):  # the third epoch is cut short
        first.append(Row(time_s=float(at), step=step, metrics={"loss": float(at), "lr": 0.1}))
    second = _file(tmp_path, attempt="k-2", resumes=resumes)
    for step in range(begun, 3):
        second.append(Row(time_s=10.0 + step, step=step, metrics={"loss": 10.0 + step}))
    assert _losses(tmp_path / "metrics.jsonl") == [*stays, *range(10 + begun, 13)]
    assert _losses(tmp_path / "attempts/2/before/metrics.jsonl") == [*range(len(stays), 8)]


def test_a_metric_whose_rows_come_later_than_another_s_is_replaced_from_its_own_first_step(tmp_path: Path) -> None:
    """TensorBoard writes to its file each 120 s. What one attempt logged of an epoch's end stays for earlier epochs."""
    first = _file(tmp_path)
    for epoch in (1, 2):
        for step in range(4 if epoch == 1 else 3):
            first.append(Row(time_s=epoch, step=step, metrics={"loss": epoch * 10.0 + step}))
        if epoch == 1:
            first.append(Row(time_s=epoch, step=3, metrics={"val": 1.0}))
    second = _file(tmp_path, resumes=True)
    for step, name in ((2, "lr"), (1, "loss"), (2, "loss"), (3, "loss"), (3, "val")):
        second.append(Row(time_s=3, step=step, metrics={name: step + 0.5}))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    of_loss = [row["metrics"]["loss"] for row in rows if "loss" in row["metrics"]]
    assert of_loss == [10, 11, 12, 13, 20, 1.5, 2.5, 3.5]
    assert [row["metrics"]["val"] for row in rows if "val" in row["metrics"]] == [1, 3.5]
    assert _losses(tmp_path / "attempts/2/before/metrics.jsonl") == [21, 22]
    assert (second.step, second.last["loss"]) == (3, 3.5)


def test_a_later_epoch_is_no_start_over_though_its_steps_begin_anew(tmp_path: Path) -> None:
    first = _file(tmp_path)
    for epoch, step in ((1, 0), (1, 1), (2, 0)):
        first.append(Row(time_s=0, step=step, epoch=epoch, metrics={"loss": epoch * 10.0 + step}))
    _file(tmp_path).append(Row(time_s=1, step=0, epoch=2, metrics={"loss": 20.5}))
    assert _losses(tmp_path / "metrics.jsonl") == [10, 11, 20.5]


def test_tables_with_steps_or_epochs_are_metrics_wherever_the_script_writes_them(tmp_path: Path) -> None:
    run, work = tmp_path / "outputs", tmp_path / "work"
    for folder in (run, work / "data", work / "lightning_logs/version_0"):
        folder.mkdir(parents=True)
    (work / "data" / "labels.csv").write_text("step,label\n1,7\n")
    source = CsvTables(WatchedFiles(run, work))
    (run / "summary.csv").write_text("epoch,train_loss,eval_top1,time\n0,2.5,11,12:30\n1,1.5,")
    (work / "answers.csv").write_text("image,label\n1,7\n")
    metrics = work / "lightning_logs/version_0/metrics.csv"
    metrics.write_text("epoch,step,loss\n0,10,0.5\n0,20,nan\n")
    rows = [*_looked(source, last=False)]
    assert _told(rows[:2]) == [(0, 0, {"train_loss": 2.5, "eval_top1": 11.0}), (10, 0, {"loss": 0.5})]
    assert math.isnan(rows[2].metrics["loss"])
    metrics.write_text("epoch,step,loss,val_loss\n0,10,0.5,\n0,20,nan,\n1,30,,0.25\n")
    assert _told(_looked(source, last=True)) == [(1, 1, {"train_loss": 1.5}), (30, 1, {"val_loss": 0.25})]


def test_a_line_that_is_no_row_of_a_table_is_left_out(tmp_path: Path) -> None:
    source = CsvTables(WatchedFiles(tmp_path))
    (tmp_path / "of_a_mac.csv").write_bytes(b"step,loss\r1,2\r\n2,3\n")
    (tmp_path / "log.csv").write_bytes(b"step,loss\n1,3\n2,\r4\n3," + b"5" * 200_000 + b"\n4,6\n")
    assert _told(_looked(source, last=False)) == [(1, None, {"loss": 3.0}), (4, None, {"loss": 6.0})]


# add_scalar, add_text, a scalar as TensorProto of each kind, a vector, a NaN
WRITTEN = zlib.decompress(
    base64.b85decode(
        b"c-oU-fPlsI-b$Pu@9WMSJ8;WUiZ`h!F*8rkwJbHS#L8%yL-$Mts5;HJD+4&eEP+S|0Y)uhE<rA?5|C>Boc!WqQJ{o<q5Ql|E2w&*sjnVE)H{IH"
        b">vCyx3FhUOr0SQXR+PjSm*(as7F9a&aIg!p2r+RmIx%HrdU0^Eaj}5p@2%rJs01~sLeTav#3TivN&o&s0izZV7Z(?EVsbLjZU=ilnMb<nP#wD;Z"
        b"ghj_XaMS9){^3q;NmGs%`46?(of6DPb_ib;9%5Z0ZQ9lFc!_wfol7*?u;w4HhC^tE?%g%l>E}9oK&E5nUpvns(;wW=KmGchU#sTKJ1OGSB^^t7("
        b"5WYnRz8nd>ouXTtDG%SO4o#PK>o>smUezML=sAwKzb|1%>jhq>v4AP`x+r2pK{29sufX009L^xa1|~0mJ1$y~3u9766q&eGC"
    )
)
FINITE = [
    Scalar(100.25, 1, "train/loss", 0.5),
    Scalar(100.5, -2, "acc", 0.75),
    Scalar(102.0, 3, "tensor/float", 0.25),
    Scalar(102.0, 3, "tensor/double", 1.5),
    Scalar(102.0, 3, "tensor/int", -7.0),
]


def test_scalars_are_read_once_however_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.touch()
    file, found = EventFile(path), []
    for end in range(0, len(WRITTEN) + 1, 7):
        path.write_bytes(WRITTEN[:end])
        found += file.scalars()
    path.write_bytes(WRITTEN)
    found += file.scalars()
    last = found.pop()
    assert found == FINITE
    assert (last.time_s, last.step, last.tag, math.isnan(last.value)) == (103.0, 1 << 40, "nan", True)
    assert (list(file.scalars()), file.damage) == ([], "")


def test_a_damaged_file_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    at = WRITTEN.index(b"train/loss") + 100  # the length of a later record
    at = WRITTEN.rindex(b"\0\0\0\0\0\0", 0, WRITTEN.index(b"tensor/float"))
    path.write_bytes(WRITTEN[:at] + b"\1" + WRITTEN[at + 1 :])
    file = EventFile(path)
    assert list(file.scalars()) == FINITE[:2]
    assert file.damage.startswith("its record at byte ")
    assert list(file.scalars()) == []
