"""A person's word that a finished run holds for another key: as long as that run is intact, and never as a proof."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.commands.accept import accept
from pipeline.cli.session import session
from pipeline.core import documents
from pipeline.core.errors import PacelineError
from pipeline.core.files import write_json
from pipeline.execution.launch_folder import RunInputs, prepare
from pipeline.keys.content_key import differences
from pipeline.reproduction import archive
from pipeline.runs import acceptance
from pipeline.runs import index as runs
from pipeline.runs.folder import RunFolder
from pipeline.runs.result import AlteredError
from pipeline.tracking.description import describe
from tests.pipeline.finished_folder import CONFIG, finished, key_of
from tests.read_only import mounted

NEW = key_of(torch="2.15.0")


@pytest.fixture
def base(tmp_path: Path) -> RunFolder:
    return finished(tmp_path)


@pytest.fixture
def folder(base: RunFolder) -> RunFolder:
    """Of the new key, for which the finished run was accepted."""
    key, folder = key_of(), RunFolder(base.path.with_name(NEW.short))
    run = RunInputs(key=NEW, config=CONFIG, config_yaml="", sources={}, pack_path=None)
    prepare(folder, run)
    write_json(folder.path / "provenance.json", {})
    (folder.path / "changes.patch").touch()
    found = acceptance.by_this_user(NEW, key, differences(key.parts, NEW.parts))
    acceptance.write(folder, found)
    return folder


def accepted(folder: RunFolder) -> acceptance.Acceptance:
    found = acceptance.read(folder)
    assert found is not None
    return found


def test_the_finished_run_holds_for_the_new_key_and_every_list_says_by_whose_word(
    base: RunFolder, folder: RunFolder
) -> None:
    result, found = acceptance.result_or_accepted(folder)
    assert result is not None
    assert found is not None
    assert (result.key, found.proven) == (base.key, False)
    assert [str(item) for item in found.differences] == ["torch 2.14.0 → 2.15.0"]
    assert acceptance.stale_because(folder, found, NEW.digest) is None
    rows = {row.key: row for row in runs.rows(base.path.parent)}
    assert (rows[NEW.short].state, rows[NEW.short].accuracy) == ("ACCEPTED", 0.5)
    assert f"accepted, not proven: as {base.key}, by " in rows[NEW.short].note
    assert (rows[base.key].state, rows[base.key].note) == ("FINISHED", "")
    assert list(runs.finished_parts(base.path.parent)) == [base.key]  # an accepted run is no candidate for another


def test_mlflow_shows_with_the_finished_run_what_it_was_accepted_for_until_that_is_taken_back(
    base: RunFolder, folder: RunFolder
) -> None:
    tags = describe(base.path).tags
    assert f"{NEW.short}: accepted, not proven: as {base.key}" in tags["paceline.accepted_for"]
    assert f"**Accepted, not proven** for the key {NEW.short}" in tags["mlflow.note.content"]
    assert "- torch 2.14.0 → 2.15.0" in tags["mlflow.note.content"]
    acceptance.write(folder, replace(accepted(folder), proven=True))
    tags = describe(base.path).tags
    assert f"{NEW.short}: accepted and proven equal: as {base.key}" in tags["paceline.accepted_for"]
    assert f"**Accepted and proven equal** for the key {NEW.short}" in tags["mlflow.note.content"]
    acceptance.withdraw(folder, accepted(folder))
    assert acceptance.result_or_accepted(folder) == (None, None)
    tags = describe(base.path).tags
    assert "paceline.accepted_for" not in tags
    assert "ccepted" not in tags["mlflow.note.content"]


def test_an_archive_carries_the_word_and_the_result_that_is_to_be_proven(
    base: RunFolder, folder: RunFolder, tmp_path: Path
) -> None:
    archive.export(folder, root=tmp_path, to=tmp_path / "a.tar.gz", weights=False)
    there = archive.unpack(tmp_path / "a.tar.gz", tmp_path / "there", root=tmp_path)
    result, found = acceptance.result_or_accepted(there)
    assert (result, found) == (base.read_result(), accepted(folder))
    (there.path / acceptance.BASE_RESULT_FILE).write_bytes(finished(tmp_path / "other", NEW).result.read_bytes())
    with pytest.raises(AlteredError, match=f"accepted_result.json was altered: it is not that of run {base.key}"):
        acceptance.result_or_accepted(there)
    (base.path / "checkpoints" / "final.pt").unlink()  # it holds no longer, and isn't carried on
    archive.export(folder, root=tmp_path, to=tmp_path / "b.tar.gz", weights=False)
    assert acceptance.result_or_accepted(archive.unpack(tmp_path / "b.tar.gz", tmp_path / "b", root=tmp_path)) == (
        None,
        None,
    )


@pytest.mark.parametrize("name", ["checkpoints/final.pt", "result.json", "evaluation/report.json"])
@pytest.mark.parametrize("removed", [True, False])
def test_the_word_holds_no_longer_than_the_run(base: RunFolder, folder: RunFolder, name: str, removed: bool) -> None:
    (base.path / name).unlink()
    if not removed:
        (base.path / name).write_text("another!!!")
    why = acceptance.stale_because(folder, accepted(folder), NEW.digest)
    assert str(why).startswith(f"it was accepted as {base.key}, which holds no longer: ")
    assert acceptance.result_or_accepted(folder) == (None, None)
    assert {row.key: row.accuracy for row in runs.rows(base.path.parent)}[NEW.short] is None


def test_an_edited_word_or_one_of_another_run_is_none(folder: RunFolder) -> None:
    path = folder.path / acceptance.FILE
    text = path.read_text()
    for damage in (text.replace('"proven": false', '"proven": true'), text[:40], "null", "{}", "[" * 100_000):
        path.write_text(damage)
        with pytest.raises(AlteredError, match=r"accepted\.json was altered: it "):
            acceptance.read(folder)
    path.write_text(text)
    other = RunFolder(folder.path.rename(folder.path.with_name("ba9876543210")))
    with pytest.raises(AlteredError, match="is that of another run"):
        acceptance.read(other)


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", "../../../etc"), ("run", 7), ("run", "/etc"), ("digest", 7), ("who", "\x1b[2J"), ("unix_time", 10**40),
     ("unix_time", "x"), ("unix_time", float("nan")), ("differences", 3), ("differences", [3])],
)  # fmt: skip
def test_a_word_that_was_sealed_anew_with_what_no_word_holds_is_none(
    folder: RunFolder, field: str, value: object
) -> None:
    told = documents.read_sealed(folder.path / acceptance.FILE)
    documents.write_sealed(folder.path / acceptance.FILE, {**told, field: value})
    with pytest.raises(AlteredError, match=r"accepted\.json was altered: it "):
        acceptance.read(folder)


def test_a_result_of_its_own_stands_before_any_word(base: RunFolder, folder: RunFolder) -> None:
    made = finished(base.path.parent / "elsewhere", NEW)
    folder.result.write_bytes(made.result.read_bytes())
    result, found = acceptance.result_or_accepted(folder)
    assert (result is not None and result.key, found) == (NEW.short, None)


def test_the_notes_of_two_keys_stand_side_by_side(base: RunFolder, folder: RunFolder) -> None:
    third = key_of(torch="2.16.0")
    other = RunFolder(base.path.with_name(third.short))
    acceptance.write(other, acceptance.by_this_user(third, key_of(), []))
    assert set(acceptance.accepted_for(base.path)) == {NEW.short, third.short}
    acceptance.withdraw(other, accepted(other))
    assert set(acceptance.accepted_for(base.path)) == {NEW.short}
    assert "sha256" in json.loads((base.path / acceptance.AS_FILE).read_text())


@pytest.mark.slow
def test_runs_that_can_not_be_written_to_are_named_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with mounted(tmp_path / "empty", tmp_path / "runs") as runs_dir:
        words = ["program.script=examples/train.py", f"paths.runs={runs_dir}", f"paths.data={tmp_path}/data"]
        monkeypatch.setattr(sys, "argv", ["doit", "accept", *words])
        session.cache_clear()
        said = rf"for run \w{{12}} can't be written: Read-only file system \({runs_dir}/.*\)\n  try: .*paths\.runs=<a"
        try:
            with pytest.raises(PacelineError, match=said):
                accept(session())
        finally:
            session.cache_clear()
