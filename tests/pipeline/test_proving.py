"""What makes a killed run come out otherwise, told from its checkpoints and metrics; and when it is killed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.core.specs import State
from pipeline.keys.content_key import Difference
from pipeline.reproduction import culprits, proving
from pipeline.reproduction.compare import Verdict, is_time
from pipeline.reproduction.culprits import (
    OPTIMIZER,
    RANDOM,
    SCHEDULE,
    Code,
    Culprit,
    Evidence,
    Kill,
    state_kinds,
    tensors_in,
)
from pipeline.reproduction.proving import Moments, Proof, draw_moments, saved_s
from pipeline.runs import journal
from pipeline.runs.folder import RunFolder
from pipeline.runs.script_attempts import ScriptAttempts
from trainers.script import workdir
from trainers.script.settings import ScriptConfig

VERDICT = Verdict(run="a", repeated_key="a", outcome=(), key=(), surroundings=())
ALL = frozenset({OPTIMIZER, RANDOM})
RESTORES = Code(restores_random=True)
SCHEDULED = replace(RESTORES, has_schedule=True)
LOADS = replace(RESTORES, loads=ALL - {RANDOM})
FORGETS_SCHEDULE = replace(LOADS, has_schedule=True, forgets=frozenset({SCHEDULE}))
NOT_SAVED = Kill(after_s=1.0, checkpoint=None)


def evidence(*kills: Kill, differs_at: int | None = 21, **found: Any) -> Evidence:
    """Of a run that logs each step and restores its random state, resumed at step 21."""
    seen = {"is_dense": True, "code": RESTORES, "resumed_at": (21,), **found}
    return Evidence(kills=kills, differs_at=differs_at, **seen)


def saved(*holds: str) -> Kill:
    return Kill(after_s=1.0, checkpoint="checkpoints/last.pt", holds=frozenset(holds))


@pytest.mark.parametrize(
    ("left", "culprit"),
    [
        (evidence(), Culprit.CHANCE),
        (evidence(NOT_SAVED), Culprit.NO_CHECKPOINT),
        (evidence(saved(*ALL), ended_elsewhere=True, differs_at=30), Culprit.OTHER_END),
        (evidence(saved(*ALL), started_over=True), Culprit.NOT_READ),
        (evidence(saved(RANDOM), differs_at=22), Culprit.OPTIMIZER),
        (evidence(saved(), differs_at=22), Culprit.OPTIMIZER),
        (evidence(saved()), Culprit.RANDOM),  # the loss of the first step knows nothing of the optimizer
        (evidence(saved(OPTIMIZER)), Culprit.RANDOM),
        (evidence(saved(*ALL)), Culprit.ORDER),
        (evidence(saved(*ALL), differs_at=22), Culprit.OPTIMIZER),  # saved, and not loaded
        (evidence(saved(*ALL), differs_at=23), Culprit.ORDER),
        (evidence(saved(*ALL), is_dense=False, ranks=2), Culprit.ORDER_OR_RANKS),
        (evidence(saved(*ALL), differs_at=None), Culprit.UNKNOWN),
        (evidence(saved(*ALL), code=Code()), Culprit.RANDOM),  # no code sets a random state
        (evidence(saved(*ALL), differs_at=24, code=SCHEDULED), Culprit.SCHEDULE),
        (evidence(saved(*ALL, SCHEDULE), differs_at=24, code=SCHEDULED), Culprit.ORDER),
        (evidence(saved(*ALL), differs_at=22, ranks=2, code=LOADS), Culprit.RANDOM),  # that of another rank
        (evidence(saved(*ALL), differs_at=22, ranks=1, code=LOADS), Culprit.OPTIMIZER),
        (evidence(saved(*ALL, SCHEDULE), differs_at=22, code=FORGETS_SCHEDULE), Culprit.SCHEDULE),  # saved, not loaded
        (evidence(saved(*ALL, SCHEDULE), is_dense=False, code=FORGETS_SCHEDULE), Culprit.SCHEDULE),
        (evidence(saved(*ALL), is_dense=False, code=replace(LOADS, unrestored=("numpy's random",))), Culprit.RANDOM),
        (evidence(saved(*ALL), is_dense=False, code=replace(RESTORES, forgets=ALL - {RANDOM})), Culprit.OPTIMIZER),
        (evidence(saved(RANDOM), is_dense=False), Culprit.OPTIMIZER),  # the names in the checkpoint decide
        (evidence(saved(), is_dense=False), Culprit.OPTIMIZER_AND_RANDOM),
    ],
)
def test_the_culprit_is_told_from_checkpoints_and_the_first_step_that_differs(left: Evidence, culprit: Culprit) -> None:
    assert culprits.culprit(left) is culprit
    assert culprits.culprit(replace(left, files_alone=True)) is Culprit.TIME_OR_PATH


@pytest.mark.parametrize(
    ("line", "does"),
    [
        ("torch.set_rng_state(state)", Code(restores_random=True)),
        ("random.setstate(state)", Code(restores_random=True)),
        ("from transformers import Trainer", Code(restores_random=True, loads=frozenset({OPTIMIZER, SCHEDULE}))),
        ("kind = 'lightning'", Code()),
        ("optimizer.__setstate__(state)", Code()),
        ("opt.load_state_dict(saved['opt'])", Code(loads=frozenset({OPTIMIZER}))),
        ("model.load_state_dict(saved['model'])", Code(forgets=frozenset({OPTIMIZER}))),
        ("for part in parts:\n    part.load_state_dict(saved[part])", Code()),
        ("import random\nrandom.seed(1)\nflip = random.random() < 0.5", Code(unrestored=("python's random",))),
        ("noise = np.random.normal(0, 1, 3)", Code(unrestored=("numpy's random",))),
        ("noise = torch.random.fork_rng()\nrng = np.random.default_rng(1)", Code()),
        ("torch.optim.SGD(model.parameters(), lr=0.1)", Code(has_optimizer_state=False)),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", Code()),
        ("schedule = StepLR(optimizer, 5)", Code(has_schedule=True)),
    ],
)
def test_what_a_script_restores_is_told_from_the_calls_in_its_code(line: str, does: Code, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    assert Code.read(tmp_path) == does


def test_equal_results_over_other_tensors_are_no_proof() -> None:
    left = evidence(saved(*ALL), differs_at=None, tensors_differ=("outputs/workdir/ema.pt",))
    proof = Proof(verdict=VERDICT, evidence=left, culprit=culprits.culprit(left))
    assert (proof.verdict.reproduced, proof.proven, proof.culprit) == (True, False, Culprit.NOT_SHOWN)
    said = proving.text(proof)
    assert "  differs  tensors of outputs/workdir/ema.pt\n  culprit  tensors differ, and no metric does: " in said
    steps = evidence(saved(*ALL), differs_at=22, values_differ=True)
    assert not Proof(verdict=VERDICT, evidence=steps).proven


def test_all_states_that_a_checkpoint_lacks_are_named_where_a_script_logs_from_its_first_step_on() -> None:
    """Folds that are there already are evaluated again, so it isn't true that nothing was read."""
    code = Code(has_schedule=True)
    left = evidence(saved(), resumed_at=(1,), differs_at=3, started_over=True, values_differ=True, code=code)
    proof = Proof(verdict=VERDICT, evidence=left, culprit=culprits.culprit(left))
    assert proof.culprit is Culprit.OPTIMIZER_AND_RANDOM
    assert "  resume   at step 1, from checkpoints/last.pt\n" in proving.text(proof)
    lacks = "  lacks    checkpoints/last.pt holds no state of: optimizer, random, schedule\n  culprit  "
    assert lacks in proving.text(proof)


def write_rows(folder: RunFolder, *rows: tuple[float, int], loss: float = 1.0, **more: Any) -> None:
    """Add rows to metrics.jsonl: unix time and step of each."""
    with (folder.path / "metrics.jsonl").open("a") as file:
        for time, step in rows:
            row = {"t": time, "step": step, "epoch": None, "metrics": {"loss": loss}, **more}
            file.write(f"{json.dumps(row)}\n")


def two_attempts(path: Path) -> RunFolder:
    """They began at seconds 100 and 200."""
    folder = RunFolder(path / "0123456789ab")
    for attempt, time in ((1, 100.0), (2, 200.0)):
        journal.append(folder.journal, journal.Entry(state=State.RUNNING, attempt=attempt, time=time))
    return folder


@pytest.mark.parametrize(("differing", "counts"), [(30, False), (40, True)])
def test_a_mean_over_fewer_steps_in_the_first_row_after_a_resume_is_no_difference(
    differing: int, counts: bool, tmp_path: Path
) -> None:
    """As transformers' loss is; what differs then shows in a later row too, or in the weights."""
    first, again = two_attempts(tmp_path / "first"), two_attempts(tmp_path / "again")
    for time, step in ((110.0, 20), (210.0, 30), (220.0, 40)):
        write_rows(first, (time, step))
        write_rows(again, (time, step), loss=2.0 if step == differing else 1.0)
    left = culprits.gather(first, again, VERDICT, [saved(*ALL)])
    assert (left.resumed_at, left.differs_at, left.values_differ) == ((30,), differing, counts)


@pytest.mark.parametrize(("epoch", "is_dense"), [(None, True), (1, False)])
def test_a_row_for_each_epoch_is_no_row_for_each_step(epoch: int | None, is_dense: bool, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "0123456789ab")
    folder.path.mkdir()
    for step in (1, 2, 3):
        write_rows(folder, (1.0, step), epoch=epoch and step)
    assert culprits.gather(folder, folder, VERDICT, []).is_dense is is_dense


def test_tensors_are_compared_without_random_states(tmp_path: Path) -> None:
    state = {"weights": torch.ones(3), "twice": torch.ones(2, dtype=torch.bfloat16), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "a.pt")
    torch.rand(1)
    torch.save({**state, "rng": torch.get_rng_state()}, tmp_path / "b.pt")
    torch.save({**state, "weights": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}, tmp_path / "c.pt")
    (tmp_path / "d.pt").write_bytes(b"PK\x03\x04torn")
    first, other_rng, other_weights, torn = (
        tensors_in(tmp_path / f"{name}.pt", random_states=False) for name in "abcd"
    )
    assert first is not None
    assert [size for size, _ in first] == [12, 4]
    assert first == other_rng != other_weights
    assert torn is None


def test_a_resume_behind_the_last_evaluation_is_told_apart() -> None:
    before = {24: {"loss": 2.0}, 48: {"loss": 1.0, "accuracy": 0.9}}
    assert culprits._lacks_last(before, {24: {"loss": 2.0}, 48: {"loss": 1.0}})
    assert not culprits._lacks_last(before, {24: {"loss": 2.1}, 48: {"loss": 1.0}})
    assert not culprits._lacks_last(before, before)


def test_a_metric_of_the_whole_training_is_told_from_one_of_each_step() -> None:
    before = {24: {"loss": 2.0}, 48: {"loss": 1.0, "train_loss": 1.5}}
    for name, is_total in (("train_loss", True), ("loss", False), ("outputs/model.pt", False)):
        verdict = replace(VERDICT, outcome=(Difference(part="config", field=name, old=1.5, new=0.0),))
        assert culprits._only_totals(before, verdict) is is_total


@pytest.mark.parametrize(
    ("kills", "starts", "resumes", "why"),
    [
        ([saved(*ALL)], [0, 21], True, ""),
        ([], [0], True, "it had ended before it could be killed"),
        ([saved(*ALL)], [0, None], True, "it was killed behind its last checkpoint, with nothing left to train"),
        ([saved(*ALL)], [0, 30], True, "it was killed behind its last checkpoint, with nothing left to train"),
        ([saved(*ALL)], [0], True, "it was killed when its training had ended, so no attempt followed"),
        ([NOT_SAVED], [0, 0], False, ""),
        ([NOT_SAVED], [0, 0], True, "it had saved no checkpoint before any kill, so nothing was resumed"),
    ],
)
def test_a_repetition_that_was_not_killed_or_not_resumed_proves_nothing(
    kills: list[Kill], starts: list[int | None], resumes: bool, why: str
) -> None:
    assert proving._unproven(kills, starts, {0, 10, 21, 30}, resumes=resumes) == why
    proof = Proof(verdict=VERDICT, evidence=evidence(*kills, differs_at=None), unproven=why)
    assert proof.verdict.reproduced
    assert proof.proven is not bool(why)
    if why:
        assert proving.text(proof) == f"NOTHING PROVEN a: {why}"


@pytest.mark.parametrize("name", ["charts/SPS", "time/fps", "train_tok/s", "Epoch_Time", "tokens_per_sec"])
def test_times_and_rates_are_known_by_their_names_and_not_compared(name: str) -> None:
    assert is_time(name)
    assert not is_time(f"{name}_loss")


def test_kinds_of_state_are_read_without_unpickling(tmp_path: Path) -> None:
    state = {"model": {"weight": 1}, "optimizer": {"momentum_buffer": 2}, "rng": 3}
    with zipfile.ZipFile(tmp_path / "last.pt", "w") as archive:
        archive.writestr("last/data.pkl", pickle.dumps(state))
        archive.writestr("last/data/0", b"tensor")
    assert state_kinds(tmp_path / "last.pt") == ALL
    assert tensors_in(tmp_path / "last.pt") == [(6, zlib.crc32(b"tensor"))]
    arguments = {"random_erase": 1, "interpolation": "random"}
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"model": 1, "args": arguments}))
    assert state_kinds(tmp_path / "old.pth") == frozenset()
    folder = tmp_path / "checkpoint-8"
    folder.mkdir()
    (folder / "optimizer.pt").touch()
    (folder / "rng_state_0.pth").touch()
    assert state_kinds(folder) == ALL
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04torn")
    assert state_kinds(tmp_path / "torn.pt") == frozenset()


def finished(tmp_path: Path, log: str, steps: int) -> RunFolder:
    """A run that trained from second 10 to second 50, with this log and so many rows."""
    folder = RunFolder(tmp_path / "0123456789ab")
    for state, time in ((State.RUNNING, 100.0), (State.FINISHED, 160.0)):
        journal.append(folder.journal, journal.Entry(state=state, attempt=1, time=time))
    write_rows(folder, *((110.0 + 40.0 * step / (steps - 1), step) for step in range(steps)))
    (folder.path / "attempts/1").mkdir(parents=True)
    (folder.path / "attempts/1/host.log").write_text(log)
    return folder


def test_kills_are_spread_over_the_training_and_follow_from_the_seed(tmp_path: Path) -> None:
    folder = finished(tmp_path, "", 2)
    drawn = draw_moments(folder, 4, 7)
    assert drawn == draw_moments(folder, 4, 7) != draw_moments(folder, 4, 8)
    assert (drawn.first_row_s, drawn.trained_s, drawn.positions) == (10.0, 40.0, ())
    assert [*drawn.shares] == sorted(drawn.shares)
    parts = [(share - 0.1) / 0.85 * 4 for share in drawn.shares]
    assert [int(part) for part in parts] == [0, 1, 2, 3], "one in each quarter"
    assert draw_moments(folder, 4, 7, factor=0.5).shares == tuple(share / 2 for share in drawn.shares)


@pytest.mark.parametrize(
    ("line", "positions", "are_rows"),
    [
        ("0 | epoch {} loss 0.5", ((0, 0), (1, 0), (2, 0), (3, 0)), False),
        ("0 | loss: 0.5", (), False),  # counted by the recorder at the end: time decides
        ("0 | nothing", ((0, 0), (0, 1), (0, 2), (0, 3)), True),
        ("1 | epoch {} loss 0.5", ((0, 0), (0, 1), (0, 2), (0, 3)), True),
    ],
)
def test_how_far_a_run_is_shows_in_its_log_or_in_rows_that_come_while_it_runs(
    line: str, positions: tuple[tuple[float, int], ...], are_rows: bool, tmp_path: Path
) -> None:
    drawn = draw_moments(finished(tmp_path, "".join(f"{line}\n".format(epoch) for epoch in range(4)), 4), 1, 7)
    assert (drawn.positions, drawn.are_rows) == (positions, are_rows)


def test_time_decides_where_the_epochs_begin_anew_in_each_fold(tmp_path: Path) -> None:
    log = "".join(f"0 | fold {fold} epoch {epoch} loss 0.5\n" for fold in range(3) for epoch in range(4))
    assert draw_moments(finished(tmp_path, log, 4), 2, 7).positions == ()


def test_progress_is_that_of_the_log_however_slow_the_computer_is(tmp_path: Path, monkeypatch: Any) -> None:
    """Nine lines, ten seconds from one to the next: half of the way is behind the fourth one and five seconds."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    drawn = Moments(shares=(0.5,), positions=tuple((epoch, 0) for epoch in range(9)), first_row_s=1.0, trained_s=8.0)
    progress, log = proving._Progress(drawn, 2), tmp_path / "attempts/2/host.log"
    log.parent.mkdir(parents=True)
    shares = []
    for epoch in range(2, 5):
        with log.open("a") as file:
            file.write(f"0 | epoch {epoch} loss 0.5\n0 | epoch {epoch + 1} lo")
        shares.append(progress.share(tmp_path))
        now[0] += 5.0
        shares.append(progress.share(tmp_path))
        now[0] += 5.0
        with log.open("a") as file:
            file.write("\n")
    assert [round(9 * share, 2) for share in shares] == [3.0, 4.0, 4.0, 4.5, 5.0, 5.5]


def test_rows_that_are_recorded_late_count_for_the_attempt_that_logged_them(tmp_path: Path) -> None:
    folder = two_attempts(tmp_path)
    for time, step, attempt in ((110.0, 1, 1), (210.0, 2, 1), (120.0, 3, 2), (220.0, 4, 2)):
        write_rows(folder, (time, step), attempt=f"0123456789ab-x-{attempt}-n")
    assert [[row.step for row in rows] for rows in culprits.rows_by_attempt(folder.path)] == [[1, 2, 3], [4]]
    assert culprits.first_steps(culprits.rows_by_attempt(folder.path)) == [1, 4]


def test_an_attempt_goes_on_from_its_checkpoint_and_begins_anew_without_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert saved_s(tmp_path, 100.0) == 0.0
    (tmp_path / "checkpoints/step-00000004.pt").write_bytes(b"x")
    os.utime(tmp_path / "checkpoints/step-00000004.pt", (112.0, 112.0))
    assert saved_s(tmp_path, 100.0) == 12.0
    assert saved_s(tmp_path, 130.0) == 0.0, "an earlier attempt saved it"


def test_a_script_whose_checkpoint_no_argument_names_is_offered_its_own_option(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/checkpoint-8").mkdir(parents=True)
    (tmp_path / "checkpoints/checkpoint-8/model.safetensors").write_bytes(b"x" * 9)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text('add("--resume_from_checkpoint")\nadd("--checkpoints_dir")\n')
    offer = "the argument --resume_from_checkpoint '{resume}' would give it checkpoints/checkpoint-8"
    assert ScriptAttempts(tmp_path, ScriptConfig(script="train.py")).resume_offer() == offer
    assert ScriptAttempts(tmp_path, ScriptConfig(script="train.py", args={"resume": "{resume}"})).resume_offer() == ""
    (tmp_path / "code/train.py").write_text("pass\n")
    assert ScriptAttempts(tmp_path, ScriptConfig(script="train.py")).resume_offer() == ""
    (tmp_path / "checkpoints/checkpoint-8/model.safetensors").unlink()
    own = workdir.copy_of(tmp_path, 0) / "out/checkpoint-9/model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x" * 9)
    offer = "an option of it that takes a checkpoint, as in --resume '{resume}', would get out/checkpoint-9"
    assert ScriptAttempts(tmp_path, ScriptConfig(script="train.py")).resume_offer() == offer


def test_a_run_that_was_resumed_when_it_was_made_is_the_one_that_differs() -> None:
    left = evidence(resumed_at=(6,), differs_at=6)
    proof = Proof(verdict=VERDICT, evidence=left, was_resumed=True, culprit=Culprit.RANDOM)
    assert proving.text(proof).splitlines()[:2] == [
        "NOT PROVEN a: it was itself resumed, at step 6; an undisturbed run differs from step 6 on",
        "  culprit  random state not restored (order of data, dropout and augmentation follow from it)",
    ]


def test_a_checkpoint_in_the_scripts_folder_is_shown_where_the_script_wrote_it() -> None:
    kept = Kill(after_s=1.0, checkpoint="work/node0/above/above/code/gpt/out/ckpt.pt")
    proof = Proof(verdict=VERDICT, evidence=evidence(kept, started_over=True), culprit=Culprit.NOT_READ)
    assert "it starts over: gpt/out/ckpt.pt was there and not read" in proving.text(proof)
