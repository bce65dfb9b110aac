"""What `make` fills the environment with, and says meanwhile."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ".venv/lib/python3.11/site-packages"
UV = f"""#!/bin/sh
mkdir -p {PACKAGES}/a.dist-info {PACKAGES}/b.dist-info {PACKAGES}/c.dist-info {PACKAGES}/d.dist-info
[ "$1" = venv ] || /bin/sleep 1  # a large package: the number stays as it is
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_a_terminal_is_not_silent_while_a_large_package_is_unpacked(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".ci/install", tmp_path)
    (tmp_path / "requirements.lock").write_text("torch==2.9\n")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/uv", UV)
    program(tmp_path / "bin/sleep", "#!/bin/sh\n/bin/sleep 0.2\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
        os.execv("/bin/sh", ["sh", "install"])
    said = b""
    try:
        while part := os.read(terminal, 1 << 16):
            said += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    assert said.count(b"still installing: 4 of at most 1 packages") >= 3, said


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
