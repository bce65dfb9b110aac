"""Whatever a command names counts in the key of its step, however it is written."""

from __future__ import annotations

import pytest

from pipeline.core.files import canonical_json
from pipeline.steps.step import StepError
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
    "cat notes.txt>$out/o.txt",
    'cd lib2 && cat ../notes.txt > "$out/o.txt"',
    'cat *.txt > "$out/o.txt"',
    'x --cfg=notes.txt > "$out/o.txt"',
    '(cd "$out"); cat notes.txt',
    "for x in 1; do cat notes.txt; done # it's no comment",
    ["x", "--cfg=notes.txt"],
    ["bash", "-c", "cat notes.txt | x"],
]
HELPER = [
    "python k.py; true",
    "python <k.py",
    "true | python - <k.py",
    'cd lib2 && python ../k.py "$out"',
    '(cd lib2\npython ../k.py "$out")',
    "if true; then python k.py; fi",
    'x="$(python k.py)"',
    "x=`python k.py`",
    "python -u -X dev k.py",
    "python plain",
    'python -c "from lib2 import helper; print($x)" > "$out/o.txt"',
    "A=1 python -m lib2.mod",
    "cd lib2; python -m helper",
    "cd lib2; python -c 'import helper'",
    "python \\\n  k.py",
    "env python3 k.py",
    "timeout 9 .venv/bin/python3.11 -um lib2.mod",
    'cp -r lib2 "$out"',
    ["python", "-c", "from lib2 import helper"],
    ["python", "-mlib2.mod"],
    ["env", "A=1", "python", "-m", "lib2.mod"],
    ["python", "plain", "{out}", "lib2"],
    ["x", "lib2"],
    ["bash", "-c", "python k.py && true"],
]
CASES = [
    *((command, "notes.txt") for command in NOTES),
    *((command, "lib2/helper.py") for command in HELPER),
    ("python -m lib2", "lib2/__main__.py"),
    ("python lib2", "lib2/__main__.py"),
    ('python "$script"', "k.py"),
]


def declare(project: StepProject, command: str | list[str], inputs: str = "") -> None:
    more = "args: {script: k.py}\n" if isinstance(command, str) else ""
    project.step("a", f"command: {canonical_json(command)}\noutputs: [o.txt]\ninputs: [{inputs}]\n{more}")


@pytest.mark.parametrize(("command", "edited"), CASES, ids=[f"{command}" for command, _ in CASES])
def test_an_edit_of_what_a_command_names_gives_another_key(
    project: StepProject, command: str | list[str], edited: str
) -> None:
    for name, text in FILES.items():
        project.write(name, text)
    declare(project, command)
    before = project.graph().standing("a").key
    assert before is not None
    project.write(edited, "VALUE = 2\n")
    after = project.graph().standing("a").key
    assert after is not None
    assert before.digest != after.digest
    assert bool(before.parts["environment"]) == ("python" in str(command) or edited == "k.py")


@pytest.mark.parametrize(
    "command",
    ['cd "$x" && python k.py', 'python "$1"', "cat k.py | python", "python $x/k.py", ["python", "{inputs[0]}"]],
)
def test_python_of_which_nobody_can_tell_what_it_runs_is_refused_until_inputs_name_it(
    project: StepProject, command: str | list[str]
) -> None:
    for name, text in FILES.items():
        project.write(name, text)
    declare(project, command, "notes.txt")
    with pytest.raises(StepError, match=r"step a: what `python.* runs can't be told from its command") as error:
        project.graph().standing("a")
    assert "name the file in inputs: [FILE.py]" in str(error.value)
    declare(project, command, "k.py")
    before = project.graph().standing("a").key
    project.write("lib2/helper.py", "VALUE = 2\n")
    assert project.graph().standing("a").key != before


@pytest.mark.parametrize("command", ["echo python", "python --version", 'cat notes.txt > "$out/o.txt" 2>made.txt'])
def test_what_is_only_said_or_written_to_counts_nothing_and_is_not_refused(project: StepProject, command: str) -> None:
    declare(project, command)
    project.write("made.txt", "1")
    before = project.graph().standing("a").key
    project.write("made.txt", "2")
    assert project.graph().standing("a").key == before


def test_a_refusal_shows_no_secret(project: StepProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "t0psecret-value")
    text = "command: 'python $API_TOKEN'\noutputs: [x]\nenv: {API_TOKEN: '${oc.env:API_TOKEN}'}\n"
    project.step("a", text)
    with pytest.raises(StepError, match=r"what `python \*\*\*` runs") as error:
        project.graph().standing("a")
    assert "t0psecret" not in str(error.value)
