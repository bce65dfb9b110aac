"""Metrics in the lines of scripts that report none in another way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainers.script.runs import ScriptRun
from trainers.contract import run_folder
from trainers.script.metrics.printed import keep_lines, parse_line

pytestmark = pytest.mark.slow

MNIST = """
for epoch in (1, 2):
    for at in (0, 640):
        print(f"Train Epoch: {epoch} [{at}/1280 ({at / 12.8:.0f}%)]\\tLoss: {1 / (epoch + at):.4f}")
    print(f"\\nTest set: Average loss: {0.5 / epoch:.4f}, Accuracy: {90 + epoch}/100 ({90 + epoch}%)")
"""
LOGS_TOO = "import paceline\npaceline.log(1, loss=1.0)\nprint('accuracy: 0.5')\n"


@pytest.mark.parametrize(
    ("line", "metrics", "place"),
    [
        ("loss: 0.31", {"loss": 0.31}, (None, None, None)),
        ("epoch 3 | val_acc=0.91", {"val_acc": 0.91}, (3, None, None)),
        ("Last reward: 9.0\tAverage reward: 9.0", {"last_reward": 9, "average_reward": 9}, (None, None, None)),
        ("total loss: 0.3 loss: 0.1", {"total_loss": 0.3, "loss": 0.1}, (None, None, None)),
        ("{'loss': 0.3142, 'learning_rate': 1e-05, 'epoch': 0.5}", {"loss": 0.3142}, (1, None, None)),
        ("{'eval_loss': 0.25, 'epoch': 2}", {"eval_loss": 0.25}, (2, None, None)),
        ("Epoch [3/10], Step [100/600], Loss: 0.45", {"loss": 0.45}, (3, 100, 600)),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.925", {"train/loss": 0.925}, (1, 640, 60000)),
        ("Accuracy of the network on the 10,000 test images: 16.5 %", {"test/accuracy": 16.5},
         (None, None, None)),
        ("Test set: Average loss: 0.0282, Accuracy: 9908/10000 (99%)", {"test/loss": 0.0282, "test/accuracy": 0.9908},
         (None, None, None)),
        ("iter 10: loss 3.2123, time 12.22ms, mfu 1.2%", {"loss": 3.2123}, (None, 10, None)),
        ("step 0: train loss 4.2, val loss 4.3", {"train/loss": 4.2, "val/loss": 4.3}, (None, 0, None)),
        ("Epoch 1:  45%|####  | 45/100 [00:03<00:04, 12.30it/s, loss=0.31]", {"loss": 0.31}, (1, 45, 100)),
        ("│         test_acc          │    0.9134    │", {"test_acc": 0.9134}, (None, None, None)),
        ("[Epoch 5] train_loss 0.23 val_loss 0.25", {"train_loss": 0.23, "val_loss": 0.25}, (5, None, None)),
        ("\x1b[1mLoss\x1b[0m: \x1b[32m0.31\x1b[0m", {"loss": 0.31}, (None, None, None)),
        ("{'loss': '0.3115', 'epoch': '2'}", {"loss": 0.3115}, (2, None, None)),
        ("{'loss': 0.3, 'epoch': 2, 'step': 40}", {"loss": 0.3}, (2, 40, None)),
        ("{'eval_loss': '4.03', 'epoch': '1.071'}", {"eval_loss": 4.03}, (2, None, None)),
        ("loss: tensor(0.31, device='cuda:0', grad_fn=<Nll>)", {"loss": 0.31}, (None, None, None)),
        ("Epoch: [0][ 10/5005]\tLoss 6.9e+00 (7.0)\tAcc@1 76.13 (75.0)", {"loss": 6.9, "acc@1": 76.13}, (0, 10, 5005)),
        ("ema_acc 0.91 smooth_loss 1.5", {"ema_acc": 0.91, "smooth_loss": 1.5}, (None, None, None)),
        ("Best acc: 0.91, acc: 0.85", {"best_acc": 0.91, "acc": 0.85}, (None, None, None)),
        ("Total loss: 0.5  cls loss: 0.2  f1 score: 0.8", {"loss": 0.5, "cls_loss": 0.2, "f1_score": 0.8}, (None,) * 3),
        ("loss: 1,234.5", {"loss": 1234.5}, (None, None, None)),
        ("loss: 0,31 loss: 3/4 score: 12:30 map: 2024-01-01 losses: 1,2,3", {}, (None, None, None)),  # no wrong number
        ("loss 0.5 then loss 0.4; precision: 16; map 3 workers", {}, (None, None, None)),
        ("val acc: 100%|####| 40/40 [00:00<00:00]", {}, (None,) * 3),  # a bar of that name
        ("Epoch 3: val acc 0.6 (best val acc 0.9)", {"val/acc": 0.6, "val/best_acc": 0.9}, (3, None, None)),
        ("Test: [ 3/50]\tLoss 4.1e+00 (4.2)\tAcc@1 43.00 (42.0)", {"test/loss": 4.1, "test/acc@1": 43.0}, (None,) * 3),
        ("[0/25][17/600] Loss_D: 1.5 Loss_G: 3.5", {"loss_d": 1.5, "loss_g": 3.5}, (0, 17, 600)),
        ("[Epoch 1/5] [Batch 3/99] [D loss: 0.5] [G loss: 0.7]", {"d_loss": 0.5, "g_loss": 0.7}, (1, 3, 99)),
        ("| epoch   1 |     5/   29 batches | ms/batch 12 | loss  7.61 | ppl  2017.5", {"loss": 7.61, "ppl": 2017.5},
         (1, 5, 29)),
        ("Epoch: [0]  [4/8]  loss: 2.30 (2.31)  acc1: 12.50 (12.50)", {"loss": 2.3, "acc1": 12.5}, (0, 4, 8)),
        ("src/loss.py:12: UserWarning: x", {}, (None, None, None)),
        ("Namespace(lr=0.1, loss=2.0)", {}, (None, None, None)),
        ("lr_decay_iters = 400 warmup_lr: 1e-6", {}, (None,) * 3),
        ("grad_acc: 4 acc_steps=4 map_size=1024 loss_scale: 2.0 acc: 5/0 lr: 0.1 acc 0.5 -> 0.6", {}, (None,) * 3),
        ("saved epoch=3-val_loss=0.31.ckpt", {}, (3, None, None)),
        ("took 3.2 s, 12 images/s; score_file=3.txt; 2 errors", {}, (None, None, None)),
        ("Loading checkpoint: loss function 3, map of 2 hosts", {}, (None, None, None)),
    ],
)  # fmt: skip
def test_a_line_shows_metrics_and_where_they_stand(
    line: str, metrics: dict[str, float], place: tuple[int | None, int | None, int | None]
) -> None:
    found = parse_line(line)
    assert (dict(found.metrics), (found.epoch, found.step, found.steps_in_epoch)) == (metrics, place)


@pytest.mark.parametrize("part", ["a", "loss: ", "1,111"])
def test_a_line_of_any_length_is_read_once(part: str) -> None:
    assert len(parse_line((part * 4_000)[:3_999]).metrics) == 0
    assert parse_line(part * 1_000_000).metrics == {}


def test_a_script_that_only_prints_has_them_recorded_at_steps_that_grow(run: ScriptRun) -> None:
    run.write(MNIST, torchrun=False)
    said = run.start("python3", f"--log-dir={run.path}/ranks")
    assert "note: it reported no metric, so those that it printed are recorded: " in said
    assert "train/loss, test/loss, test/accuracy (program.metrics=off leaves them)" in said
    steps = [step for step, _ in run.rows()]
    assert steps == sorted(steps)
    assert run.rows()[-1][1] == {"test/loss": 0.25, "test/accuracy": 0.92}


def test_whole_epochs_of_a_line_that_tells_no_step_are_its_steps(run: ScriptRun) -> None:
    run.write("for epoch in (1, 2, 3): print({'loss': 1 / epoch, 'epoch': epoch})", torchrun=False)
    run.start("python3", f"--log-dir={run.path}/ranks")
    assert [step for step, _ in run.rows()] == [1, 2, 3]


IMAGENET = """
for epoch in (0, 1, 2):
    print(f"Epoch: [{epoch}][1/1]\\tLoss {9 - epoch:.1f} (9.0)\\tAcc@1 18.00 (25.00)")
    print(f"Test: [1/2]\\tLoss {4 - epoch:.1f} (4.0)\\tAcc@1 10.00 (10.00)")
    print(f" *   Acc@1 4{epoch}.000")
"""


def test_a_line_with_a_star_sums_up_the_evaluation_before_it_and_epochs_of_one_line_are_steps(run: ScriptRun) -> None:
    run.write(IMAGENET, torchrun=False)
    run.start("python3", f"--log-dir={run.path}/ranks")
    assert [step for step, _ in run.rows()] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [metrics for _, metrics in run.rows()][-3:] == [
        {"loss": 7.0, "acc@1": 18.0},
        {"test/loss": 2.0, "test/acc@1": 10.0},
        {"test/acc@1": 42.0},
    ]


@pytest.mark.parametrize(("script", "settings"), [(LOGS_TOO, {}), (MNIST, {"metrics": "off"})])
def test_what_is_printed_is_left_where_a_script_reports_or_it_is_switched_off(
    run: ScriptRun, script: str, settings: dict[str, Any]
) -> None:
    run.write(script, torchrun=False, **settings)
    assert "are recorded" not in run.start("python3", f"--log-dir={run.path}/ranks")
    assert "accuracy" not in str(run.rows())


FROM_3 = 'for epoch in (3, 4): print(f"epoch {epoch} loss: {1 / epoch:.2f}")\nprint("Test set: accuracy: 0.9")\n'
FROM_1 = FROM_3.replace("(3, 4)", "(1, 2)")
BY_STEP = 'for step in (30, 40): print(f"step {step}: train loss {1 / step:.3f}")\n'
COUNTED = "print('loss: 0.3')\n"


@pytest.mark.parametrize(
    ("killed", "again", "steps", "note"),
    [
        ([["epoch 1 loss: 1.0", "Test set: accuracy: 0.5", "epoch 2 loss: 0.5", "epoch 3 loss: 0.9"]], FROM_3,
         [1, 1, 2, 3, 4, 4], "note: 3 rows that earlier attempts printed stand before them\n"),
        ([["epoch 1 loss: 1.0", "epoch 2 loss: 0.8"], ["epoch 2 loss: 0.5", "epoch 3 loss: 0.4"]], FROM_3,
         [1, 2, 3, 4, 4], "note: 2 rows that earlier attempts printed stand before them\n"),
        ([["step 20: train loss 8.5", "step 30: train loss 8.1"]], BY_STEP,
         [20, 30, 40], "note: 1 row that earlier attempts printed stands before them\n"),
        ([["epoch 1 loss: 1.0", "epoch 2 loss: 0.8"]], FROM_1, [1, 2, 2], "what earlier attempts printed stands in "),
        ([["step 20: train loss 8.5", "step 30: train loss 8.1"]], "print('train acc: 0.9')\n",
         [20, 30, 30], "note: 2 rows that earlier attempts printed stand before them\n"),
        ([["step 20: train loss 8.5", "step 30: train loss 8.1", "train acc: 0.8"], ["train acc: 0.9"]],
         "print('train acc: 0.9')\n",
         [20, 30, 30], "note: 2 rows that earlier attempts printed stand before them\n"),
        ([["loss: 1.0", "loss: 0.8"]], COUNTED, [1], "what earlier attempts printed stands in their logs alone"),
        ([["other_loss: 1.0"]], COUNTED, [1], "what earlier attempts printed stands in their logs alone"),
    ],
)  # fmt: skip
def test_what_attempts_printed_that_were_killed_stays_up_to_the_place_where_the_next_one_goes_on(
    run: ScriptRun, killed: list[list[str]], again: str, steps: list[int], note: str
) -> None:
    run.write(again, torchrun=False)
    for number, lines in enumerate(killed, 1):
        log = run.path / "attempts" / str(number) / "node0.log"
        log.parent.mkdir(parents=True)
        others = f"1 | loss: 7.0\n- | epoch 9 loss: 7.0\n0 | epoch 9 loss: 7.0{run_folder.UNFINISHED}\n"
        log.write_text("".join(f"0 | {line}\n{others}" for line in lines))
    keep_lines(run.path, {number: 1.0 for number, _ in enumerate(killed, 1)})
    said = run.start("python3", f"--log-dir={run.path}/ranks", env={"PACELINE_NODE": "k-2-ab:0"})
    assert note in said
    assert [step for step, _ in run.rows()] == steps
    assert 7.0 not in [value for _, metrics in run.rows() for value in metrics.values()]


TRAINER = """
import json, pathlib
for step in range(START, 8, 2):
    print({"loss": f"{1 / step:.3f}", "epoch": f"{step / 4:g}"})
    folder = pathlib.Path(f"out/checkpoint-{step}")
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": step / 4}))
print({"train_runtime": "1.2", "train_loss": "0.3", "epoch": "1.5"})
"""


def test_lines_of_transformers_have_the_steps_that_its_checkpoints_tell_and_earlier_ones_stay(run: ScriptRun) -> None:
    run.write(TRAINER.replace("START", "4"), torchrun=False)
    log = run.path / "attempts" / "1" / "node0.log"
    log.parent.mkdir(parents=True)
    log.write_text("0 | {'loss': '9.0', 'epoch': '0.5'}\n0 | {'loss': '8.0', 'epoch': '1.25'}\n")
    keep_lines(run.path, {1: 1.0})
    said = run.start("python3", f"--log-dir={run.path}/ranks", env={"PACELINE_NODE": "k-2-ab:0"})
    assert "note: 1 row that earlier attempts printed stands before them\n" in said
    assert run.rows() == [(2, {"loss": 9.0}), (4, {"loss": 0.25}), (6, {"loss": 0.167}), (6, {"train_loss": 0.3})]
