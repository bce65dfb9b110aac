"""A script that looks for its checkpoint by itself, by a name in its working directory, goes on from it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from tests.trainers.script.runs import ROOT, ScriptRun

pytestmark = pytest.mark.slow

SCRIPT = """
import os, paceline, pickle, sys
start = 0
if os.path.exists("NAME"):
    with open("NAME", "rb") as file:
        start = pickle.load(file)
for epoch in range(start + 1, 7):
    print(f"epoch {epoch}", flush=True)
    paceline.log(epoch, loss=1 / epoch)
    with open("NAME.tmp", "wb") as file:
        pickle.dump(epoch, file)
    os.replace("NAME.tmp", "NAME")
    if epoch % 2 == 0 and epoch < 6:
        sys.exit(3)
"""


def epochs_of(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("epoch ")]


def test_it_finds_what_earlier_attempts_left_however_often_it_is_started(run: ScriptRun) -> None:
    run.write(SCRIPT.replace("NAME", "latest.pkl"))
    attempts = [run.start(code=3), run.start(code=3), run.start()]
    assert [epochs_of(said) for said in attempts] == [[1, 2], [3, 4], [5, 6]]
    assert "goes on from a checkpoint: latest.pkl, which train.py looks for by itself\n" in attempts[1]
    assert "is kept in" not in attempts[2]
    assert pickle.loads((run.path / "outputs/workdir/latest.pkl").read_bytes()) == 6
    assert [step for step, _ in run.rows()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["best.pkl", "results.csv"])
def test_a_best_one_and_a_table_are_no_checkpoints_so_it_starts_over_without_them(run: ScriptRun, name: str) -> None:
    run.write(SCRIPT.replace("NAME", name))
    run.start(code=3)
    said = run.start(code=3)
    assert epochs_of(said) == [1, 2]
    assert f"what earlier attempts left is kept in attempts/0/before: workdir/{name}" in said


def test_one_that_a_library_alone_asks_for_before_it_writes_it_is_not_looked_for(
    run: ScriptRun, tmp_path: Path
) -> None:
    library = tmp_path / "site-packages" / "saving.py"
    library.parent.mkdir()
    library.write_text("import os\ndef save(name):\n    os.path.exists(name)\n    open(name, 'w').close()\n")
    run.write("import saving, sys\nprint('epoch 1')\nsaving.save('last.ckpt')\nsys.exit(3)")
    attempts = [run.start(code=3, env={"PYTHONPATH": f"{ROOT}:{library.parent}"}) for _ in range(2)]
    assert "looks for by itself" not in attempts[1]
    assert "what earlier attempts left is kept in attempts/0/before: workdir/last.ckpt" in attempts[1]


def test_a_checkpoint_that_breaks_off_is_none(run: ScriptRun) -> None:
    run.write(SCRIPT.replace("NAME", "latest.pt"))
    run.start(code=3)
    (run.path / "work/node0/above/above/code/latest.pt").write_bytes(b"PK\x03\x04 torn")
    assert epochs_of(run.start(code=3)) == [1, 2]


def test_a_pattern_that_matches_nothing_starts_over(run: ScriptRun) -> None:
    run.write(SCRIPT.replace("NAME", "latest.pkl")).start(code=3)
    assert epochs_of(run.write(SCRIPT.replace("NAME", "latest.pkl"), resume_pattern="none").start(code=3)) == [1, 2]


def test_on_several_nodes_it_starts_over_as_the_others_have_no_such_file(run: ScriptRun) -> None:
    run.write(SCRIPT.replace("NAME", "latest.pkl"))
    run.start(code=3)
    run.start(code=3, node_rank=1)
    assert epochs_of(run.start(code=3)) == [1, 2]
    assert json.loads((run.path / "work/node0/looked_for.json").read_text()) == ["latest.pkl"]
