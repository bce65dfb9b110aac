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

from tests.integration.commands import Project


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


def test_a_run_finishes_on_a_node_that_has_torch_alone(project: Project, tmp_path: Path) -> None:
    python = _bare_environment(tmp_path / "bare")
    for absent in ("doit", "hydra", "mlflow", "omegaconf", "sklearn", "numpy", "pipeline"):
        argv = [str(python), "-E", "-c", f"import {absent}"]
        assert subprocess.run(argv, capture_output=True, cwd=tmp_path, check=False).returncode == 1, absent
    project.words = ["tracking=none"]
    done = project.doit("train", "experiment=quickstart", "trainer.epochs=2", f"cluster.python='{python}'")
    assert done.returncode == 0, done.stdout
    plan = (project.only_run() / "plan.json").read_text()
    assert str(python) in plan
    assert sys.executable not in plan
    assert project.result()["metrics"]["test/accuracy"] > 0.5


def test_a_host_with_another_torch_is_refused_and_the_word_that_is_named_runs(project: Project, tmp_path: Path) -> None:
    python = _bare_environment(tmp_path / "bare", torch="2.9.1")
    here = importlib.metadata.version("torch")
    project.words = ["tracking=none", f"cluster.python='{python}'"]
    words = ("experiment=quickstart", "trainer.max_steps=2")
    for verb in ("preflight", "train"):
        refused = project.doit(verb, *words)
        assert refused.returncode == 1, refused.stdout
        assert f"localhost: torch 2.9.1 (the key says {here})" in refused.stdout
        assert "try: cluster.environment='{torch: 2.9.1}', which" in refused.stdout
    done = project.doit("train", *words, "cluster.environment={torch: 2.9.1}")
    assert done.returncode == 0, done.stdout
    folders = [folder for folder in project.run_folders() if (folder / "result.json").exists()]
    (key,) = [json.loads((folder / "key.json").read_text()) for folder in folders]
    assert key["environment"]["torch"] == "2.9.1"
