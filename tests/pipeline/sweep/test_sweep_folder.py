"""The sweep folder: what is written down stays usable, and a name stands for one search space."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.core import documents
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.data import store
from pipeline.runs.index import find as find_run
from pipeline.sweep.expand import Grid, Space, expand
from pipeline.sweep.folder import SweepFolder, TrialEntry, add_to_run, describe, find, in_order, latest, locate


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder that holds the node half and the digits' pack."""
    root = tmp_path_factory.mktemp("project")
    (root / "trainers").symlink_to(Path(__file__).resolve().parents[3] / "trainers")
    store.fetch(
        expand(["experiment=quickstart"], root=root, local_gpus=0).trials[0].config.train.dataset, root / "data"
    )
    return root


def space(root: Path, *words: str) -> Space:
    return expand(["experiment=quickstart", *words], root=root, local_gpus=0)


def begun(root: Path, runs: Path, found: Space, *, fork: bool = False) -> SweepFolder:
    folder = locate(runs, found, fork=fork)
    folder.write(describe(found, ["words"]))
    return folder


def entry(number: int, state: State = State.FINISHED) -> TrialEntry:
    return TrialEntry(number=number, key=f"key{number}", state=state, time=1.0)


@pytest.mark.slow
def test_a_sweep_is_its_trials_whatever_their_order_and_spelling(root: Path) -> None:
    key = space(root, "seed=0,1", "optimizer.lr=0.1,0.2").key
    assert space(root, "optimizer.lr=0.20,1e-1", "seed=range(2)", "sweep.slots=2").key == key
    assert space(root, "seed=0,1", "optimizer.lr=0.1,0.3").key != key


@pytest.mark.slow
def test_a_shuffled_order_is_written_down_and_kept(root: Path, tmp_path: Path) -> None:
    first = space(root, "seed=shuffle(range(40))")
    record = begun(root, tmp_path, first).read()
    again = in_order(space(root, "seed=range(40)"), record)
    assert [trial.key for trial in again.trials] == [trial.key for trial in first.trials]
    assert [trial.number for trial in again.trials] == list(range(40))
    assert Grid(again.trials).total == 40


def test_a_name_stands_for_one_space_until_it_is_forked(root: Path, tmp_path: Path) -> None:
    small, large = space(root, "sweep.name=lr", "seed=0,1"), space(root, "sweep.name=lr", "seed=0,1,2")
    begun(root, tmp_path, small)
    assert locate(tmp_path, small, fork=False).name == "lr"
    with pytest.raises(
        UsageError, match=r"lr stands for another search space: 2 trials of words; of the 3 .* it has 2"
    ):
        locate(tmp_path, large, fork=False)
    assert begun(root, tmp_path, large, fork=True).name == "lr-2"
    assert locate(tmp_path, large, fork=True).name == "lr-2"
    with pytest.raises(UsageError, match="must be up to 100 letters"):
        locate(tmp_path, space(root, "sweep.name=../x"), fork=False)


@pytest.mark.parametrize("damage", ['{"number": 1, "key": "key1", "sta\x00\n{"number": 2}\n', '{"number": 1, "ke'])
def test_of_a_journal_with_corrupt_or_torn_lines_the_rest_is_used(tmp_path: Path, damage: str) -> None:
    folder = SweepFolder(tmp_path / "s")
    folder.note([entry(0), entry(1, State.RUNNING)])
    with folder.journal.open("a") as file:
        file.write(damage)
    folder.note([entry(1)])
    good = folder.entries()
    assert [item.state for item in good] == [State.FINISHED, State.RUNNING, State.FINISHED]
    assert latest(good)["key1"].state is State.FINISHED


def test_what_a_newer_version_made_is_left_alone(root: Path, tmp_path: Path) -> None:
    folder = begun(root, tmp_path, space(root, "seed=0,1"))
    path = folder.path / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    with pytest.raises(UsageError, match=r"sweep.json was written by a newer version"):
        folder.read()
    run = tmp_path / "abcdefabcdef"
    run.mkdir()
    (run / "key.json").write_text('{"version": 99}')
    with pytest.raises(UsageError, match=r"abcdefabcdef was written by a newer Paceline: key.json has version 99"):
        find_run(tmp_path, "abc")


def test_an_altered_sweep_is_told_with_the_fix(root: Path, tmp_path: Path) -> None:
    folder = begun(root, tmp_path, space(root, "seed=0,1"))
    path = folder.path / "sweep.json"
    record = folder.read()
    text = path.read_text()
    known = {**asdict(record), "version": 2}
    trial = known["trials"][0]
    for damage in (
        "",
        "{",
        "[]",
        '{"version": 2}',
        "[" * 100_000,
        text.replace('"total": 2', '"total": 3'),
        text[: text.rindex(",")] + "\n}\n",
        documents.sealed({**known, "total": None}),
        documents.sealed({**known, "trials": [None]}),
        documents.sealed({**known, "goals": None}),
        documents.sealed({**known, "trials": [{**trial, "chosen": None}]}),
    ):
        path.write_text(damage)
        with pytest.raises(UsageError, match=r"sweep\.json was altered: it .*\n  try: rm .*sweep\.json; the same doit"):
            folder.read()
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match=r"it is a directory, not a file\n  try: rm -r .*sweep\.json; the same doit"):
        folder.read()
    path.rmdir()
    path.write_text(text)
    assert folder.read() == record
    folder.journal.mkdir()
    assert folder.entries() == []


def test_a_sweep_is_found_by_the_beginning_of_its_name_or_as_the_latest(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no sweep under"):
        find(tmp_path, None)
    folder = begun(root, tmp_path, space(root, "seed=0,1"))
    assert find(tmp_path, None) == find(tmp_path, "last") == find(tmp_path, folder.name[:3]) == folder
    with pytest.raises(UsageError, match="zz: no such sweep"):
        find(tmp_path, "zz")


def test_a_run_notes_every_sweep_it_belongs_to_once(root: Path, tmp_path: Path) -> None:
    trial = space(root, "seed=0,1", f"paths.runs={tmp_path}").trials[1]
    assert trial.run is not None
    for key, new in (("one", True), ("one", False), ("two", True)):
        assert add_to_run(trial.run.folder, SweepFolder(tmp_path / "s"), key, 1, trial.chosen) is new
    noted = json.loads((trial.run.folder.path / "sweeps.json").read_text())["sweeps"]
    assert [(item["key"], item["trial"], item["overrides"]) for item in noted] == [
        ("one", 1, ["seed=1"]),
        ("two", 1, ["seed=1"]),
    ]
