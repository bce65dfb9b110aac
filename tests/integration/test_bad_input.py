"""What a person sees who gives `doit` something that can't work: one error, the right exit code, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.commands import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_a_folder_of_runs_that_cannot_be_made_is_one_error(project: Project) -> None:
    (project.folder / "runs").write_text("a file")
    done = project.doit("train", "experiment=quickstart", "tracking=none")
    assert done.returncode == 1
    assert f"File exists ({project.folder}/runs)\n  try: " in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("evaluate", "run=nope"), "run=nope: no such run"),
        (("record", "run=nope"), "run=nope: no such run"),
        (("ui", "port=99999"), "port=99999 must be a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_word_that_only_the_verb_can_check_ends_with_the_code_of_a_wrong_command(
    project: Project, words: tuple[str, str], said: str
) -> None:
    done = project.doit(*words)
    assert done.returncode == 3
    assert said in done.stdout
    assert "Traceback" not in done.stdout
