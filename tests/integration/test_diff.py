"""`doit diff`: the example of docs/diff.md as typed."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.commands import ROOT, Project


@pytest.mark.long
@pytest.mark.ci
def test_the_page_names_step_rank_module_and_operator_as_the_command_does(project: Project) -> None:
    project.whole = True
    (block,) = re.findall(r"```console\n(.*?)```", (ROOT / "docs" / "diff.md").read_text(), re.DOTALL)
    *trainings, compared = [line[2:].split()[1:] for line in block.splitlines() if line.startswith("$ ")]
    keys = []
    for words in trainings:
        done = project.doit(*words, "tracking=none")
        assert done.returncode == 0, done.stdout
        keys.append(re.findall(r"^FINISHED (\w+):", done.stdout, re.MULTILINE)[0])
    done = project.doit("diff", *keys)
    assert done.returncode == 1
    shown = [line for line in block.splitlines() if line.startswith("  ")]
    assert [line for line in done.stdout.splitlines() if line.startswith("  ")][:2] == shown
    assert project.doit("diff", keys[0], keys[0], "--no-replay").stdout.endswith(
        "up to step 15: all digests are equal\n"
    )
    alone = project.doit("diff", keys[0])
    assert f"run {keys[0]} has no reproduction here to compare it with" in alone.stdout
    answer = json.loads(project.doit("diff", *keys, "--json", "--no-replay", apart=True).stdout)
    assert (answer["data"]["first"]["step"], answer["data"]["origin"]) == (5, None)
    assert compared[0] == "diff"
