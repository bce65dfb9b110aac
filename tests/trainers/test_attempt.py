"""What is left of another attempt is not taken up, and a rank whose folder was taken from it ends."""

import json
import shutil
from pathlib import Path

import pytest

from tests.trainers.tiny_runs import MakeRun, metrics_lines, read_summary
from trainers.contract import run_folder
from trainers.core.errors import TrainerError
from trainers.distributed.ranks import read_attempt
from trainers.training.loop import Trainer
from trainers.training.session import run


def name_attempts(run_dir: Path, *ids: str) -> None:
    (run_dir / run_folder.ATTEMPT_IDS).write_text(json.dumps({"attempts": ids}))


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: object) -> None:
    """Call ``act`` when ``step`` steps are done."""
    original = Trainer._one_step

    def acting(self: Trainer, *arguments: object) -> None:
        if self.step == step:
            act()  # type: ignore[operator]
        original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_one_step", acting)


def test_checkpoints_and_lines_carry_the_attempt_and_the_next_one_takes_them_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run()
    for number in (1, 2):
        name_attempts(run_dir, *(f"key-{older}" for older in range(1, number + 1)))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"key-{number}")
        run(run_dir / "config.json")
    assert "resumed from step 15" in capsys.readouterr().out
    assert json.loads((run_dir / "checkpoints" / "step-00000015.json").read_text())["attempt"] == "key-1"
    assert [line["attempt"] for line in metrics_lines(run_dir)] == ["key-1"] * 12 + ["key-2"]


def test_nothing_of_a_foreign_attempt_is_taken_up(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that outlived their removed folder have written to the one that was made in its place."""
    run_dir, alone = make_run(), make_run("alone")
    for folder, attempt, seed_of in ((run_dir, "key-orphan", True), (alone, "key-new", False)):
        name_attempts(folder, attempt)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", attempt)
        run(folder / "config.json")
        capsys.readouterr()
        if seed_of:
            (folder / "summary.json").unlink()
    name_attempts(run_dir, "key-new")
    run(run_dir / "config.json")
    out = capsys.readouterr().out
    assert "warning: checkpoint step-00000015.pt is skipped: it was written by attempt key-orphan, which" in out
    assert "resumed" not in out
    assert {line["attempt"] for line in metrics_lines(run_dir)} == {"key-new"}
    assert read_summary(run_dir)["weights_sha256"] == read_summary(alone)["weights_sha256"]


def remove(folder: Path) -> None:
    """While a checkpoint is being written into it: a file that rmtree has just listed may have another name by now."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def test_a_rank_whose_folder_was_removed_ends_and_makes_nothing_anew(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run()
    at_step(monkeypatch, 7, lambda: remove(run_dir))
    with pytest.raises(TrainerError, match=r"the run folder \S+ was removed while the run was going on"):
        run(run_dir / "config.json")
    assert not run_dir.exists()


@pytest.mark.parametrize("step", [1, 7, 14])
def test_a_rank_whose_folder_belongs_to_a_later_attempt_ends(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    run_dir = make_run()
    name_attempts(run_dir, "key-1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "key-1")
    at_step(monkeypatch, step, lambda: name_attempts(run_dir, "key-1", "key-2"))
    with pytest.raises(TrainerError, match="belongs to attempt key-2 by now; attempt key-1 ends"):
        run(run_dir / "config.json")
    assert not (run_dir / "summary.json").exists()
    assert not list((run_dir / "checkpoints").glob(f"step-{5 * (step // 5 + 1):08d}.*")), "written after that"


@pytest.mark.parametrize("text", ["", "\0" * 40, "[]", '{"attempts": 7}'])
def test_a_damaged_list_of_attempts_ends_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    name_attempts(tmp_path, "key-1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "key-1")
    attempt = read_attempt(tmp_path)
    attempt.check()
    (tmp_path / run_folder.ATTEMPT_IDS).write_text(text)
    with pytest.raises(TrainerError, match=f"has no readable {run_folder.ATTEMPT_IDS} any more; attempt key-1 ends"):
        attempt.check()
    (tmp_path / run_folder.ATTEMPT_IDS).unlink()
    with pytest.raises(TrainerError, match=f"has no readable {run_folder.ATTEMPT_IDS} any more; attempt key-1 ends"):
        attempt.check()
