"""Two clones on one computer: a command works on the one it was started in, by that clone's own code, or refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, ROOT
from tests.integration.light import light_python
from tests.integration.test_provenance import Checkout, copied
from tests.waiting import HANG_S

DOIT = str(Path(sys.executable).parent / "doit")
WORDS = ("experiment=quickstart", "trainer.max_steps=2", *ALONE, "tracking=none")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return copied(tmp_path_factory.mktemp("two clones") / "second")


def call(argv: list[str], cwd: Path, package: Path) -> subprocess.CompletedProcess[str]:
    """``argv`` where Python finds the package of the clone ``package`` first, as its active environment has it."""
    env = {**os.environ, "PYTHONPATH": str(package)}
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.parametrize(
    ("argv", "inside"),
    [
        ([DOIT, "train", *WORDS], "."),
        ([DOIT, "-d", "/", "runs"], "."),
        ([DOIT, "-f", "{second}/dodo.py", "runs"], str(ROOT)),  # the named dodo.py decides, not the folder
        ([sys.executable, "-m", "pipeline", *WORDS], "docs/deep"),
    ],
)
def test_a_package_of_another_clone_is_refused(second: Checkout, argv: list[str], inside: str) -> None:
    (second.root / "docs/deep").mkdir(parents=True, exist_ok=True)
    done = call([word.replace("{second}", str(second.root)) for word in argv], second.root / inside, ROOT)
    assert done.returncode == 3
    said = done.stderr.splitlines()
    assert said[0].startswith(f"ERROR: this is the clone {second.root}, but Python takes pipeline from {ROOT}/pipeline")
    assert said[1].startswith(f"  try: export PYTHONPATH='{second.root}', then the same command")
    assert len(said) == 2
    assert not (second.root / "runs").exists()


@pytest.mark.parametrize("start", [(DOIT,), (sys.executable, "-m", "doit")])
def test_a_file_with_the_name_of_a_module_of_pythons_is_refused(second: Checkout, start: tuple[str, ...]) -> None:
    """One that doit itself imports breaks doit before Paceline is asked: docs/troubleshooting.md."""
    path = second.root / "colorsys.py"
    path.touch()
    done = call([*start, "list"], second.root, second.root)
    path.unlink()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"ERROR: {path} has the name of Python's own module colorsys, and is imported instead of it\n"
        "  try: mv colorsys.py my_colorsys.py, or any other name that Python hasn't\n"
    )


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["runs"], 0, "no runs under runs yet"),
        (["-k", "why", "experiment=quickstart", "seed=1"], 0, "this run: the data set isn't fetched"),
        (
            ["plan", "run", "none.py", "-f", "x"],
            3,
            "program.script=none.py: there is no ",
        ),  # the script's -f, not doit's
    ],
)
def test_every_verb_works_in_a_subfolder_of_the_project(
    second: Checkout, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    """``make`` sets the variable in the environment that it makes; elsewhere there is doit's -k."""
    monkeypatch.setenv("DOIT_SEEK_FILE", "1")
    done = call([DOIT, *words], second.root / "conf/model", second.root)
    assert (done.returncode, bool(done.stderr)) == (code, code != 0)
    assert said in done.stdout + done.stderr


def test_doits_own_loader_is_refused_with_the_folder_to_start_in(second: Checkout) -> None:
    done = call([DOIT, "-f", "../dodo.py", "runs"], second.root / "conf", second.root)
    assert done.returncode == 3
    assert f"  try: cd '{second.root}', then the same command" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ci
@pytest.mark.long
def test_the_mend_trains_the_clones_own_code_with_children_of_the_same_package(
    second: Checkout, tmp_path: Path, fetched: Path
) -> None:
    """From another working folder, where ``python -m pipeline.…`` would find the environment's package."""
    shutil.copytree(fetched, second.root / "data", dirs_exist_ok=True)
    (second.root / "pipeline/evaluation/report.py").write_text("raise SystemExit('this is the second clone')\n")
    argv = [light_python(forks_ranks=True), "-m", "doit", "-d", str(tmp_path), "train", *WORDS]
    done = call(argv, second.root, second.root)
    assert done.returncode == 1
    assert "failed: this is the second clone" in done.stderr, done.stderr
    (folder,) = (path.parent for path in second.root.glob("runs/*/key.json"))
    assert json.loads((folder / "provenance.json").read_text())["git_dirty"] is True
