import math
from pathlib import Path

import pytest
import torch

from tests.trainers.tiny_runs import metrics_lines
from trainers.core.errors import TrainerError
from trainers.distributed.process_group import RankContext
from trainers.distributed.ranks import Ranks
from trainers.training.loss import Losses, Reading
from trainers.training.progress import MetricsFile, Throughput

ALONE = RankContext(ranks=Ranks(), device=torch.device("cpu"), backend="gloo")


def write_lines(path: Path) -> list[str]:
    """Four lines; what the file said after each of them."""
    file, texts = MetricsFile(path), []
    for step in (2, 4, 4, 6):
        file.write(step, 1, {"train/loss": 0.5}, doing="training")
        texts.append(file.text)
    file.close()
    return texts


def test_lines_after_the_checkpoint_and_a_torn_last_one_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    texts = write_lines(path)
    with path.open("a") as raw:
        raw.write('{"t": 1, "st')
    for kept in (3, 2):
        file = MetricsFile(path, texts[kept])
        file.close()
        assert (path.read_text(), file.text, file.damage) == (texts[kept], texts[kept], "")
    assert [line["step"] for line in metrics_lines(tmp_path)] == [2, 4, 4]


@pytest.mark.parametrize("garbage", [b"\0" * 80, b"\xff", b"[1]", b"null", b'{"step": 4}', b"{" * 100_000, b""])
@pytest.mark.parametrize("number", [1, 2])
def test_damage_is_said_and_the_checkpoint_brings_them_back(tmp_path: Path, garbage: bytes, number: int) -> None:
    path = tmp_path / "metrics.jsonl"
    known = write_lines(path)[2]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = garbage + b"\n"
    path.write_bytes(b"".join(lines))
    file = MetricsFile(path, known)
    file.write(7, 2, {"train/loss": 0.5}, doing="training")
    file.close()
    assert file.damage == "metrics.jsonl was damaged; all that the checkpoint knows is there again"
    assert path.read_text() == file.text
    assert [line["step"] for line in metrics_lines(tmp_path)] == [2, 4, 4, 7]


@pytest.mark.parametrize("garbage", [b"\0" * 80 + b"\n", b'{"step": null}\n[1, 2\n', b"x"])
def test_lines_that_somebody_damaged_meanwhile_are_whole_at_the_end(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write(step, 1, {"train/loss": 0.5}, doing="training")
        with path.open("r+b") as raw:
            raw.seek(40)
            raw.write(garbage)
    assert file.close().endswith("was damaged; all that was written is there again")
    assert path.read_text() == file.text
    assert [line["step"] for line in metrics_lines(tmp_path)] == [1, 2, 3]


def test_lines_that_are_gone_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    known = write_lines(path)[3]
    path.unlink()
    file = MetricsFile(path, known)
    file.close()
    assert path.read_text() == known
    assert file.damage == "metrics.jsonl was damaged; all that the checkpoint knows is there again"


def test_the_mean_loss_is_over_the_steps_since_the_last_read() -> None:
    losses = Losses(ALONE, 4)
    for value in (1.0, 2.0):
        losses.add(torch.tensor(value))
    assert losses.read(2) == Reading(loss=1.5, steps=2, checkpoint_requested=False, stop_requested=False)
    losses.add(torch.tensor(7.0))
    losses.request()
    assert losses.read(3) == Reading(loss=7.0, steps=1, checkpoint_requested=True, stop_requested=False)
    losses.add(torch.tensor(1.0))
    assert losses.read(4).checkpoint_requested is False


def test_skipped_losses_are_left_out_of_the_mean() -> None:
    losses = Losses(ALONE, 4)
    for value in (1.0, math.nan, 3.0):
        losses.add(torch.tensor(value))
    assert losses.read(3, skip_nonfinite=True).loss == 2.0


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_names_its_step_and_rank(value: str) -> None:
    losses = Losses(ALONE, 4)
    for item in (1.0, float(value), 2.0):
        losses.add(torch.tensor(item))
    with pytest.raises(TrainerError, match=f"the training loss is {value} at step 12 on rank 0"):
        losses.read(13)


def test_throughput_is_the_median_over_steps_without_the_first_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 101.0, 103.0, 107.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    speed = Throughput(global_batch_size=10)
    rates = [speed.interval(steps) for steps in (1, 8, 2, 2)]
    assert rates == [0.1, 80.0, 10.0, 5.0]
    assert speed.median() == 80.0
