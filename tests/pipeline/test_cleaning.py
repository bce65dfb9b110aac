"""`doit clean`: what it chooses, what it never removes, and that nothing of a removed run is trusted."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from pipeline.cli.commands import clean as cleaning
from pipeline.cli.commands.clean import superseded
from pipeline.core import cache, documents
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.files import write_json
from pipeline.core.locks import FileLock
from pipeline.core.specs import State
from pipeline.runs import index, journal
from pipeline.runs.acceptance import by_this_user, write
from pipeline.runs.folder import RunFolder
from pipeline.sweep.folder import SweepFolder, SweepRecord, TrialRecord
from pipeline.tracking.destinations import DONE, PENDING, TrackingState, input_stamps
from tests.integration import preloaded
from tests.integration.commands import ROOT
from tests.pipeline.conftest import Printed
from tests.pipeline.finished_folder import CONFIG, finished, key_of

DAY_S = 86_400.0


@pytest.fixture
def clean(tmp_path: Path, printed: Printed) -> Printed:
    """`doit clean` with these words and without a terminal; what it says."""
    return partial(printed, cleaning.clean, tmp_path)


def seeded(runs_dir: Path, seed: int, *, days: float = 0, code: bytes = b"A = 1\n") -> RunFolder:
    """A finished run, ``days`` old."""
    config = {**CONFIG, "seed": seed}
    folder = finished(runs_dir, key_of(config, code=code), config=config, code=code)
    fields = dict(json.loads(folder.result.read_text()))
    fields.pop("sha256", None)
    documents.write_sealed(folder.result, {**fields, "unix_time": fields["unix_time"] - days * DAY_S})
    return folder


def ended(runs_dir: Path, key: str, state: State, *, days: float = 0) -> RunFolder:
    """A run that has no result."""
    folder = RunFolder(runs_dir / key)
    write_json(folder.path / "key.json", {"version": 2, "topology": {"nproc_per_node": [1]}})
    write_json(folder.path / "config.json", CONFIG)
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "step-00000001.pt").write_bytes(bytes(3_000_000))
    now = folder.path.stat().st_mtime
    journal.append(folder.journal, journal.Entry(state=state, attempt=1, time=now - days * DAY_S))
    for path in (path for path in folder.path.rglob("*") if path.is_file()):
        os.utime(path, (now - days * DAY_S,) * 2)
    return folder


def name_in_sweep(runs_dir: Path, key: str) -> None:
    trial = TrialRecord(number=0, key=key, configuration="c", chosen=(), overrides=())
    record = SweepRecord(key="k", configurations="c", words=(), total=1, trials=(trial,))
    SweepFolder(runs_dir / "sweeps" / "grid").write(record)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != cache.FOLDER)


def with_checkpoint(folder: RunFolder) -> RunFolder:
    for name in ("step-00000007.pt", "step-00000007.json", "best.pt"):
        path = folder.path / "checkpoints" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(1_000_000))
    return folder


@pytest.mark.slow
def test_without_a_rule_what_failed_or_is_superseded_is_shown_and_nothing_removed(
    tmp_path: Path, clean: Printed
) -> None:
    failed = ended(tmp_path, "f" * 12, State.FAILED)
    old, new, other = seeded(tmp_path, 0, days=2, code=b"A = 0\n"), seeded(tmp_path, 0), seeded(tmp_path, 1, days=3)
    ended(tmp_path, "e" * 12, State.KILLED)

    lines = clean().splitlines()
    assert lines[0].split() == ["run", "state", "when", "what", "frees", "why"]
    assert sorted(line[:12] for line in lines[1:3]) == sorted([failed.key, old.key])
    assert any(line.endswith("digits small_cnn sgd  3.0 MB  failed") for line in lines)
    assert any(line.endswith(f"superseded by {new.key}") for line in lines)
    assert lines[3].startswith("nothing was removed; to remove 2 runs, 3.0 MB: doit clean paths.runs=")
    assert lines[3].endswith(" --yes")
    assert all(folder.path.is_dir() for folder in (failed, old, new, other))


def test_what_is_confirmed_is_removed_with_its_lock(tmp_path: Path, clean: Printed) -> None:
    failed, kept = ended(tmp_path, "f" * 12, State.FAILED), seeded(tmp_path, 0)
    failed.lock.touch()
    assert clean("yes=1").splitlines()[-1] == "removed 1 run, 3.0 MB"
    assert names(tmp_path) == [kept.key]
    assert clean("yes=1") == f"nothing to remove under {tmp_path}\n"


def test_each_rule_narrows_and_overrides_choose(tmp_path: Path, clean: Printed) -> None:
    ended(tmp_path, "a" * 12, State.KILLED, days=40)
    ended(tmp_path, "b" * 12, State.KILLED)
    run = seeded(tmp_path, 5, days=50)
    assert [line[:12] for line in clean("older_than=30").splitlines()[1:-1]] == [run.key, "a" * 12]
    lines = clean("state=killed", "older_than=30").splitlines()
    assert lines[1].startswith("a" * 12)
    assert lines[1].endswith("killed, 40 days old")
    assert lines[2].startswith("nothing was removed; to remove 1 run, ")
    assert clean("state=killed", "seed=5").startswith("nothing to remove")
    assert clean("older_than=30", "superseded=1").startswith("nothing to remove")


def test_no_run_is_chosen_by_an_edited_value(tmp_path: Path, clean: Printed) -> None:
    folder = seeded(tmp_path, 3)
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace('"seed": 3', '"seed": 4'))
    assert folder.key not in clean("seed=4", "state=altered")
    assert folder.key in clean("seed=3", "state=altered")


def test_a_result_that_something_relies_on_stays(tmp_path: Path, clean: Printed) -> None:
    swept, held, pending, recorded, plain = (seeded(tmp_path, seed, days=9) for seed in range(5))
    name_in_sweep(tmp_path, swept.key)
    accepted = key_of({**CONFIG, "seed": 99})
    write(
        RunFolder(tmp_path / accepted.short), by_this_user(accepted, key_of({**CONFIG, "seed": 1}, code=b"A = 1\n"), [])
    )
    for folder, state in ((pending, PENDING), (recorded, DONE)):
        told = TrackingState(uri="u", experiment="e", token="t", state=state, inputs=input_stamps(folder.path))
        write_json(folder.path / "tracking.json", asdict(told))

    said = clean("older_than=5", "yes=1").splitlines()
    assert f"{swept.key} stays: the sweep grid names its result" in said
    assert f"{held.key} stays: its result was accepted for {accepted.short}" in said
    assert f"{pending.key} stays: MLflow hasn't all of it yet: doit record KEY" in said
    assert [folder.path.is_dir() for folder in (swept, held, pending, recorded, plain)] == [True] * 3 + [False] * 2


def test_a_run_that_is_under_way_stays(tmp_path: Path, clean: Printed) -> None:
    locked, fresh, dead = (
        ended(tmp_path, letter * 12, State.RUNNING, days=days) for letter, days in (("a", 3), ("b", 0.5), ("c", 3))
    )
    lock = FileLock(locked.lock)
    assert lock.take()
    said = clean("state=RUNNING", "yes=1")
    lock.release()
    assert f"{locked.key} stays: a command is at work on it\n" in said
    assert f"{fresh.key} stays: it hasn't ended, and was written to within a day: another computer may be at" in said
    assert [folder.path.is_dir() for folder in (locked, fresh, dead)] == [True, True, False]


def test_a_run_that_has_changed_since_it_was_shown_stays(
    tmp_path: Path, clean: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path, "f" * 12, State.FAILED)

    def meanwhile(_: object, amount: str) -> bool:
        journal.append(folder.journal, journal.Entry(state=State.KILLED, attempt=2, time=2e9))
        return True

    monkeypatch.setattr(cleaning, "is_confirmed", meanwhile)
    assert clean().splitlines()[-2:] == [
        f"{folder.key} stays: it has changed since it was shown",
        "removed 0 runs, 0 B",
    ]
    assert folder.path.is_dir()


def test_checkpoints_go_and_the_result_stays_whole(tmp_path: Path, clean: Printed) -> None:
    folder, failed = with_checkpoint(finished(tmp_path)), ended(tmp_path, "f" * 12, State.FAILED)
    name_in_sweep(tmp_path, folder.key)
    assert clean("checkpoints=1", "yes=1").splitlines()[-1] == "removed the checkpoints of 1 run, 2.0 MB"
    assert names(folder.path / "checkpoints") == ["best.pt", "final.pt"]
    assert folder.stale_because(key_of().digest) is None
    assert (failed.path / "checkpoints" / "step-00000001.pt").exists()
    assert clean("checkpoints=1", "yes=1").startswith("nothing to remove")


def test_a_removal_that_was_killed_leaves_no_run_and_the_next_call_ends_it(tmp_path: Path, clean: Printed) -> None:
    folder = finished(tmp_path)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from pipeline.runs import lock; from pipeline.runs.folder import RunFolder\n"
        "lock.shutil.rmtree = lambda path: os.kill(os.getpid(), 9)\n"
        "lock.remove(RunFolder(Path(sys.argv[1])), lambda: '')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder.path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert index.rows(tmp_path) == []
    (left,) = names(tmp_path)
    assert clean().splitlines()[0] == f"removed {left}, which a killed command has left"
    assert names(tmp_path) == []


def test_what_the_system_refuses_is_said_with_the_run(
    tmp_path: Path, clean: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path, "f" * 12, State.FAILED)

    def refused(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(
        PacelineError, match=rf"f{{12}} can't be removed: Permission denied \({folder.path}\); removed be"
    ):
        clean("yes=1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("older_than=month",), "older_than=month must be a number of days, such as older_than=30"),
        (("superseded=maybe",), "superseded=maybe must be 1 or 0"),
    ],
)
def test_a_word_that_chooses_nothing_is_refused(clean: Printed, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as error:
        clean(*words)
    assert str(error.value).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("clean train", "doit clean takes no 'train'; valid: checkpoints=, hosts=, json=, older_than="),
        ("clean cf0848", "doit clean chooses runs by rules and takes no key; one run alone is deleted with its folder"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line_with_the_nearest(tmp_path: Path, words: str, said: str) -> None:
    done = preloaded.doit(*words.split(), f"paths.runs={tmp_path}", apart=True)
    error = done.stderr.splitlines()[-1]  # before it may stand that composing takes a while
    assert (done.returncode, done.stdout, error[: len(said) + 7]) == (3, "", f"ERROR: {said}")


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "left"), [("\n", 1), ("y\n", 0)])
def test_at_a_terminal_it_asks_and_no_is_the_default(tmp_path: Path, answer: str, left: int) -> None:
    folder = ended(tmp_path, "f" * 12, State.FAILED)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "doit", "clean", f"paths.runs={tmp_path}"]
    with subprocess.Popen(argv, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, answer.encode())
        said = b""
        try:
            while part := os.read(ours, 4096):
                said += part
        except OSError:  # the process has ended
            pass
    os.close(ours)
    assert process.returncode == 0, said
    assert b"remove 1 run, 3.0 MB? [y/N] " in said
    assert folder.path.is_dir() == bool(left)


def test_a_run_is_superseded_by_a_newer_one_of_equal_configuration_data_and_ranks(tmp_path: Path) -> None:
    old, new = seeded(tmp_path, 0, days=1, code=b"A = 0\n"), seeded(tmp_path, 0)
    failed = ended(tmp_path, "f" * 12, State.FAILED, days=2)
    rows = index.rows(tmp_path)
    parts = {row.key: RunFolder(tmp_path / row.key).read_json("key.json") or {} for row in rows}
    assert superseded(rows, parts) == {old.key: new.key}
    assert superseded(rows, {**parts, failed.key: parts[new.key]}) == {old.key: new.key, failed.key: new.key}
    assert superseded(rows, {**parts, new.key: {**parts[new.key], "data": "other"}}) == {}
