"""A rank imports the snapshot and what is installed: no .pth file of its environment leads to other sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.tiny_runs import ROOT
from tests.waiting import HANG_S

pytestmark = pytest.mark.slow

FINDER = """\
import sys
from importlib.machinery import PathFinder

class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "trainers.unseen":
            return PathFinder.find_spec(name, [{tree!r} + "/trainers"])

sys.meta_path.append(_EditableFinder)
"""
PROBE = """\
import importlib, json, sys
from trainers.entry import start

def run(path):
    found = {}
    for name in ("beside", "trainers.unseen", "theirs", "layered"):
        try:
            found[name] = importlib.import_module(name).__file__
        except ImportError as error:
            found[name] = str(error)
    print("FOUND " + json.dumps({"path": sys.path, "torch": importlib.import_module("torch").__file__, **found}))

start("trainers.probe", run)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one rank sees whose environment has a working tree on its path, an editable install and a layered one."""
    top = tmp_path_factory.mktemp("host")
    tree, code, site, layer = top / "tree", top / "run/code", top / "site-packages", top / "layer"
    for folder in (tree, code, site, layer / "layered-1.0.dist-info", top / "mine"):
        folder.mkdir(parents=True)
    for folder in (tree, code):
        shutil.copytree(ROOT / "trainers", folder / "trainers")
    (code / "trainers" / "probe.py").write_text(PROBE)
    for path in (tree / "trainers/unseen.py", tree / "beside.py", top / "mine/theirs.py", layer / "layered.py"):
        path.touch()
    (site / "tree.pth").write_text(f"{tree}\n{layer}\n")
    (site / "__editable___tree_finder.py").write_text(FINDER.format(tree=str(tree)))
    (site / "__editable__.tree.pth").write_text("import __editable___tree_finder\n")
    start = (
        f"import site, runpy; site.addsitedir({str(site)!r}); runpy.run_module('trainers.probe', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, "--config", str(top / "run/config.json")],
        cwd=top / "run",
        env={**os.environ, "PYTHONPATH": f"{code}:{top / 'mine'}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    shown: dict[str, str] = json.loads(line.removeprefix("FOUND "))
    return {**shown, "top": str(top)}


def test_the_snapshot_comes_first_and_neither_working_tree_nor_run_folder_is_on_the_path(found: dict[str, str]) -> None:
    top = found["top"]
    assert found["path"][:2] == [f"{top}/run/code", f"{top}/mine"]
    assert not {f"{top}/tree", f"{top}/run", "", str(ROOT)} & {*found["path"]}
    assert Path(found["torch"]).parents[1].as_posix() in found["path"]


def test_a_module_that_only_the_working_tree_has_is_an_import_error(found: dict[str, str]) -> None:
    assert found["beside"] == "No module named 'beside'"
    assert found["trainers.unseen"] == "No module named 'trainers.unseen'"


def test_the_persons_own_path_and_a_folder_of_installed_distributions_stay(found: dict[str, str]) -> None:
    assert found["theirs"] == f"{found['top']}/mine/theirs.py"
    assert found["layered"] == f"{found['top']}/layer/layered.py"


@pytest.mark.parametrize("module", ["classifier", "measuring.measure"])
def test_no_program_of_the_ranks_imports_torch_before_its_path_is_settled(module: str) -> None:
    source = (ROOT / "trainers" / f"{module.replace('.', '/')}.py").read_text()
    assert "run_entry(" in source or f'start("trainers.{module}"' in source
    asked = f"import sys, trainers.{module}; print(sorted({{'torch', 'numpy'}} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "[]\n"
