"""What of a step is sent to hosts."""

from __future__ import annotations

import json

from pipeline.core.processes.signals import Stop
from pipeline.steps.elsewhere import _program
from pipeline.steps.step import Making
from tests.pipeline.steps.conftest import StepProject
from trainers.script.settings import filled


def test_a_function_gets_its_arguments_as_they_are_and_the_folder_of_the_host(project: StepProject) -> None:
    project.write("own.py", "def stage(inputs, out, options): ...\n")
    fields = "function: own:stage\nargs: {options: {out: OUT, text: '{run}'}}\noutputs: [x]\non: first\n"
    project.step("stage", fields)
    step, out = project.graph().step("stage"), project.root / "runs/steps/stage/out"
    making = Making(step=step, root=project.root, out=out, inputs=(), log=out, stop=Stop(), say=project.said.append)
    program, files = _program(making)
    told = json.loads(filled(program["args"][0], {"run": "/on/the/host"}))
    assert (told["out"], told["args"]) == ("/on/the/host", {"options": {"out": "OUT", "text": "{run}"}})
    assert {"own.py", "trainers/call.py"} <= {*files}
