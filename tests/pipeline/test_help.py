"""What `doit --help` and its kin print: every verb, every option, every group, and no object of Python's."""

from __future__ import annotations

from pathlib import Path

import pytest
from doit.doit_cmd import DoitMain

from pipeline.cli import help as pages
from pipeline.cli import invocation, main
from pipeline.cli.output import COMMAND_VARIABLE
from pipeline.cli.verbs import VERBS
from pipeline.config.conf_files import groups
from pipeline.core import places
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT
from tests.integration import preloaded

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb_with_what_it_does(words: list[str]) -> None:
    lines = (pages.requested(words) or "").splitlines()
    for name, verb in VERBS.items():
        assert f"  {name:<9}  {verb.summary}" in lines
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["-h", "train", "seed=1"], ["help", "train"], ["train", "help"], ["info", "train"]]
)
def test_help_of_a_verb_has_its_options_the_groups_with_a_line_each_and_examples(words: list[str]) -> None:
    page = pages.requested(words) or ""
    assert "  model=  Which network" in page
    assert "  * resnet18      ResNet-18 (He et al. 2016)" in page
    assert "    quickstart        Real images, no download" in page
    assert "  doit train experiment=quickstart" in page.splitlines()


@pytest.mark.parametrize("columns", [60, 80, 110])
def test_pages_keep_to_the_width_of_the_terminal_but_for_commands(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(pages, "width", lambda: columns)
    for page in (pages.overview(), *map(pages.verb_page, VERBS)):
        long = [line for line in page.splitlines() if len(line) > columns]
        assert [line for line in long if not line.startswith(("  doit ", "usage: "))] == [], columns


def test_every_verb_option_group_and_choice_is_explained() -> None:
    for name, verb in VERBS.items():
        page = pages.verb_page(name)
        assert all(f"  {pair[1].spelt(pair[0])}" in page and pair[1].meaning for pair in verb.options.items())
        assert all(f"  doit {example}" in page and example.split()[0] == name for example in verb.examples)
        assert "<function" not in page
    assert [group.name for group in groups() if not pages.group_summary(group) or not all(group.options.values())] == []
    assert {group.name: group.default for group in groups()}["model"] == "resnet18"


@pytest.mark.parametrize("words", [["tabcompletion", "--help"], ["list", "-h"]])
def test_doits_own_commands_show_doits_own_page(words: list[str]) -> None:
    assert (pages.requested(words) or "").startswith("PURPOSE")


def test_run_is_explained_as_the_start_of_a_script_and_then_as_doits_own() -> None:
    script, _, of_doit = (pages.requested(["help", "run"]) or "").partition("doit's own command:\n")
    assert script.startswith("usage: doit run [OPTION …] [OVERRIDE …] SCRIPT.py [ARGUMENT …]")
    assert "--sweep NAME=VALUES" in script
    assert "--detach" in script
    assert of_doit.startswith("PURPOSE")
    assert "\n  run " in pages.overview()


@pytest.mark.parametrize("words", [["train", "seed=1"], ["help", "task"], ["info", "nope"], ["list"], ["step", "help"]])
def test_what_asks_for_no_help_gets_none(words: list[str]) -> None:
    assert pages.requested(words) is None


def test_help_of_nothing_that_exists_names_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"there is no command 'trian'; did you mean train\? valid: accept, "):
        pages.requested(["help", "trian"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "Paceline 0."),
        (["lab", "-h"], 0, "usage: doit lab [--OPTION …]\n"),
        (["train", "-a"], 3, "ERROR: doit's own options come before the verb: doit -a train\n  try: doit help run"),
    ],
)
def test_help_as_it_is_typed(words: list[str], code: int, said: str) -> None:
    done = preloaded.doit(*words)
    assert (done.returncode, done.stdout[: len(said)]) == (code, said)


def test_help_behind_a_script_is_the_scripts_own_and_not_this_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(DoitMain, "run", lambda _, words: started.append(words) or 0)
    monkeypatch.setattr(places, "refuse_other_code", lambda _: None)
    monkeypatch.setattr(invocation, "remember_typed_in", lambda: None)
    monkeypatch.setenv(COMMAND_VARIABLE, "doit")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["paceline", "run", "train.py", "--help"])
    assert main.main() == 0
    assert started == [["run", "train.py", "--help"]]


def test_help_is_answered_in_the_folder_of_another_clone_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Path) -> None:
        raise UsageError("this is the clone /b")

    monkeypatch.setattr(places, "refuse_other_code", refuse)
    monkeypatch.setenv(COMMAND_VARIABLE, "doit")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["paceline", "--help"])
    assert main.main() == 0
    assert capsys.readouterr().out.startswith("Paceline: reproducible multi-node PyTorch training.")
    monkeypatch.setattr("sys.argv", ["paceline", "runs"])
    with pytest.raises(SystemExit):
        main.main()
    assert "this is the clone /b" in capsys.readouterr().err
