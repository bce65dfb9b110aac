"""Steps that can't work as they are told: one message that names the field, and nothing is written."""

from __future__ import annotations

import time
from functools import partial

import pytest

import pipeline.steps
from pipeline.cli.commands import steps
from pipeline.core.errors import UsageError
from pipeline.steps.step import StepError
from tests.pipeline.steps.conftest import StepProject


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("outputs: [x]", "step a has neither a command nor a function"),
        ("{command: [x], function: m:f, outputs: [x]}", "step a has both a command and a function"),
        ("{comand: [x], outputs: [x]}", "'comand' is no field of a step; did you mean command?"),
        ("{command: [x]}", "step a names no outputs"),
        ("{command: [x], outputs: [../x]}", "'step a: outputs: ../x' leads out of the step's folder"),
        ("{command: [x], outputs: [/etc/x]}", "'step a: outputs: /etc/x' leads out of the step's folder"),
        ("{command: [x, '{run}'], outputs: [x]}", "{run} is no placeholder; there are {out}, {inputs}"),
        ("{command: [x, '{inputs[1]}'], outputs: [x]}", "there are 0 inputs, counted from 0"),
        ("{command: {a: b}, outputs: [x]}", "is neither a list of words nor a line for bash"),
        ("{command: 'echo ${seed}', outputs: [x]}", "which would be pasted into a line for bash"),
        ("{command: 'echo', args: {PATH: x}, outputs: [x]}", "args.PATH='x'"),
        ("{function: clean, outputs: [x]}", "function: 'clean' is not package.module:name"),
        ("{command: [x, '${optimizer.lrr}'], outputs: [x]}", "optimizer.lrr"),
        ("{command: [x], inputs: [../secret], outputs: [x]}", "inputs: '../secret' leads out with .."),
        ("{command: [x], inputs: ['step:../x'], outputs: [x]}", "'..' can't be the name of a step"),
        ("{command: [x], inputs: [no/such.csv], outputs: [x]}", "inputs: 'no/such.csv' matches no file"),
        ("{command: [x], inputs: ['step:b'], outputs: [x]}", "there is no step 'b'"),
        ("{command: [x], inputs: [.], outputs: [x]}", "inputs: '.' holds "),
        ("{command: [x], env: [A=c], outputs: [x]}", "step a: env=['A=c'] is no mapping"),
        ("{command: [x], inputs: ['raw/a**.csv'], outputs: [x]}", "inputs: 'raw/a**.csv': ** stands for folders"),
        ("{command: [x], outputs: ['a**']}", "outputs: 'a**': ** stands for folders"),
        (f"{{command: [x], inputs: [{'a' * 300}], outputs: [x]}}", "can't be read: File name too long"),
        ("{command: ':', args: {out: b}, outputs: [x]}", "args.out: $out is the folder for its outputs"),
        ("[1, 2]", "step a"),
        ("{command: [x", "conf/step/a.yaml can't be read"),
        ("{function: 'no_such_module_here:f', outputs: [x]}",
         "step.a.function=no_such_module_here:f: there is no module no_such_module_here under"),
    ],
)  # fmt: skip
def test_one_message_names_the_field_and_nothing_is_written(project: StepProject, fields: str, message: str) -> None:
    project.step("a", fields)
    with pytest.raises(UsageError) as error:
        project.make("a")
    assert message in str(error.value)
    assert not (project.root / "runs/steps").exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make(inputs): ...", "step.a: make (own_step.py:1) has no argument out, which every step gets"),
        ("def make(inputs, out): ...", "step.a.args.rate is no argument of make (own_step.py:1)"),
        ("def make(inputs, out, rate, size): ...", "make (own_step.py:1) needs size, which has no default"),
        ("def made(inputs, out, rate): ...", "own_step.py has no class or function make; did you mean made"),
        ("def make(inputs, out, rate) ...", "own_step.py:1 can't be parsed: "),
    ],
)
def test_a_function_that_can_t_be_called_is_told_before_it_is(project: StepProject, code: str, message: str) -> None:
    project.write("own_step.py", f"{code}\n")
    project.step("a", "{function: 'own_step:make', args: {rate: 0.1}, outputs: [x]}")
    with pytest.raises(UsageError) as error:
        project.make("a")
    assert message in str(error.value)
    assert not (project.root / "runs/steps").exists()


def test_a_circle_is_told_as_one(project: StepProject) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        project.step(name, f"{{command: [x], inputs: ['step:{other}'], outputs: [x]}}")
    with pytest.raises(StepError, match="steps need each other: b → c → a → b"):
        project.graph().status("b")


@pytest.mark.parametrize("name", ["with space", "ä", "a.b", "-x", "x" * 65])
def test_a_name_that_no_folder_should_have_is_refused(project: StepProject, name: str) -> None:
    project.step(name, "{command: [x], outputs: [x]}")
    project.step("good", "{command: [x], outputs: [x]}")
    graph = project.graph()
    with pytest.raises(StepError, match=rf"conf/step/{name}\.yaml: '{name}' can't be the name of a step") as refused:
        graph.step(name)
    assert steps._state(graph, name) == ("can't run", refused.value.what)
    assert steps._state(graph, "good")[0] == "would run"


def test_a_word_about_a_step_that_there_isnt_is_refused(project: StepProject) -> None:
    project.step("clean", "{command: [x], outputs: [x]}")
    with pytest.raises(StepError, match="there is no step 'claen'; did you mean clean"):
        project.graph(step={"claen": {"args": {"rate": 1}}}).step("clean")


def test_an_output_that_isnt_there_is_refused_with_those_that_are(project: StepProject) -> None:
    project.step("a", "command: echo > $out/x.txt\noutputs: [x.txt]\n")
    project.step("b", "{command: [x], inputs: ['step:a/y.txt'], outputs: [x]}")
    project.make("a")
    with pytest.raises(StepError, match=r"step:a/y.txt: the step has no such output; did you mean x.txt\?"):
        project.graph().status("b")


@pytest.mark.parametrize(("function", "shown"), [(lambda: 0, "<lambda>"), (partial(print), "<partial>")])
def test_a_function_without_a_name_in_its_module_is_refused(
    project: StepProject, monkeypatch: pytest.MonkeyPatch, function: object, shown: str
) -> None:
    monkeypatch.setitem(pipeline.steps.REGISTERED, "a", {})  # which takes it away again
    pipeline.steps.declare("a", function=function, outputs=["x"])
    with pytest.raises(StepError, match=f"{shown}' is not package.module:name\n  try: .*no lambda, no partial"):
        project.make("a")


def test_an_input_that_another_step_took_away_is_told_at_once(project: StepProject) -> None:
    project.write("extra.txt", "1")
    project.step("one", 'command: f=extra; rm $f.txt; touch "$out/x"\noutputs: [x]\n')
    project.step("two", 'command: touch "$out/y"\ninputs: ["step:one", extra.txt]\noutputs: [y]\n')
    begun = time.monotonic()
    with pytest.raises(StepError, match=r"step two: inputs: 'extra.txt' matches no file"):
        project.make("two")
    assert time.monotonic() - begun < 8  # it waited 10 s for the end of what it had never started
