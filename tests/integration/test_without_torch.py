"""A controller whose Python has no torch: its hosts train, and its keys are those of a controller that has torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.shared_fixture import made_once
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TORCH = re.compile(
    r"(torch|torchvision|torchgen|functorch|nvidia|triton|cuda)\b|(torch|torchvision|nvidia|triton|cuda)_"
)
WORDS = ("experiment=example", "trainer.max_steps=4", "cluster.nproc_per_node=1", "++cluster.env.OMP_NUM_THREADS=1")
HOSTS = ("cluster.environment=hosts", f"cluster.python={sys.executable}")
KEY = re.compile(r"^FINISHED ([0-9a-f]{12}): ", re.MULTILINE)


@pytest.fixture(scope="module")
def bare(shared: Path) -> str:
    """An interpreter with all packages of this one but torch and what it brings."""
    return str(made_once(shared / "without-torch", _bare) / "env/bin/python")


def _bare(folder: Path) -> None:
    venv.create(folder / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")}))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not TORCH.match(path.name) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    (site / "clone.pth").write_text(f"{ROOT}\n")


def paceline(python: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DOIT"))}
    argv = [python, "-m", "paceline", *words]
    said = subprocess.STDOUT
    return subprocess.run(
        argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=said, text=True, timeout=HANG_S, check=False
    )


@pytest.fixture
def project(bare: str, tmp_path: Path, fetched: Path) -> Path:
    made = paceline(bare, "init", "acme", "--no-git", cwd=tmp_path)
    assert made.returncode == 0, made.stdout
    shutil.copytree(fetched, tmp_path / "acme/data")
    return tmp_path / "acme"


@pytest.mark.ci
@pytest.mark.long
def test_a_controller_without_torch_trains_where_torch_is_under_the_key_of_one_that_has_it(
    bare: str, project: Path
) -> None:
    assert subprocess.run([bare, "-c", "import torch"], capture_output=True, check=False).returncode == 1
    done = paceline(bare, "train", *WORDS, *HOSTS, "tracking=none", cwd=project)
    assert done.returncode == 0, done.stdout
    (key,) = KEY.findall(done.stdout)
    assert f"{key} is finished" in paceline(bare, "train", *WORDS, *HOSTS, "tracking=none", cwd=project).stdout
    assert f"{key}: finished and intact" in paceline(sys.executable, "why", *WORDS, "tracking=none", cwd=project).stdout


@pytest.mark.ci
@pytest.mark.long
def test_what_is_refused_without_torch_says_both_ways_out(bare: str, project: Path) -> None:
    refused = paceline(bare, "train", *WORDS, cwd=project)
    assert refused.returncode == 3
    assert "ERROR: trainers/training/session.py:13 imports torch, which is not installed here\n" in refused.stdout
    assert " torch; or, where the hosts have it, cluster.environment=hosts\n" in refused.stdout
    nowhere = paceline(bare, "why", *WORDS, "cluster.environment=hosts", cwd=project)
    assert nowhere.returncode == 3
    assert "session.py:13 imports torch, which the hosts don't have\n  try: install it there" in nowhere.stdout
