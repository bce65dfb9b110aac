"""A compute node needs Python, torch and trainers/: no doit, no Hydra, no MLflow, no numpy."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, Project


def _needed(name: str, found: set[str] | None = None) -> set[str]:
    """A distribution and what it requires on this platform, without extras."""
    found = set() if found is None else found
    if name not in found:
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return found  # a requirement of another platform
        found.add(name)
        for requirement in requirements:
            if "extra ==" not in requirement:
                _needed(re.split(r"[\s;\[<>=!~(]", requirement, maxsplit=1)[0], found)
    return found


def _bare_environment(folder: Path, torch: str | None = None) -> Path:
    """A virtual environment with torch and its requirements alone, linked from this one; ``torch``: called that."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    source = Path(sysconfig.get_path("purelib"))
    names = {
        file.parts[0]
        for distribution in _needed("torch")
        for file in importlib.metadata.files(distribution) or []
        if not file.parts[0].startswith("..") and file.parts[0] != "__pycache__"
    }
    for name in names:
        called = f"torch-{torch}.dist-info" if torch and re.fullmatch(r"torch-.*\.dist-info", name) else name
        (target / called).symlink_to(source / name)
    return python


@pytest.mark.ci
@pytest.mark.long
def test_a_run_finishes_on_a_node_that_has_torch_alone(project: Project, tmp_path: Path) -> None:
    python = _bare_environment(tmp_path / "bare")
    for absent in ("doit", "hydra", "mlflow", "omegaconf", "sklearn", "numpy", "pipeline"):
        argv = [str(python), "-E", "-c", f"import {absent}"]
        assert subprocess.run(argv, capture_output=True, cwd=tmp_path, check=False).returncode == 1, absent
    project.words = ["tracking=none"]
    done = project.doit("train", "experiment=quickstart", "trainer.epochs=2", *ALONE, f"cluster.python='{python}'")
    assert done.returncode == 0, done.stdout
    plan = (project.only_run() / "plan.json").read_text()
    assert str(python) in plan
    assert sys.executable not in plan
    assert project.result()["metrics"]["test/accuracy"] > 0.5


OTHER_TORCH = ("experiment=quickstart", "trainer.max_steps=2", *ALONE)
NAMED = "cluster.environment={torch: 2.9.1}"


@pytest.fixture
def older(project: Project, tmp_path: Path) -> Project:
    """A project whose host has torch 2.9.1, as far as its folder's name says."""
    python = _bare_environment(tmp_path / "bare", torch="2.9.1")
    project.words = ["tracking=none", f"cluster.python='{python}'"]
    return project


@pytest.mark.ci
@pytest.mark.long
def test_a_host_with_another_torch_is_refused_unless_it_is_named(older: Project) -> None:
    here = importlib.metadata.version("torch")
    for verb in ("preflight", "train"):
        refused = older.doit(verb, *OTHER_TORCH)
        assert refused.returncode == 1, refused.stdout
        assert f"localhost: torch 2.9.1 (the key says {here})" in refused.stdout
        assert "try: cluster.environment='{torch: 2.9.1}', which" in refused.stdout
    done = older.doit("preflight", *OTHER_TORCH, NAMED)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_what_is_named_of_a_host_is_in_the_key_of_what_it_trains(older: Project) -> None:
    done = older.doit("train", *OTHER_TORCH, NAMED)
    assert done.returncode == 0, done.stdout
    assert json.loads((older.only_run() / "key.json").read_text())["environment"]["torch"] == "2.9.1"
