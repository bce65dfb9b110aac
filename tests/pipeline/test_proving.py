"""What makes a killed run come out otherwise, told from its checkpoints and metrics; and when it is killed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.specs import State
from pipeline.keys.content_key import Difference
from pipeline.reproduction import proving
from pipeline.reproduction.compare import Verdict, is_time
from pipeline.reproduction.proving import Culprit, Kill, Proof
from pipeline.runs import journal
from pipeline.runs.checkpoints import resume_offer
from pipeline.runs.folder import RunFolder
from trainers.script import workdir
from trainers.script.settings import ScriptConfig

VERDICT = Verdict(run="a", again="a", outcome=(), key=(), surroundings=())
ALL = frozenset({proving.OPTIMIZER, proving.RANDOM})


def proof(*kills: Kill, resumed_at: int = 21, differs_at: int | None = 21, started_over: bool = False) -> Proof:
    return Proof(
        verdict=VERDICT, kills=kills, resumed_at=(resumed_at,), differs_at=differs_at, started_over=started_over
    )


def saved(*holds: str) -> Kill:
    return Kill(after_s=1.0, checkpoint="checkpoints/last.pt", holds=frozenset(holds))


@pytest.mark.parametrize(
    ("evidence", "culprit"),
    [
        (proof(), Culprit.CHANCE),
        (proof(Kill(after_s=1.0, checkpoint=None)), Culprit.NO_CHECKPOINT),
        (proof(saved(*ALL), started_over=True), Culprit.NOT_READ),
        (proof(saved(proving.RANDOM), differs_at=22), Culprit.OPTIMIZER),
        (proof(saved(), differs_at=22), Culprit.OPTIMIZER),
        (proof(saved()), Culprit.RANDOM),  # the loss of the first step knows nothing of the optimizer
        (proof(saved(proving.OPTIMIZER)), Culprit.RANDOM),
        (proof(saved(*ALL)), Culprit.ORDER),
        (proof(saved(*ALL), differs_at=22), Culprit.OPTIMIZER),  # saved, and not loaded
        (proof(saved(*ALL), differs_at=23), Culprit.ORDER),
        (proof(saved(*ALL), differs_at=None), Culprit.UNKNOWN),
    ],
)
def test_the_culprit_is_told_from_checkpoints_and_the_first_step_that_differs(
    evidence: Proof, culprit: Culprit
) -> None:
    assert proving.culprit(evidence, files_alone=False, is_dense=True, restores_random=True) is culprit
    files = proving.culprit(evidence, files_alone=True, is_dense=True, restores_random=True)
    assert files is Culprit.TIME_OR_PATH


def test_a_random_state_that_no_code_sets_was_not_restored() -> None:
    found = proving.culprit(proof(saved(*ALL)), files_alone=False, is_dense=True, restores_random=False)
    assert found is Culprit.RANDOM


@pytest.mark.parametrize(
    ("line", "restores"),
    [
        ("torch.set_rng_state(state)", True),
        ("random.setstate(state)", True),
        ("from transformers import Trainer", True),
        ("kind = 'lightning'", False),
        ("optimizer.__setstate__(state)", False),
    ],
)
def test_a_random_state_is_set_by_a_call_or_by_a_library_that_is_imported(
    line: str, restores: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    assert proving._restores_random(tmp_path) is restores


def test_a_resume_behind_the_last_evaluation_is_told_apart() -> None:
    before = {24: {"loss": 2.0}, 48: {"loss": 1.0, "accuracy": 0.9}}
    assert proving._lacks_last(before, {24: {"loss": 2.0}, 48: {"loss": 1.0}})
    assert not proving._lacks_last(before, {24: {"loss": 2.1}, 48: {"loss": 1.0}})
    assert not proving._lacks_last(before, before)


def test_a_metric_of_the_whole_training_is_told_from_one_of_each_step() -> None:
    before = {24: {"loss": 2.0}, 48: {"loss": 1.0, "train_loss": 1.5}}
    for name, is_total in (("train_loss", True), ("loss", False), ("outputs/model.pt", False)):
        verdict = replace(VERDICT, outcome=(Difference(part="config", field=name, old=1.5, new=0.0),))
        assert proving._only_totals(before, verdict) is is_total


def test_where_steps_are_logged_now_and_then_the_names_in_the_checkpoint_decide() -> None:
    found = proving.culprit(proof(saved()), files_alone=False, is_dense=False, restores_random=True)
    assert found is Culprit.OPTIMIZER


def test_a_kill_behind_the_last_checkpoint_proves_nothing() -> None:
    reproduced = replace(proof(saved(*ALL), differs_at=None), resumed_at=(), nothing_left=True)
    assert reproduced.verdict.reproduced
    assert not reproduced.proven
    assert proving.text(reproduced) == (
        "NOTHING PROVEN a: it was killed behind its last checkpoint each time, with nothing left to train"
    )


@pytest.mark.parametrize("name", ["charts/SPS", "time/fps", "train_tok/s", "Epoch_Time", "tokens_per_sec"])
def test_times_and_rates_are_known_by_their_names_and_not_compared(name: str) -> None:
    assert is_time(name)
    assert not is_time(f"{name}_loss")


def test_kinds_of_state_are_read_without_unpickling(tmp_path: Path) -> None:
    state = {"model": {"weight": 1}, "optimizer": {"momentum_buffer": 2}, "rng": 3}
    with zipfile.ZipFile(tmp_path / "last.pt", "w") as archive:
        archive.writestr("last/data.pkl", pickle.dumps(state))
        archive.writestr("last/data/0", b"tensor")
    assert proving.state_kinds(tmp_path / "last.pt") == ALL
    assert proving.tensors_in(tmp_path / "last.pt") == [(6, zlib.crc32(b"tensor"))]
    arguments = {"random_erase": 1, "interpolation": "random"}
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"model": 1, "args": arguments}))
    assert proving.state_kinds(tmp_path / "old.pth") == frozenset()
    folder = tmp_path / "checkpoint-8"
    folder.mkdir()
    (folder / "optimizer.pt").touch()
    (folder / "rng_state_0.pth").touch()
    assert proving.state_kinds(folder) == ALL
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04torn")
    assert proving.state_kinds(tmp_path / "torn.pt") == frozenset()


def test_kills_are_spread_over_the_time_that_the_run_trained_and_follow_from_the_seed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "0123456789ab")
    for state, time in ((State.RUNNING, 100.0), (State.FINISHED, 160.0)):
        journal.append(folder.journal, journal.Entry(state=state, attempt=1, time=time))
    rows = [{"t": time, "step": 1, "epoch": None, "metrics": {"loss": 1.0}} for time in (110.0, 150.0)]
    (folder.path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first_s, into_s = proving.moments(folder, 4, 7)
    assert (first_s, into_s) == proving.moments(folder, 4, 7) != proving.moments(folder, 4, 8)
    assert first_s == 10.0
    assert into_s == sorted(into_s)
    assert 4.0 <= into_s[0] < into_s[-1] <= 38.0


def test_an_attempt_goes_on_from_its_checkpoint_and_begins_anew_without_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert proving._saved_s(tmp_path, 100.0) == 0.0
    (tmp_path / "checkpoints/step-00000004.pt").write_bytes(b"x")
    os.utime(tmp_path / "checkpoints/step-00000004.pt", (112.0, 112.0))
    assert proving._saved_s(tmp_path, 100.0) == 12.0
    assert proving._saved_s(tmp_path, 130.0) == 0.0, "an earlier attempt saved it"


def test_a_script_that_takes_its_checkpoint_and_had_none_at_any_kill_proves_nothing() -> None:
    said = proving.text(replace(proof(Kill(after_s=1.0, checkpoint=None)), not_resumed=True))
    assert said == "NOTHING PROVEN a: it had saved no checkpoint before any kill, so nothing was resumed"


def test_a_script_whose_checkpoint_no_argument_names_is_offered_its_own_option(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/checkpoint-8").mkdir(parents=True)
    (tmp_path / "checkpoints/checkpoint-8/model.safetensors").write_bytes(b"x" * 9)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text('add("--resume_from_checkpoint")\nadd("--checkpoints_dir")\n')
    offer = "the argument --resume_from_checkpoint '{resume}' would give it checkpoints/checkpoint-8"
    assert resume_offer(tmp_path, ScriptConfig(script="train.py")) == offer
    assert resume_offer(tmp_path, ScriptConfig(script="train.py", args={"resume": "{resume}"})) == ""
    (tmp_path / "code/train.py").write_text("pass\n")
    assert resume_offer(tmp_path, ScriptConfig(script="train.py")) == ""
    (tmp_path / "checkpoints/checkpoint-8/model.safetensors").unlink()
    own = workdir.copy_of(tmp_path, 0) / "out/checkpoint-9/model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x" * 9)
    offer = "an option of it that takes a checkpoint, as in --resume '{resume}', would get out/checkpoint-9"
    assert resume_offer(tmp_path, ScriptConfig(script="train.py")) == offer


def test_a_run_that_was_resumed_when_it_was_made_is_the_one_that_differs() -> None:
    evidence = replace(proof(resumed_at=6, differs_at=6), was_resumed=True, culprit=Culprit.RANDOM)
    assert proving.text(evidence).splitlines()[:2] == [
        "NOT PROVEN a: it was itself resumed, at step 6; an undisturbed run differs from step 6 on",
        "  culprit  random state not restored (order of data, dropout and augmentation follow from it)",
    ]


def test_a_checkpoint_in_the_scripts_folder_is_shown_where_the_script_wrote_it() -> None:
    kept = Kill(after_s=1.0, checkpoint="work/node0/above/above/code/gpt/out/ckpt.pt")
    evidence = replace(proof(kept, started_over=True), culprit=Culprit.NOT_READ)
    assert "it starts over: gpt/out/ckpt.pt was there and not read" in proving.text(evidence)
