"""Files of a run folder that were edited by hand or damaged: told in one line, and fixed by the same command."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.commands import Project
from tests.integration.conftest import FINISHED


@pytest.mark.ci
@pytest.mark.long
def test_an_edited_result_is_no_fact_for_any_command_and_train_makes_it_again(finished: Project) -> None:
    folder, before = finished.only_run(), finished.result()
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(re.sub(r'"test/accuracy": [\d.]+', '"test/accuracy": 0.9999', text))
    said = f"{folder}/result.json was altered: it doesn't agree with the sha256 of its own text"
    key = f"run={folder.name}"
    for words in (("runs",), ("status", key), ("why", *FINISHED), ("record", key), ("evaluate", key), ("export", key)):
        shown = finished.doit(*words).stdout
        assert "result.json was altered: it doesn't agree with the sha256 of its own text" in shown, words
        assert ("Traceback" in shown, "0.9999" in shown) == (False, False), words
        assert ("finished and intact" in shown, "state    FINISHED" in shown) == (False, False), words
    assert said in finished.doit("reproduce", key).stdout
    done = finished.doit("train", *FINISHED)
    assert done.returncode == 0, done.stdout
    assert finished.states().count("RUNNING") == 1
    after = finished.result()
    later = ("unix_time", "sha256", "duration_s", "files")
    assert {name: value for name, value in after.items() if name not in later} == {
        name: value for name, value in before.items() if name not in (*later, "duration_s", "files")
    }
    assert after["duration_s"] == pytest.approx(before["duration_s"], rel=0.5)
    assert "is finished" in finished.doit("train", *FINISHED).stdout


def test_why_and_export_tell_which_file_of_a_finished_runs_history_was_cut_or_lost(finished: Project) -> None:
    folder, key = finished.only_run(), f"run={finished.only_run().name}"
    (folder / "plan.json").write_text((folder / "plan.json").read_text()[:-20])
    said = f"{folder}/plan.json was altered: it isn't what it was when the run finished"
    shown = finished.doit("why", key).stdout
    assert f"{folder.name}: finished; doit train launches nothing\nWARNING: {said}\n" in shown
    assert "try: another copy of the run folder" in shown
    refused = finished.doit("export", key)
    assert (refused.returncode, said in refused.stdout) == (1, True)
    (folder / "plan.json").unlink()
    told = json.loads(finished.doit("why", *FINISHED, "json=1", apart=True).stdout)["data"]
    assert (told["reason"], told["damage"]) == (None, f"{folder}/plan.json is missing: the run had it when it finished")


@pytest.mark.ci
@pytest.mark.long
def test_the_export_of_a_run_without_a_result_promises_no_reproduction(finished: Project) -> None:
    (finished.only_run() / "result.json").unlink()
    key = f"run={finished.only_run().name}"
    exported = finished.doit("export", key)
    assert exported.returncode == 0, exported.stdout
    assert "can't be made again: run" in exported.stdout
    assert "doit reproduce" not in exported.stdout
    archive = finished.folder / "runs" / "exports" / f"{finished.only_run().name}.tar.gz"
    for named in (key, f"run={archive}"):
        refused = finished.doit("reproduce", named)
        assert refused.returncode == 1
        assert "has no result to compare with: it isn't finished" in refused.stdout


@pytest.mark.long
def test_a_report_is_made_again_though_the_link_to_the_data_is_gone(finished: Project) -> None:
    folder = finished.only_run()
    (folder / "evaluation" / "report.json").unlink()
    (folder / "data").unlink()
    (folder / "data").mkdir()
    refused = finished.doit("evaluate", f"run={folder.name}")
    assert refused.returncode == 1
    assert "try: doit train with the words of the run, which links its data" in refused.stdout
    done = finished.doit("train", *FINISHED)
    assert done.returncode == 0, done.stdout
    assert finished.states().count("RUNNING") == 1
    assert "is finished" in finished.doit("train", *FINISHED).stdout
