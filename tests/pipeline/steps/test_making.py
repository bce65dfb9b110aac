"""Steps made for real: once, whole or not at all, with what changed told by name."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli.commands.steps import under_way
from pipeline.core.errors import PacelineError
from pipeline.steps.making import make_all
from pipeline.steps.step import StepError
from tests.pipeline.steps.conftest import StepProject
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def test_an_input_a_parameter_the_code_and_an_upstream_step_are_named(project: StepProject) -> None:
    project.write("raw/a.csv", "1\n")
    project.write("raw/b.csv", "2\n")
    project.write("clean.py", "import sys, scale\nopen(sys.argv[1] + '/x.txt', 'w').write(scale.f(sys.argv[2:]))\n")
    project.write("scale.py", "def f(words): return ' '.join(words[:1])\n")
    clean = 'inputs: ["raw/*.csv"]\noutputs: [x.txt]\n'
    project.step("clean", f'command: [python, clean.py, "{{out}}", "${{optimizer.lr}}", "{{inputs}}"]\n{clean}')
    project.step("count", 'command: wc -c < "$1" > "$out/n"\ninputs: [step:clean/x.txt]\noutputs: [n]\n')
    assert project.why("count") == ("after step clean",)
    assert project.make("count") == 2
    assert (project.out("clean") / "x.txt").read_text() == "0.1"
    assert (project.out("count") / "n").read_text().split() == ["3"]
    assert project.make("count") == 0
    assert project.why("clean", optimizer={"lr": 0.2}) == ("optimizer.lr: 0.1 → 0.2",)
    project.write("raw/b.csv", "3\n")
    assert project.why("clean") == ("input raw/b.csv changed",)
    project.write("scale.py", "def f(words): return ','.join(words)\n")
    assert project.why("clean") == ("scale.py changed", "input raw/b.csv changed")
    project.make("clean")
    assert project.why("count") == ("step:clean/x.txt changed",)


def test_what_comes_out_the_same_makes_nothing_after_it(project: StepProject) -> None:
    project.write("a.txt", "1")
    project.step("one", 'command: echo same > "$out/x"\ninputs: [a.txt]\noutputs: [x]\n')
    project.step("two", 'command: cat "$1" > "$out/y"\ninputs: ["step:one"]\noutputs: [y]\n')
    project.make("two")
    project.write("a.txt", "2")
    assert project.make("two") == 1
    assert [line for line in project.said if line.startswith("step two")] == ["step two: never made"]


def test_the_order_of_arguments_counts_where_they_become_words(project: StepProject) -> None:
    project.write("code.py", "import sys\nopen(sys.argv[1] + '/x', 'w').write(' '.join(sys.argv[2:]))\n")
    project.write("own.py", "def go(inputs, out, **more): (out / 'x').write_text(' '.join(more))\n")
    words, function = 'command: [python, code.py, "{out}"]\noutputs: [x]\n', "function: own:go\noutputs: [x]\n"
    for args in ("{b: 2, a: 1}", "{a: 1, b: 2}"):
        project.step("words", f"{words}args: {args}\n")
        project.step("function", f"{function}args: {args}\n")
        project.make("words")
        project.make("function")
        assert (project.out("words") / "x").read_text() == ("-b 2 -a 1" if args[1] == "b" else "-a 1 -b 2")
    assert (project.out("function") / "x").read_text() == "a b"
    assert len([line for line in project.said if line.startswith("made step function")]) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands on orphans")
def test_a_step_ends_with_its_program_and_leaves_nothing_running_in_a_session_of_its_own(project: StepProject) -> None:
    line = "setsid sleep 60 & echo $! > \"$out/x\"; setsid bash -c 'sleep 60 & wait' & sleep 0.3"
    project.step("leaves", f"command: |\n  {line}\noutputs: [x]\n")
    begun = time.monotonic()
    project.make("leaves")
    assert time.monotonic() - begun < 30  # not the minute for which its stdout is held open
    pid = int((project.out("leaves") / "x").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_comment_in_the_code_is_no_change(project: StepProject) -> None:
    project.write("own/__init__.py", "")
    module = project.write("own/steps.py", "def clean(inputs, out, rate):\n    (out / 'x').write_text(str(rate))\n")
    project.step("clean", "function: own.steps:clean\nargs: {rate: '${optimizer.lr}'}\noutputs: [x]\n")
    project.make("clean")
    assert (project.out("clean") / "x").read_text() == "0.1"
    module.write_text(f"# a comment\n{module.read_text()}")
    assert project.why("clean") == ()
    module.write_text(module.read_text().replace("str(rate)", "str(2 * rate)"))
    assert project.why("clean") == ("own/steps.py changed",)


def test_hostile_names_are_taken_as_they_are(project: StepProject) -> None:
    name = "a $(touch pwned) 'q\" ; b.txt"
    (project.root / name).write_text("x")
    project.step(
        "list", 'command: printf %s "$1$word" > "$out/n"\nargs: {word: "${evil}"}\ninputs: ["a *"]\noutputs: [n]\n'
    )
    project.make("list", evil="`touch pwned`")
    assert (project.out("list", evil="`touch pwned`") / "n").read_text() == f"{project.root}/{name}`touch pwned`"
    assert not (project.root / "pwned").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo half > $out/x; echo why it broke; exit 3", "step bad ended with exit code 3"),
        ("echo half > $out/y", "ended with exit code 0 without its outputs x; in its folder {out} it left y"),
        ("ln -s /etc/hostname $out/x", "step bad left a link, x"),
        ("kill -9 $$", "exit code 137 (signal 9)"),
    ],
)
def test_one_that_fails_leaves_its_log_and_nothing_else(project: StepProject, command: str, message: str) -> None:
    project.step("bad", f"command: {command}\noutputs: [x]\n")
    with pytest.raises(PacelineError) as error:
        project.make("bad")
    assert message in str(error.value)
    assert ("why it broke" in str(error.value)) == ("exit 3" in command)
    (log,) = project.left
    assert log.startswith("bad-")
    assert log.endswith(".log")


def test_a_failure_ends_what_runs_beside_it(project: StepProject) -> None:
    project.step("bad", "command: sleep 0.3; exit 1\noutputs: [x]\n")
    project.step("slow", f"command: echo $$ > {project.root}/pid; sleep 60\noutputs: [x]\n")
    begun = time.monotonic()
    with pytest.raises(PacelineError, match="step bad ended with exit code 1"):
        project.make("bad", "slow", at_once=2)
    assert time.monotonic() - begun < 30
    pid = int((project.root / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert all(name.endswith(".log") for name in project.left)


def test_a_step_whose_lines_can_not_be_kept_has_ended_when_its_folder_goes(project: StepProject) -> None:
    project.step("slow", f"command: echo $$ > {project.root}/pid; echo begun; sleep 60\noutputs: [x]\n")

    def say(text: str) -> None:
        if "begun" in text:
            raise OSError(28, "No space left on device")

    with pytest.raises(PacelineError, match=r"step slow can't be kept in .*: No space left on device"):
        make_all(project.graph(), ["slow"], say)
    assert not Path(f"/proc/{(project.root / 'pid').read_text().strip()}").exists()


def test_independent_steps_run_side_by_side(project: StepProject) -> None:
    """Each waits for the other's file, so one after the other would never end."""
    for name, other in (("one", "two"), ("two", "one")):
        wait = f"until [ -e {project.root}/{other} ]; do sleep 0.02; done"
        project.step(name, f"command: touch {project.root}/{name} $out/x; {wait}\noutputs: [x]\n")
    assert project.make("one", "two", at_once=2) == 2


def test_an_input_that_changes_meanwhile_is_no_result(project: StepProject) -> None:
    project.write("a.txt", "1")
    project.step("one", 'command: echo 2 >> a.txt; cp a.txt "$out/x"\ninputs: [a.txt]\noutputs: [x]\n')
    with pytest.raises(PacelineError, match=r"while step one was made: input a.txt changed"):
        project.make("one")
    assert all(name.endswith(".log") for name in project.left)


def test_secrets_reach_the_step_and_no_file(project: StepProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_TOKEN", "t0psecret-value")
    project.step(
        "get", 'command: echo "$DATA_TOKEN"; printf %s "$DATA_TOKEN" | wc -c > "$out/n"\n'
        "env: {DATA_TOKEN: '${oc.env:DATA_TOKEN}'}\noutputs: [n]\n",
    )  # fmt: skip
    project.make("get")
    assert (project.out("get") / "n").read_text().strip() == "15"
    project.write("ask.py", "import os, sys; os.path.exists(os.environ['DATA_TOKEN']); open(sys.argv[1] + '/n', 'w')")
    project.step(
        "ask",
        """
        command: [python, ask.py, "{out}"]
        env: {DATA_TOKEN: "${oc.env:DATA_TOKEN}"}
        outputs: [n]
    """,
    )
    project.make("ask")
    held = [path for path in (project.root / "runs").rglob("*") if path.is_file() and b"t0psecret" in path.read_bytes()]
    assert held == []
    assert "get | ***" in project.said
    project.step("put", "command: touch $out/x\nenv: {TOKEN: '${my.api_token}'}\noutputs: [x]\n")
    mine = {"api_token": "an0ther-secret"}
    project.make("put", my=mine)
    project.step("put", "command: touch  $out/x\nenv: {TOKEN: '${my.api_token}'}\noutputs: [x]\n")
    assert project.why("put", my=mine) == ("command: touch $out/x → touch  $out/x",)
    project.step("get", "command: [curl, '${oc.env:DATA_TOKEN}']\noutputs: [n]\n")
    with pytest.raises(StepError, match="step get has a secret in its command or args"):
        project.graph().step("get")


_COMMAND = """
import sys
from pathlib import Path
from tests.pipeline.steps.conftest import StepProject
project = StepProject(Path(sys.argv[1]))
project.make("slow")
print("MADE", *project.said, sep="|")
"""


def _command(project: StepProject) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", _COMMAND, str(project.root)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_after_a_kill_nothing_goes_on_and_the_same_command_makes_it(
    project: StepProject, number: signal.Signals
) -> None:
    once = f"if [ ! -e {project.root}/pid ]; then echo $$ > {project.root}/pid; sleep 60; fi"
    project.step("slow", f'command: |\n  echo half > "$out/x"; {once}; echo whole > "$out/x"\noutputs: [x]\n')
    command = _command(project)
    wait_until(lambda: (project.root / "pid").exists() and (project.root / "pid").read_text().strip() != "")
    os.kill(command.pid, number)
    assert command.wait() != 0
    pid = int((project.root / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert project.why("slow") == ("never made",)
    assert project.make("slow") == 1
    assert (project.out("slow") / "x").read_text() == "whole\n"
    assert project.left == [project.out("slow").parent.name]


def test_of_two_commands_one_makes_it_and_the_other_waits(project: StepProject) -> None:
    wait = f"until [ -e {project.root}/go ]; do sleep 0.02; done"
    project.step("slow", f'command: echo x >> {project.root}/runs.txt; {wait}; touch "$out/x"\noutputs: [x]\n')
    commands = [_command(project) for _ in range(2)]
    wait_until(lambda: (project.root / "runs.txt").exists())
    (line,) = under_way(project.root / "runs")
    assert re.fullmatch(r"step slow is being made, its last word \d+ s ago: \S+/slow-\w+\.log", line)
    (project.root / "go").touch()
    printed = sorted(command.communicate()[0] for command in commands)
    assert (project.root / "runs.txt").read_text() == "x\n"
    assert all(text.startswith("MADE") for text in printed)  # one that comes late finds it made, and says nothing
    assert under_way(project.root / "runs") == []
