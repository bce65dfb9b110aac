"""Overrides about a script as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli import terminal
from pipeline.config.overrides.words import for_project
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("program.args.out={run}", "program.args.out='{run}'"),
        ("program.args.out={run}/a,{data}/b", "program.args.out='{run}/a','{data}/b'"),
        ("program.args=[--out,{run},--k,3]", "program.args=[--out,'{run}',--k,3]"),
        ("program.args={out: {run}, k: 3}", "program.args={out: '{run}', k: 3}"),
        ("program.args.out='to {run} now'", "program.args.out='to {run} now'"),
        ("program.args=[-x,'{{x}}',{run}]", "program.args=[-x,'{{x}}','{run}']"),
        ("""program.args=['it\\'s {x}',"{y} z",{run}]""", """program.args=['it\\'s {x}',"{y} z",'{run}']"""),
        ("cluster.env={A: b}", "cluster.env={A: b}"),
        ("program.args.resume={resume:**/last.ckpt}", "program.args.resume='{resume:**/last.ckpt}'"),
        ("program.args=[--from,{resume:a*.pt}]", "program.args=[--from,'{resume:a*.pt}']"),
        ("program.args={resume:last.ckpt}", "program.args={resume:last.ckpt}"),  # --resume last.ckpt
    ],
)
def test_placeholders_need_no_quotes(typed: str, read: str) -> None:
    assert for_project([typed], ROOT, ROOT) == (read,)


def test_a_script_is_found_where_the_command_was_typed(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ("program.script=train.py", "program.script=dodo.py")
    assert for_project(words, tmp_path, ROOT) == (f"program.script={tmp_path}/train.py", "program.script=dodo.py")
    for typed in ("entry.py", "'entry.py'", '"entry.py"'):
        assert (
            for_project([f"program.script={typed}"], ROOT / "trainers", ROOT)[0] == "program.script=trainers/entry.py"
        )
    (tmp_path / "a b.py").touch()
    assert for_project(["program.script='a b.py'"], tmp_path, ROOT)[0] == f"program.script='{tmp_path}/a b.py'"


@pytest.mark.parametrize(
    ("folder", "words", "workdir"),
    [
        ("trainers", ["program.script=entry.py"], ["program.workdir=trainers"]),
        ("it's here", ["program.command=[make]"], ["program.workdir='it\\'s here'"]),
        ("trainers", ["program.script=entry.py", "program.workdir=docs"], []),
        ("trainers", ["experiment=mine", "program.script=entry.py"], []),  # the same run from every folder
        ("trainers", ["program.script=/elsewhere/train.py"], []),  # it stands in its own folder
        ("", ["program.script=dodo.py"], []),
    ],
)
def test_a_script_stands_where_its_user_does(folder: str, words: list[str], workdir: list[str]) -> None:
    assert [*for_project(words, ROOT / folder, ROOT)[len(words) :]] == workdir


@pytest.mark.parametrize(
    "word", ["hydra.run.dir=/x", "hydra.mode=MULTIRUN", "++hydra.job.chdir=true", "hydra/launcher=basic"]
)
def test_a_word_about_hydras_own_application_is_refused_as_nothing_reads_it(word: str) -> None:
    with pytest.raises(UsageError) as refused:
        for_project(["seed=1", word], ROOT, ROOT)
    assert refused.value.what == f"{word} sets Hydra's own application, of which doit takes the configuration alone"


def test_who_types_paceline_is_told_its_commands_through_the_screen_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words of ranks, steps and logs are somebody else's: they stay."""
    monkeypatch.setenv("PACELINE_TYPED", "paceline")
    words = ["trial 3 | try: doit record run=a", "  try: doit clean", "WARNING: no store\n  try: doit record run=b"]
    theirs = ["trial  3 | node0:0 | doit train", "node0:- | doit train", "clean | doit train", "  | doit train"]
    with terminal.screen(lambda: None) as shown:  # type: ignore[arg-type,return-value]
        for text in (*words, *theirs):
            shown.say(text)
    said = capsys.readouterr().err.splitlines()
    assert said == [*"\n".join(words).replace("doit", "paceline").splitlines(), *theirs]
