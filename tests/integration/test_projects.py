"""A project of one's own: Paceline as a wheel in an environment that knows of no clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from pipeline.lab import Lab
from tests.integration.light import STAND_INS
from tests.shared_fixture import made_once
from tests.waiting import HANG_S, ended

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("paceline.py", "paceline_huggingface.py", "paceline_lightning.py")
PACKED = ("pipeline", "trainers", "hydra_plugins", "conf", *MODULES, "setup.py", "pyproject.toml")
WORDS = ("experiment=example", "trainer.max_steps=4", "cluster.nproc_per_node=1", "++cluster.env.OMP_NUM_THREADS=1")
UNTRACKED = (*WORDS, "tracking=none")
RUN = re.compile(r"^run ([0-9a-f]{12}): ", re.MULTILINE)


@pytest.fixture(scope="module")
def built(shared: Path) -> Path:
    """A folder with the sdist, and the wheel that was built of it."""
    return made_once(shared / "built", _build)


def _build(folder: Path) -> None:
    source = folder / "source"
    for name in (*PACKED, "README.md", "LICENSE", "docs/index.md", "tests/__init__.py", "benchmarks/seal.py"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(ROOT / name, target)
    _backend(source, f"build_sdist({str(folder)!r})")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _backend(unpacked, f"build_wheel({str(folder)!r})")


def _backend(source: Path, call: str) -> None:
    """What pip asks of setuptools."""
    code = f"from setuptools import build_meta; build_meta.{call}"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(built: Path, shared: Path) -> Path:
    """The programs of an environment in which the wheel is installed. Of this one it has the packages and no more."""
    return made_once(shared / "installed", lambda folder: _install(built, folder)) / "env/bin"


def _install(built: Path, folder: Path) -> None:
    venv.create(folder / "env", symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env"), "platbase": str(folder / "env")}))
    (site / "parent.pth").write_text(f"{sysconfig.get_path('purelib')}\n{STAND_INS}\nimport light_start\n")
    (wheel,) = built.glob("*.whl")
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    argv = [sys.executable, "-m", "pip", "--python", str(folder / "env/bin/python"), "install", *quiet, str(wheel)]
    subprocess.run(argv, check=True)


def run(environment: Path, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DOIT"))}
    env["PATH"] = f"{environment}:{env['PATH']}"
    return ended([environment / argv[0], *argv[1:]], cwd=cwd, env=env)


@pytest.fixture
def project(environment: Path, tmp_path: Path, fetched: Path) -> Path:
    """One that `paceline init` has just made, in no repository, with the images of digits in place."""
    done = run(environment, "paceline", "init", "acme", "--no-git", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    shutil.copytree(fetched, tmp_path / "acme/data")
    return tmp_path / "acme"


def test_the_wheel_holds_the_packages_and_conf_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kinds = {"pipeline": (".py", ".typed", ".txt", ".jinja"), "trainers": (".py", ".typed"), "hydra_plugins": (".py",)}
    expected = {*MODULES}
    for top, endings in kinds.items():
        files = (path for path in (ROOT / top).rglob("*") if path.suffix in endings)
        expected |= {path.relative_to(ROOT).as_posix() for path in files}
    conf = (path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml"))
    assert names == expected | {f"pipeline/{name}" for name in conf}
    assert {"pipeline/py.typed", "trainers/py.typed", "pipeline/template/.gitignore.txt"} < names


@pytest.mark.ci
@pytest.mark.long
def test_the_wheel_trains_in_a_project_of_its_own_and_launches_nothing_twice(
    environment: Path, project: Path, tmp_path: Path
) -> None:
    empty = run(environment, "paceline", "report", cwd=project / "acme")
    assert "a sweep: paceline sweep experiment=quickstart seed=0,1\n" in empty.stdout, empty.stdout
    done = run(environment, "paceline", "train", *UNTRACKED, cwd=project / "acme")
    assert done.returncode == 0, done.stdout
    (key,) = RUN.findall(done.stdout)
    assert not any(name in done.stdout for name in (f"{ROOT}/pipeline", f"{ROOT}/trainers"))
    code = json.loads((project / "runs" / key / "key.json").read_text())["code"]
    assert {"acme/nets.py", "trainers/classifier.py"} < {*code}
    assert not any(name.startswith("pipeline/") for name in code)

    again = run(environment, "paceline", "train", *UNTRACKED, cwd=project / "conf/model")
    assert again.returncode == 0
    assert f"{key} is finished" in again.stdout
    assert not RUN.search(again.stdout)
    assert key in run(environment, "python", "-m", "doit", "runs", cwd=project).stdout
    why = run(environment, "paceline", "why", *UNTRACKED, "model.args.width=32", cwd=project / "tests")
    assert "model.args.width: 64 → 32" in why.stdout
    (project / "acme/nets.py").write_text("raise SystemExit('edited since')")
    proven = run(environment, *re.findall(r"^  repeat   (.*)$", done.stdout, re.MULTILINE)[0].split(), cwd=project)
    assert proven.returncode == 0, proven.stdout
    assert f"REPRODUCED {key}: " in proven.stdout
    assert f"not from a commit: its code is the copy in runs/{key}/code" in proven.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["acme"]


@pytest.mark.ci
@pytest.mark.long
def test_a_clone_and_the_wheel_of_it_give_a_run_the_same_key(environment: Path, project: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.core.places import ROOT\n"
        "from pipeline.config.build import build; from pipeline.config.compose import compose_config, resolve\n"
        "from pipeline.data.store import request; from pipeline.execution.run import code_of\n"
        "from pipeline.keys.content_key import content_key\n"
        "words = ['experiment=quickstart', 'cluster.nproc_per_node=2']\n"
        "made = build(resolve(compose_config(words)), tuple(words), root=ROOT, local_gpus=0)\n"
        "assert ROOT == Path.cwd(), ROOT\n"
        "code = code_of(made, ROOT); parts = dict(canonical=made.canonical, topology=made.topology)\n"
        "key = content_key(code=code.digests, data_digest='d', environment=code.versions, **parts)\n"
        "print(request(made.train.dataset, Path('data')).name, key.digest)"
    )
    clone = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run(environment, "python", "-c", code, cwd=project).stdout == clone.stdout != "", clone.stderr


@pytest.mark.ci
@pytest.mark.long
def test_outside_of_a_project_a_line_says_how_to_make_one(environment: Path, tmp_path: Path) -> None:
    done = run(environment, "paceline", "train", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.startswith(f"ERROR: no project here: neither {tmp_path} nor a folder above has one\n")
    assert "try: paceline init my_project" in done.stdout
    assert "paceline" in run(environment, "paceline", "--version", cwd=tmp_path).stdout.lower()
    assert "paceline train [OVERRIDE …]" in run(environment, "paceline", "help", "train", cwd=tmp_path).stdout
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- long
@pytest.mark.long
@pytest.mark.timeout(3 * HANG_S)  # two trainings and four more commands
def test_the_example_of_the_docs_runs_as_printed(environment: Path, tmp_path: Path) -> None:
    text = (ROOT / "docs/projects.md").read_text(encoding="utf-8")
    lines = text.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert len(lines) <= 15
    ours = [line for line in lines if not re.match(r"git clone|python3 -m venv|pip install", line)]
    env = {**os.environ, "PATH": f"{environment}:{os.environ['PATH']}"}
    argv = ["bash", "-euxo", "pipefail", "-c", "\n".join(ours)]
    done = ended(argv, cwd=tmp_path, env=env, timeout_s=3 * HANG_S)
    assert done.returncode == 0, done.stdout
    assert "is finished" in done.stdout


@pytest.mark.long
def test_the_tests_of_a_new_project_pass_and_its_script_trains(environment: Path, project: Path) -> None:
    tests = run(environment, "python", "-m", "pytest", "-q", cwd=project)
    assert tests.returncode == 0, tests.stdout
    assert "1 passed" in tests.stdout
    words = ("program.script=script.py", "program.args.lr=0.1", "cluster.nproc_per_node=1")
    done = run(environment, "paceline", "train", *words, cwd=project / "acme")
    assert done.returncode == 0, done.stdout
    (key,) = RUN.findall(done.stdout)
    assert (project / "runs" / key / "outputs/model.pt").is_file()
    assert (project / "mlflow.db").is_file()


@pytest.mark.long
def test_a_run_of_a_project_is_made_again_from_its_commit(environment: Path, project: Path) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "A new project"]):
        subprocess.run(["git", *words], cwd=project, check=True)
    done = run(environment, "paceline", "train", *UNTRACKED, cwd=project)
    (key,) = RUN.findall(done.stdout)
    again = run(environment, "paceline", "reproduce", f"run={key}", cwd=project / "acme")
    assert again.returncode == 0, again.stdout
    assert "REPRODUCED" in again.stdout
    assert "the run's own copy" not in again.stdout


@pytest.mark.long
def test_a_project_trains_on_two_hosts_that_have_nothing_of_it(environment: Path, project: Path, lab: Lab) -> None:
    words = [*WORDS, "tracking=none", "cluster=two_node", f"cluster.ssh_config='{lab.ssh_config}'"]
    words += [f"cluster.python={sys.executable}"]
    done = run(environment, "paceline", "train", *words, cwd=project / "acme")
    assert done.returncode == 0, done.stdout
    (key,) = RUN.findall(done.stdout)
    result = json.loads((project / "runs" / key / "result.json").read_text())
    assert result["nnodes"] == 2


DODO = """
from pipeline.cli.project import *
from doit import create_after

def task_made():
    return {"actions": ["echo made > out.txt"], "targets": ["out.txt"]}

def task_told():
    return {"actions": [lambda many: print("many", many)], "verbosity": 2,
            "params": [{"name": "many", "short": "m", "type": int, "default": 1}]}

def task_words():
    return {"actions": [lambda pos: print("pos", pos)], "pos_arg": "pos", "verbosity": 2}

@create_after(executed="made", target_regex="late-.*")
def task_late():
    yield {"name": "x", "actions": ["echo late > late-x"], "targets": ["late-x"]}
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("told -m 3", 0, "many 3"),
        ("words a b", 0, "pos ['a', 'b']"),
        ("out.txt", 0, "made"),
        ("late-x", 0, "late:x"),
        ("made nix", 3, "there is no command 'nix'"),
    ],
)
def test_tasks_of_one_s_own_are_named_as_doit_does_it(tmp_path: Path, words: str, code: int, said: str) -> None:
    (tmp_path / "dodo.py").write_text(DODO)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pipeline/template/pyproject.toml.txt").read_text())
    argv = [sys.executable, "-m", "pipeline.cli.main", *words.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
