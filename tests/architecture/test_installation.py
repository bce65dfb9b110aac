"""What `make` fills the environment with, and says meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long  # make test in a fresh clone begins with it
def test_the_installation_says_what_it_does_and_makes_the_environment(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text("")
    done = subprocess.run(
        [ROOT / ".ci" / "install"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("installing the packages of requirements.lock into .venv")
    assert (tmp_path / ".venv" / "bin" / "python").exists()
