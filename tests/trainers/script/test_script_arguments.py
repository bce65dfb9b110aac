"""What stands behind torchrun's options."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import parse_args as torchrun

from trainers.core.config import ConfigError
from trainers.script.command import Paths, argv, variables
from trainers.script.resume import newest_checkpoint
from trainers.script.settings import ScriptConfig, filled, groups, words


def _paths(resume: str | None = None) -> Paths:
    where = {"resume": Path(resume)} if resume else {}
    return Paths(run_dir=Path("/r"), work=Path("/w"), script="a/t.py", data=("/d",), seed=3, resume=where)


@pytest.mark.parametrize(
    ("args", "first", "later"),
    [
        ({"lr": 1, "from": "{resume}", "amp": True}, ["--lr", "1", "--amp"], ["--lr", "1", "--from", "/c", "--amp"]),
        (["--from", "{resume}", "-x"], ["-x"], ["--from", "/c", "-x"]),
        (["go", "{resume}"], ["go"], ["go", "/c"]),
        (["--from={resume}", "{{data}} {data} {seed}"], ["{data} /d 3"], ["--from=/c", "{data} /d 3"]),
        (["{run}", "{checkpoints}"], ["/r/outputs", "/r/checkpoints"], ["/r/outputs", "/r/checkpoints"]),
        ({"b": 8, "v": True}, ["-b", "8", "-v"], ["-b", "8", "-v"]),
        (None, [], []),
    ],
)  # fmt: skip
def test_placeholders_are_filled_and_resume_is_left_out_without_a_checkpoint(
    args: Any, first: list[str], later: list[str]
) -> None:
    settings = ScriptConfig(script="t.py", args=args, env={"A": "{seed}", "B": "{resume}"}, data="d")
    assert argv(settings, _paths()) == ["--", "/w/a/t.py", *first]
    assert argv(settings, _paths("/c")) == ["--", "/w/a/t.py", *later]
    assert variables(settings, _paths()) == {"A": "3"}


def test_a_program_that_is_not_python_is_started_from_the_snapshot(tmp_path: Path) -> None:
    paths = Paths(run_dir=Path("/r"), work=tmp_path, script="", data=(), seed=3, resume={})
    assert argv(ScriptConfig(command=["train"], args={"n": 1}), paths) == ["--no-python", "--", "train", "-n", "1"]
    for place in ("_script/other", "b/train"):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).touch()
    for typed, place in (("./b/train", "b/train"), ("/p/b/train", "b/train"), ("../x/other", "_script/other")):
        words = argv(ScriptConfig(command=[typed, "-v"], workdir="sub"), paths)
        assert words == ["--no-python", "--", str(tmp_path / place), "-v"]
    assert argv(ScriptConfig(command=["/bin/true"]), paths) == ["--no-python", "--", "/bin/true"]


@pytest.mark.parametrize("told", [{"script": "t.py"}, {"command": ["/bin/train"]}])
def test_torchrun_takes_no_argument_of_the_script_for_its_own(told: dict[str, Any]) -> None:
    args = ["--", "x", "--log", "--max", "--run", "--d", "--start", "--r", "--", "--nnodes=7"]
    words = argv(ScriptConfig(**told, args=args), _paths())
    taken = torchrun(["--nnodes=1", "--nproc-per-node=2", *words])
    assert taken.training_script == ("/w/a/t.py" if "script" in told else "/bin/train")
    assert (taken.training_script_args, taken.nnodes, taken.no_python) == (args, "1", "command" in told)


def test_the_newest_whole_checkpoint_is_a_file_or_a_folder(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    names = ["a.pt", "step-2/model.bin", "step-3/model.bin.tmp", "empty.pt", "b.pt.tmp", "a.json", ".c"]
    for at, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.pt" else "x")
        os.utime(path, (at + 10, at + 10))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents.1").write_text("x")
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
    with zipfile.ZipFile(tmp_path / "torn.pt", "w") as file:
        file.writestr("data", "x" * 1000)
    assert newest_checkpoint(tmp_path) == tmp_path / "torn.pt"
    os.truncate(tmp_path / "torn.pt", 500)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4/model.bin").write_text("x")
    assert newest_checkpoint(tmp_path) == tmp_path / "step-4"
    (tmp_path / "torn.pt").rename(tmp_path / "step-4/optimizer.pt")  # killed while it saved the second file
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
    (tmp_path / "checkpoint-8").mkdir()
    for name in ("checkpoint-8/model.bin", "training_args.bin"):
        (tmp_path / name).write_text("x")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-8"


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
