"""What `make` and `doit sync` fill environments with, and what is said meanwhile."""

from __future__ import annotations

import ast
import os
import pty
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from pipeline.cluster.launchers import pssh

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


def test_make_install_makes_the_environment_alone_and_says_what_comes_next(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.lock").write_text("")
    program(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / ".ci").mkdir()
    program(tmp_path / ".ci/install", '#!/bin/sh\n"$PYTHON" -m venv --without-pip .venv && echo installing\n')
    argv = ["make", "--no-print-directory", "install", f"PYTHON={tmp_path}/python"]
    said = [subprocess.run(argv, cwd=tmp_path, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    comes_next = "the environment is .venv; next: . .venv/bin/activate, then doit list, or make train, or make test\n"
    assert said == [f"installing\n{comes_next}", comes_next]
    assert [*tmp_path.glob(".venv/lib/python3*/site-packages/paceline.pth")]
    (tmp_path / "pipeline/cli").mkdir(parents=True)
    (tmp_path / "pipeline/cli/main.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n    return 3\n")
    argv = [f"{tmp_path}/.venv/bin/paceline", "runs", "a b"]
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "['runs', 'a b']\n"), done.stderr


@pytest.mark.ci
@pytest.mark.long
def test_hosts_get_what_trainers_import_in_the_versions_of_the_developers_and_nothing_that_they_do_not_need() -> None:
    all_of_them, nodes = (_pins(ROOT / name) for name in ("requirements.lock", "requirements-nodes.lock"))
    assert nodes < all_of_them
    there = {name for name, _ in nodes}
    trees = [ast.walk(ast.parse(path.read_bytes())) for path in (ROOT / "trainers").rglob("*.py")]
    imports = [node for tree in trees for node in tree if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    owners = packages_distributions()
    needed = {owner.lower() for name in names for owner in owners.get(name.partition(".")[0], ())}
    assert {"torch", "torchvision", "pillow"} <= needed <= there
    assert there.isdisjoint({"doit", "hydra-core", "mlflow", "pytest", "scikit-learn"})


def _pins(lock: Path) -> set[tuple[str, str]]:
    return set(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(), re.MULTILINE))


def test_the_lock_of_hosts_is_taken_where_the_project_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pssh, "ROOT", tmp_path)
    for name in ("requirements.lock", "requirements-nodes.lock"):
        (tmp_path / name).write_text("")
        lock = pssh.lock_file("lock", None)
        assert lock is not None
        assert lock.path.name == name
