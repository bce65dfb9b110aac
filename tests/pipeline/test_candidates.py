"""Tab completion: what a word can become, asked of a real bash too, and with few imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.candidates import candidates
from tests.integration.commands import ROOT

HEAVY = ("doit", "hydra", "omegaconf", "yaml", "numpy", "pipeline.config.schema")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("doit tra", ["train"]),
        ("doit help re", ["record", "report", "reproduce"]),
        ("doit train mode", ["model.", "model="]),
        ("doit train model=res", ["model=resnet18", "model=resnet50"]),
        ("doit sweep model=resnet18,sm", ["model=resnet18,small_cnn"]),
        ("doit train trainer.eval", ["trainer.eval_every_epochs="]),
        ("doit train ++optimizer.nest", ["++optimizer.nesterov="]),
        ("doit train trainer.compile=", ["trainer.compile=false", "trainer.compile=true"]),
        ("doit plan format=", ["format=dot", "format=mermaid", "format=text"]),
        ("doit lab ", ["down=", "hosts=", "json="]),
        ("doit lab --", ["--down", "--hosts", "--json"]),
        ("doit train exp", ["experiment="]),
        ("doit runs state=F", ["state=FAILED", "state=FINISHED"]),
        ("doit clean exp", ["experiment="]),
        ("doit train dataset.source=", []),
    ],
)
def test_a_word_becomes_what_the_verb_takes(line: str, found: list[str]) -> None:
    assert candidates(line) == found


def test_runs_and_sweeps_are_offered_by_name(tmp_path: Path) -> None:
    for name in ("runs/ab12/key.json", "elsewhere/cd34/key.json", "runs/sweeps/first/about.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert candidates("doit logs run=", tmp_path) == ["run=ab12"]
    assert candidates("doit logs ab", tmp_path) == ["ab12"]
    assert candidates("doit evaluate ab", tmp_path) == ["ab12"]
    assert candidates("doit train ab", tmp_path) == []
    assert candidates("doit logs paths.runs=elsewhere run=", tmp_path) == ["run=cd34"]
    assert candidates("doit report sweep=f", tmp_path) == ["sweep=first"]


@pytest.mark.slow
def test_bash_asks_with_the_script_and_replaces_what_stands_behind_the_equals_sign() -> None:
    script = subprocess.run(
        [sys.executable, "-m", "doit", "tabcompletion"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    line = "doit train model=res"
    asked = f'{script}COMP_LINE="{line}" COMP_POINT={len(line)}\n_paceline; echo "${{COMPREPLY[@]}}"; complete -p doit'
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", asked], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == "resnet18 resnet50\ncomplete -o default -F _paceline doit\n"


def test_a_tab_imports_little() -> None:
    lines = ["doit tra", "doit train model=", "doit logs run=", "doit runs state="]
    code = (
        f"import sys; from pipeline.cli.candidates import candidates; [candidates(line) for line in {lines}]; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
