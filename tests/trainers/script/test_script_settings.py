"""What a script can be told, and the words that its arguments become."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainers.core.config import ConfigError
from trainers.script.settings import ScriptConfig, filled, groups, words


def test_a_mapping_becomes_flags_and_a_list_is_taken_literally() -> None:
    args = {"lr": 0.1, "fp16": True, "compile": False, "tag": None, "betas": [0.9, 0.95], "name": "a b $(c)\n'd'"}
    assert groups(args) == [["--lr", "0.1"], ["--fp16"], ["--betas", "0.9", "0.95"], ["--name", "a b $(c)\n'd'"]]
    assert words(["10", 2, True]) == ["10", "2", "true"]
    assert words(None) == []


def test_placeholders_are_filled_and_doubled_braces_stand_for_single_ones() -> None:
    assert filled("{run}/{{epoch}}.pt {{}}", {"run": "/r"}) == "/r/{epoch}.pt {}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing says what to run"),
        ({"script": "a.py", "command": ["./a"]}, "both program.script and program.command"),
        ({"args": 3}, "program.args=3 is neither a mapping nor a list"),
        ({"args": {"lr": {"a": 1}}}, "program.args.lr={'a': 1} is no single value"),
        ({"args": {"out": "{rnu}"}}, "{rnu} is no placeholder; there are {data}, {run}"),
        ({"env": {"HOME": "{home}"}}, "program.env.HOME={home}: {home} is no placeholder"),
        ({"args": ["{data}"]}, "program.args[0]={data}: {data} is named and there is none; set program.data=<a file"),
        ({"env": {"D": "{data}/x"}, "data": ""}, "program.env.D={data}/x: {data} is named and there is none"),
        ({"args": {"a b": 1}}, "program.args: 'a b' is no name of an argument: it has a space in it"),
        ({"metrics_pattern": "loss=("}, "'loss=(' is no regular expression: missing )"),
        ({"metrics_pattern": "loss=(.*)"}, "program.metrics_pattern names no metric"),
        ({"seal": "maybe"}, "program.seal='maybe' is not an option"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_named(fields: dict[str, Any], message: str) -> None:
    told = fields if "script" in fields or not fields else {"script": "a.py", **fields}
    with pytest.raises(ConfigError, match=re.escape(message)):
        ScriptConfig(**told)


def test_whether_a_script_goes_on_from_a_checkpoint_stands_in_its_arguments() -> None:
    assert ScriptConfig(script="a.py", args={"resume": "{resume}"}).resumes
    assert not ScriptConfig(script="a.py", args={"resume": "{{resume}}"}).resumes
