"""A composition that was made before is found for the same words and files, and for no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.config.compose import compose_config, resolve
from pipeline.config.remembered import Composition
from tests.integration.commands import ROOT

WORDS = ("experiment=quickstart", "optimizer.lr=1e-1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name in ("pipeline/config", "trainers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    Composition(tmp_path, WORDS).keep(resolve(compose_config(WORDS)))
    return tmp_path


def test_what_is_remembered_is_what_hydra_composes(project: Path) -> None:
    assert Composition(project, WORDS).recall() == resolve(compose_config(WORDS))
    assert Composition(project, WORDS[::-1]).recall() is None
    assert Composition(project, ()).recall() is None


@pytest.mark.parametrize("name", ["conf/experiment/quickstart.yaml", "pipeline/config/schema.py", "trainers/config.py"])
def test_an_edit_of_what_a_composition_is_made_from_forgets_it(project: Path, name: str) -> None:
    with (project / name).open("a") as file:
        file.write("# more\n")
    assert Composition(project, WORDS).recall() is None


def test_what_takes_a_value_from_outside_is_never_remembered(project: Path) -> None:
    words = ("paths.runs=${oc.env:HOME}/runs",)
    Composition(project, words).keep({"a": 1})
    assert Composition(project, words).recall() is None
    (project / "conf" / "cluster" / "mine.yaml").write_text("python: ${oc.env:PYTHON}\n")
    Composition(project, WORDS).keep({"a": 1})
    assert Composition(project, WORDS).recall() is None


def test_a_torn_file_costs_one_composition(project: Path) -> None:
    (project / ".paceline" / "composed.json").write_text('{"')
    assert Composition(project, WORDS).recall() is None
    Composition(project, WORDS).keep({"a": 1})
    assert Composition(project, WORDS).recall() == {"a": 1}
