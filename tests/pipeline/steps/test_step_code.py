"""What of a command counts in the key of its step, and what the observer reports instead."""

from __future__ import annotations

import pytest

from pipeline.core.files import canonical_json
from tests.pipeline.steps.conftest import StepProject

FILES = {
    "notes.txt": "1\n",
    "k.py": "from lib2 import helper\nprint(helper.VALUE)\n",
    "lib2/__init__.py": "",
    "lib2/helper.py": "VALUE = 1\n",
    "lib2/mod.py": "from lib2 import helper\n",
    "lib2/__main__.py": "print(1)\n",
    "plain": "import lib2.helper\n",
}
NOTES = [
    'cat <notes.txt >"$out/o.txt"',
    'x --cfg=notes.txt > "$out/o.txt"',
    "for x in 1; do cat notes.txt; done # it's no comment",
    ["x", "--cfg=notes.txt"],
]
HELPER = [
    "python k.py; true",
    "true | python - <k.py",
    'x="$(python k.py)"',
    "python -u -X dev k.py",
    "A=1 python -m lib2.mod",
    "env python3 k.py",
    ["env", "A=1", "python", "-m", "lib2.mod"],
    ["bash", "-c", "python k.py && true"],
]
CASES = [
    *((command, "notes.txt") for command in NOTES),
    *((command, "lib2/helper.py") for command in HELPER),
    ("python -m lib2", "lib2/__main__.py"),
    ('python "$script"', "k.py"),
]


def declare(project: StepProject, command: str | list[str], inputs: str = "") -> None:
    more = "args: {script: k.py}\n" if "$script" in command else ""
    project.step("a", f"command: {canonical_json(command)}\noutputs: [o.txt]\ninputs: [{inputs}]\n{more}")


@pytest.mark.parametrize(("command", "edited"), CASES, ids=[f"{command}" for command, _ in CASES])
def test_an_edit_of_what_a_command_names_gives_another_key(
    project: StepProject, command: str | list[str], edited: str
) -> None:
    for name, text in FILES.items():
        project.write(name, text)
    declare(project, command)
    before = project.graph().status("a").key
    assert before is not None
    project.write(edited, "VALUE = 2\n")
    after = project.graph().status("a").key
    assert after is not None
    assert before.digest != after.digest
    assert bool(before.parts["environment"]) == ("python" in str(command) or edited == "k.py")


@pytest.mark.parametrize("command", ['cd "$x" && python k.py', 'python "$1"', ["python", "{inputs[0]}"]])
def test_python_files_among_the_inputs_count_with_what_they_import(
    project: StepProject, command: str | list[str]
) -> None:
    for name, text in FILES.items():
        project.write(name, text)
    declare(project, command, "k.py")
    before = project.graph().status("a").key
    project.write("lib2/helper.py", "VALUE = 2\n")
    assert project.graph().status("a").key != before


@pytest.mark.parametrize(("script", "files"), [("k.py", ["k.py", "near.py"]), ("a/k.py", ["a/k.py", "a/near.py"])])
def test_files_that_a_script_imports_count_by_their_paths_in_the_project(
    project: StepProject, script: str, files: list[str]
) -> None:
    for name in files:
        project.write(name, "" if name.endswith("near.py") else "import near\n")
    declare(project, f"python {script}")
    key = project.graph().status("a").key
    assert key is not None
    assert [*key.parts["code"]] == files


@pytest.mark.parametrize("command", ["echo python", "python --version", 'cat notes.txt > "$out/o.txt" 2>made.txt'])
def test_what_is_only_written_to_counts_nothing(project: StepProject, command: str) -> None:
    declare(project, command)
    project.write("made.txt", "1")
    before = project.graph().status("a").key
    project.write("made.txt", "2")
    assert project.graph().status("a").key == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["cd lib2; python -m helper", 'python -c "from lib2 import helper"', "python plain"]
)
def test_what_python_imports_where_the_command_does_not_name_it_is_reported_and_makes_it_anew(
    project: StepProject, command: str
) -> None:
    for name, text in FILES.items():
        project.write(name, text)
    declare(project, f'{command}; touch "$out/o.txt"')
    assert (project.make("a"), project.make("a")) == (1, 0)
    (said,) = [line for line in project.said if "WARNING" in line]
    assert said.startswith("WARNING: the key of step a is not complete: ")
    assert "lib2/helper.py" in said
    project.write("lib2/helper.py", "VALUE = 2\n")
    assert project.why("a") == ("lib2/helper.py, which it read and its key lacks, changed",)


@pytest.mark.slow
def test_a_program_outside_of_the_project_makes_the_step_anew_when_it_changes(
    project: StepProject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path_factory.mktemp("bin") / "tool"
    program.write_text('#!/bin/sh\necho 1 > "$1/o.txt"\n')
    program.chmod(0o755)
    declare(project, [str(program), "{out}"])
    assert (project.make("a"), project.make("a")) == (1, 0)
    assert not [line for line in project.said if "WARNING" in line]
    program.write_text('#!/bin/sh\necho 2 > "$1/o.txt"\n')
    assert project.why("a") == (f"{program}, which it read and its key lacks, changed",)
    project.make("a")
    assert (project.out("a") / "o.txt").read_text() == "2\n"
