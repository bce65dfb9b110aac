"""Finished and intact, or why not; a run found by its key."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.documents import write_sealed
from pipeline.core.errors import PacelineError, TrainingError, UsageError, os_reason
from pipeline.core.files import write_json
from pipeline.execution.launch_folder import RunInputs, restore
from pipeline.keys.content_key import KEY_VERSION, ContentKey
from pipeline.runs import index as runs
from pipeline.runs.folder import DESCRIBED, ORIGIN, RunFolder
from pipeline.runs.lock import RunLock, ask_to_stop, locked
from pipeline.runs.result import AlteredError
from pipeline.runs.status import status
from tests.pipeline import finished_folder
from tests.pipeline.finished_folder import TARGETS, key_of

KEY = key_of()


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    return finished_folder.finished(tmp_path)


def _altered(path: Path) -> None:
    before = path.read_bytes()
    path.write_bytes(bytes([before[0] ^ 1]) + before[1:])


def _truncated(path: Path) -> None:
    os.truncate(path, 3)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(_truncated, "has 3 bytes, {} were written"), (Path.unlink, "is missing")],
)
@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_target_is_found(finished: RunFolder, name: str, damage: Callable[[Path], None], reason: str) -> None:
    assert finished.stale_because(KEY.digest) is None
    size = (finished.path / name).stat().st_size
    damage(finished.path / name)
    assert finished.stale_because(KEY.digest) == f"{name} {reason.format(size)}"


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_written_again_with_its_old_time_is_found_and_an_equal_one_is_not(
    finished: RunFolder, name: str
) -> None:
    path = finished.path / name
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert finished.stale_because(KEY.digest) is None
    _altered(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert finished.stale_because(KEY.digest) == f"{name} was altered"


def test_a_training_counts_as_done_only_with_the_outputs_it_left(finished: RunFolder) -> None:
    assert finished.training_done(KEY)
    assert not finished.training_done(ContentKey(digest="f" * 64, parts={}))
    finished.result.unlink()
    assert finished.training_done(KEY)
    for name in ("predictions.json", "checkpoints/final.pt"):
        before = (finished.path / name).read_bytes()
        (finished.path / name).write_text("same size!")
        assert not finished.training_done(KEY)
        (finished.path / name).write_bytes(before)
    _altered(finished.summary)
    assert not finished.training_done(KEY)


def test_another_key_or_no_result_is_not_finished(finished: RunFolder) -> None:
    assert finished.stale_because("f" * 64) == "result.json belongs to another key"
    finished.result.unlink()
    assert finished.stale_because(KEY.digest) == "not finished yet"


def test_a_result_that_holds_no_digest_of_the_weights_is_neither_written_nor_believed(finished: RunFolder) -> None:
    result = finished.read_result()
    assert result is not None
    write_sealed(finished.result, {**result.fields, "files": {}})
    assert finished.stale_because(KEY.digest) == "result.json holds no digest of checkpoints/final.pt"
    (finished.path / "metrics.jsonl").unlink()
    with pytest.raises(TrainingError, match=r"metrics\.jsonl is missing: it, or the whole folder, was removed"):
        finished.write_result(key=KEY, summary={}, hosts=[], attempts=1, duration_s=1.0, mlflow_run_id=None)


def damaged(text: str) -> list[bytes]:
    """A JSON file in the ways that hands, disks and attackers leave it."""
    return [
        b"",
        text.encode()[: len(text) // 2],
        text.replace("0.5", "0.9999").encode(),
        text.replace('"FINISHED"', "null").encode(),
        b"\xff\xfe" + text.encode(),
        b"null",
        b"[]",
        b'{"files": null}',
        b'{"files": {"metrics.jsonl": null}, "key": 1, "state": [], "metrics": {"a": "b"}}',
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"metrics": {"test/accuracy": ' + b"1" * 10_000_000 + b"}}",
        text.replace("0.5", "NaN").encode(),
        text.replace('"state"', '"metrics": {"test/accuracy": 1.0},\n  "state"').encode(),
    ]


@pytest.mark.slow
def test_a_result_that_was_altered_is_told_and_made_again_from_what_the_nodes_left(finished: RunFolder) -> None:
    written = finished.result.read_text()
    for data in damaged(written):
        finished.result.write_bytes(data)
        with pytest.raises(AlteredError, match=r"result\.json was altered: it ") as caught:
            finished.read_result()
        assert "try: doit train with the words of the run   (makes it again" in str(caught.value)
        assert str(finished.stale_because(KEY.digest)).startswith("result.json was altered: it ")
        (row,) = runs.rows(finished.path.parent)
        assert (row.state, row.accuracy) == ("ALTERED", None)
        assert "\n  state    ALTERED; the command that started it makes it again\n" in status(finished)
        assert finished.training_done(KEY)
        assert finished.recorded_files() == {}
    finished.result.write_text(written)
    assert finished.stale_because(KEY.digest) is None


def test_a_result_of_another_run_is_not_taken_for_this_ones(finished: RunFolder) -> None:
    other = finished_folder.finished(finished.path.parent, finished_folder.key_of(torch="2.15.0"))
    finished.result.write_bytes(other.result.read_bytes())
    with pytest.raises(AlteredError, match=f"it is that of run {other.key}"):
        finished.read_result()


def test_damaged_descriptions_cost_no_training_and_are_written_again(finished: RunFolder) -> None:
    config, pack = finished_folder.CONFIG, finished.path / "pack"
    run = RunInputs(key=KEY, config=config, config_yaml="some bytes", sources={}, pack_path=pack)
    before = {name: (finished.path / name).read_bytes() for name in DESCRIBED if name != "config.yaml"}
    for name in before:
        for data in damaged(before[name].decode()):
            (finished.path / name).write_bytes(data)
            if data != before[name]:
                assert str(finished.stale_because(KEY.digest)).startswith(name)
            assert finished.training_done(KEY)
            restore(finished, run)
            assert finished.stale_because(KEY.digest) is None
            assert (finished.path / name).read_bytes() == before[name]


def test_without_a_result_a_damaged_key_or_summary_is_no_finished_training(finished: RunFolder) -> None:
    finished.result.unlink()
    for name in ("key.json", "summary.json"):
        before = (finished.path / name).read_bytes()
        for data in damaged(before.decode()):
            if data != before:
                (finished.path / name).write_bytes(data)
                assert not finished.training_done(KEY), data[:80]
        (finished.path / name).write_bytes(before)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(finished: RunFolder) -> None:
    finished.result.unlink()
    os.mkfifo(finished.result)
    with pytest.raises(AlteredError, match="it is cut off"):
        finished.read_result()


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_json(tmp_path / "key.json", {})
    assert os_reason(caught.value) == f"No space left on device ({tmp_path}/key.json)"
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_found_by_the_beginning_of_its_key(finished: RunFolder) -> None:
    assert runs.find(finished.path.parent, KEY.short[:4]) == finished
    assert [(row.key, row.state, row.accuracy) for row in runs.rows(finished.path.parent)] == [
        (KEY.short, "FINISHED", 0.5)
    ]
    with pytest.raises(UsageError, match="zz: no such run"):
        runs.find(finished.path.parent, "zz")


FILES = (*TARGETS, *ORIGIN, "result.json", "journal.jsonl", "plan.json", "attempts.json", "tracking.json")


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_the_place_of_a_file_is_a_damaged_file(finished: RunFolder, name: str) -> None:
    other = finished_folder.finished(finished.path.parent, key_of(torch="2.15.0"))
    path = finished.path / name
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    if name in (*TARGETS, "result.json"):
        assert finished.stale_because(KEY.digest) in (
            f"{name} is a directory, not a file",
            "result.json was altered: it is a directory, not a file",
        )
    assert other.key in [row.key for row in runs.rows(finished.path.parent)]
    assert status(finished)


@pytest.mark.parametrize("number", ["9" * 200, "9" * 5000, "[" * 5000, '{"a":' * 5000, "[]", '"x"', "1e9"])
def test_a_key_file_that_nobody_can_parse_is_said_and_hides_no_other_run(finished: RunFolder, number: str) -> None:
    text = (finished.path / "key.json").read_text()
    (finished.path / "key.json").write_text(text.replace(f'"version": {KEY_VERSION}', f'"version": {number}'))
    (row,) = runs.rows(finished.path.parent)
    newer = number == "9" * 200  # a number like any other
    assert (row.state, row.accuracy) == ("NEWER" if newer else "ALTERED", None)
    assert (finished.read_json("key.json") is None) == (len(number) >= 5000)


@pytest.mark.parametrize("name", ["key.json", "config.json"])
@pytest.mark.parametrize("damage", ["edited", "no text", "removed"])
def test_a_configuration_or_a_key_that_is_not_what_was_written_is_altered_in_lists(
    finished: RunFolder, name: str, damage: str
) -> None:
    path = finished.path / name
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"\xff\xfe" if damage == "no text" else path.read_bytes().replace(b'"seed": 0', b'"seed": 9'))
    (row,) = runs.rows(finished.path.parent)
    assert (row.state, row.accuracy) == ("ALTERED", None)
    assert f"{path} " in row.note
    assert "\n  state    ALTERED; the command that started it makes it again\n" in status(finished)
    assert row.what == ("digits small_cnn sgd" if name == "config.json" else "?")  # which the key still vouches for
    assert status(finished).startswith(f"{finished.key}  {row.what}\n")


def test_a_configuration_nested_deeper_than_any_is_altered_and_recursed_over_by_nobody(finished: RunFolder) -> None:
    key = finished.read_key()
    assert key is not None
    (finished.path / "config.json").write_text('{"a":' * 600 + "1" + "}" * 600)
    assert finished.config_altered(key) == "can't be read"


@pytest.mark.parametrize("name", ["result.json", "summary.json", "metrics.jsonl", "checkpoints/final.pt"])
def test_lists_and_status_call_the_same_runs_altered(finished: RunFolder, name: str) -> None:
    path = finished.path / name
    edited = b'{"t": 1.0, "step": 5, "epoch": 1, "metrics": {"val/accuracy": 0.9999}}\n'
    path.write_bytes(edited if path.suffix == ".jsonl" else path.read_bytes().swapcase())
    (row,) = runs.rows(finished.path.parent)
    assert (row.state, row.accuracy) == ("ALTERED", None)
    assert f"{path} " in row.note
    assert "\n  state    ALTERED; " in status(finished)
    assert "0.9999" not in status(finished)
    with locked(finished, print):  # a command makes it again
        (row,) = runs.rows(finished.path.parent)
        assert (row.state, "\n  state    PLANNED" in status(finished)) == ("PLANNED", True)


@pytest.mark.parametrize(
    "name",
    [
        *("journal.jsonl", "code", "attempts", "attempts/7", "attempts/1/node0.log", "evaluation", "stop", "outputs"),
        *("work", "work/node0", "work/node0/above", "work/node0/above/above", "work/node0/above/above/code"),
    ],
)
def test_nothing_is_written_through_a_link_of_a_run_folder(finished: RunFolder, name: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    path = finished.path / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(precious / "thesis.tex" if path.suffix else precious)
    said = re.escape(f"{path} is a link to {precious}")
    with pytest.raises(PacelineError, match=said):
        ask_to_stop(finished)
    with pytest.raises(PacelineError, match=said), locked(finished, print):
        pass
    assert [(item.name, item.read_text()) for item in precious.iterdir()] == [("thesis.tex", "years")]
    lock = RunLock(finished)
    assert lock.take(), "the lock is given back"
    lock.release()
