"""What lies below runs/steps: outputs that are looked at again, notes of digests, logs, and what may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from pipeline.cli.commands import steps
from pipeline.cli.session import Session
from pipeline.core.errors import PacelineError
from pipeline.core.locks import held
from pipeline.data import trees
from pipeline.keys.script_files import DataPath
from pipeline.steps import graph, step_folders
from tests.pipeline.steps.conftest import StepProject


def test_a_log_is_that_of_the_step_and_of_none_whose_name_begins_so(project: StepProject) -> None:
    project.step("clean", "{command: [x], outputs: [x]}")
    project.write("runs/steps/clean-0123456789ab.log", "mine")
    project.write("runs/steps/clean-up-0123456789ab.log", "newer")
    current = cast("Session", SimpleNamespace(steps=project.graph()))
    assert steps.log_of(current, "clean").read_text() == "mine"


def test_files_behind_a_link_in_an_input_folder_count(project: StepProject) -> None:
    """They didn't: an edit there left the step up to date."""
    project.write("raw/a.csv", "1")
    behind = project.write("elsewhere/b.csv", "1")
    (project.root / "raw/more").symlink_to(behind.parent)
    (project.root / "raw/more/up").symlink_to(project.root / "raw")
    project.step("one", 'command: cat "$@" > "$out/x"\ninputs: [raw]\noutputs: [x]\n')
    assert project.make("one") == 1
    assert (project.out("one") / "x").read_text() == "11"
    behind.write_text("2")
    assert project.why("one") == ("input raw/more/b.csv changed",)


def test_an_output_is_meant_by_its_name_where_that_looks_like_a_pattern(project: StepProject) -> None:
    project.step("one", 'command: touch "$out/x[1].txt"\noutputs: ["x[1].txt"]\n')
    assert project.make("one") == 1


@pytest.mark.slow
def test_altered_outputs_are_made_anew(project: StepProject) -> None:
    project.step("one", 'command: echo 1 > "$out/x"\noutputs: [x]\n')
    project.make("one")
    out = project.out("one")
    (out / "x").write_text("2\n")
    assert project.why("one") == ("its output x was altered",)
    assert project.make("one") == 1
    assert (out / "x").read_text() == "1\n"
    assert project.left == [out.parent.name]


@pytest.mark.slow
def test_clean_finds_what_is_damaged_and_logs_of_failures_and_leaves_what_is_being_made(project: StepProject) -> None:
    project.step("good", 'command: touch "$out/x"\noutputs: [x]\n')
    project.step("bad", "command: echo why; exit 3\noutputs: [x]\n")
    for seed, record in ((0, None), (1, "{"), (2, "")):
        project.step("good", f'command: touch "$out/x"; echo {seed}\noutputs: [x]\n')
        project.make("good")
        if record is not None:
            path = project.out("good").parent / step_folders.RECORD
            path.write_text(record) if record else path.unlink()
    project.make("good")
    with pytest.raises(PacelineError, match="exit code 3"):
        project.make("bad")
    project.write("runs/steps/notes/of_a_person.txt", "")
    going, staying = graph.find_unneeded(project.graph(), project.root / "data")
    reasons = sorted((path.name.rpartition("-")[0], why) for path, why in going.items())
    damaged = ("good", "its step.json is gone or damaged")
    assert reasons == [("bad", "the log of a failed step"), damaged, ("good", "nothing needs it")]
    assert [*staying.values()] == ["it is up to date"]
    (log,) = (path for path in going if path.suffix == ".log")
    with held(step_folders.lock_of(log.with_suffix(""))):
        assert log not in graph.find_unneeded(project.graph(), project.root / "data")[0]
        assert not graph.remove(log)
    assert all(graph.remove(path) for path in going)
    assert project.left == sorted([next(iter(staying)).name, "notes"])


@pytest.mark.slow
@pytest.mark.parametrize("inside", [".", "x"])
def test_clean_leaves_what_the_data_of_a_script_leads_to(project: StepProject, inside: str) -> None:
    project.step("one", 'command: echo $seed > "$out/x"; touch "$out/y"\nargs: {seed: "${seed}"}\noutputs: [x]\n')
    project.make("one", seed=1)
    out, data_dir = project.out("one", seed=1), project.root / "data"
    trees.tree([DataPath("program.data", out / inside)], data_dir).create()
    assert graph.find_unneeded(project.graph(), data_dir) == ({}, {out.parent: "a data pack was made of it"})
