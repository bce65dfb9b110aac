"""A script's checkpoints copied to an address and taken from there: what belongs together, whole, with its times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.runs.checkpoint_mirror import Mirroring, ScriptMirror
from trainers.script.resume import newest_checkpoint


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The newer checkpoint has the name that comes first."""
    folder = tmp_path / "run"
    for at, (name, text) in enumerate({"b/model.pt": "first", "a/model.pt": "second"}.items()):
        path = folder / "checkpoints" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        os.utime(path, ns=(10**18 + at, 10**18 + at))
    (folder / "metrics.jsonl").write_text("rows")
    return folder


@pytest.fixture
def mirror(tmp_path: Path) -> ScriptMirror:
    return ScriptMirror(str(tmp_path / "mirror"), "abc")


def contents(tmp_path: Path) -> list[str]:
    return sorted(path.read_text() for path in (tmp_path / "mirror/abc/contents").iterdir())


def test_a_lost_folder_gets_all_back_and_the_newest_is_still_the_newest(
    run_dir: Path, mirror: ScriptMirror, tmp_path: Path
) -> None:
    (run_dir / "nodes/1/checkpoints").mkdir(parents=True)
    (run_dir / "nodes/1/checkpoints/rng_state_1.pth").write_text("of another host")
    assert (mirror.push(run_dir), mirror.push(run_dir)) == (4, 0)
    wanted = {path.relative_to(run_dir): path.read_text() for path in run_dir.rglob("*") if path.is_file()}
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    said: list[str] = []
    Mirroring(mirror, run_dir, said.append).restore()
    assert said == [
        "the run folder has no checkpoint; took 4 files that its script had left from "
        f"cluster.checkpoint_mirror={tmp_path / 'mirror'}"
    ]
    assert {path.relative_to(run_dir): path.read_text() for path in run_dir.rglob("*") if path.is_file()} == wanted
    assert newest_checkpoint(run_dir / "checkpoints") == run_dir / "checkpoints/a/model.pt"
    Mirroring(mirror, run_dir, said.append).restore()  # it has its own now
    assert len(said) == 1


def test_what_is_no_checkpoint_any_more_is_removed_there(run_dir: Path, mirror: ScriptMirror, tmp_path: Path) -> None:
    mirror.push(run_dir)
    shutil.rmtree(run_dir / "checkpoints/b")
    (run_dir / "checkpoints/a/model.pt").write_text("third")
    assert mirror.push(run_dir) == 2
    assert contents(tmp_path) == ["rows", "third"]


@pytest.mark.parametrize("damage", ["content", "list", "gone"])
def test_copies_that_are_not_whole_are_left_there_with_a_warning(
    run_dir: Path, mirror: ScriptMirror, tmp_path: Path, damage: str
) -> None:
    mirror.push(run_dir)
    copies = tmp_path / "mirror/abc"
    path = copies / "script.json" if damage == "list" else next(iter(sorted((copies / "contents").iterdir())))
    path.unlink() if damage == "gone" else path.write_text(path.read_text()[:-2] + "x")
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    found, (warning,) = mirror.restore(run_dir)
    assert (found, list(run_dir.iterdir())) == (0, [])
    assert "are not whole and are left there: " in warning


def test_a_run_without_checkpoints_copies_nothing(run_dir: Path, mirror: ScriptMirror, tmp_path: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert (mirror.push(run_dir), mirror.restore(run_dir)) == (0, (0, []))
    assert not (tmp_path / "mirror").exists()
