"""Options of another installed package: found by entry point, chosen like the project's own, counted in the key."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.commands import ALONE, ROOT, Project
from tests.integration.light import STAND_INS

Doit = Callable[..., subprocess.CompletedProcess[str]]
LAUNCHER = """
from dataclasses import dataclass
from typing import ClassVar

from pipeline.cluster.launchers.local import LocalTransport
from pipeline.cluster.launchers.settings import Capabilities, ClusterConfig


@dataclass(kw_only=True)
class HereConfig(ClusterConfig):
    capabilities: ClassVar[Capabilities] = Capabilities(shares_run_dir=True, is_this_computer=True)

    launcher: str = "here"
    greeting: str = "hello"


class HereTransport(LocalTransport):
    def exchange(self, stdin, hosts, timeout_s):
        print(f"{self.cluster.settings.greeting} from {self.cluster.launcher}", flush=True)
        return super().exchange(stdin, hosts, timeout_s)
"""
MODEL = """
from dataclasses import dataclass

from torch import nn

from trainers.core.config import ModelConfig, at_least


@dataclass(kw_only=True)
class TinyConfig(ModelConfig):
    name: str = "tiny"
    width: int = 4

    def __post_init__(self) -> None:
        at_least("model.width", self.width, 1)


def build(config, image):
    pixels = image.channels * image.height * image.width
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, config.width), nn.Linear(config.width, image.num_classes))
"""
PLAIN = """
from dataclasses import dataclass

from {where} import {base}


@dataclass(kw_only=True)
class Mine({base}):
    name: str = "{name}"
"""
OTHERS = {  # Hydra group → entry point group, name, base class, where that is imported from
    "optimizer": ("optimizers", "still", "OptimizerConfig", "trainers.core.config"),
    "schedule": ("schedules", "flat", "ScheduleConfig", "trainers.core.config"),
    "strategy": ("strategies", "loose", "StrategyConfig", "trainers.core.config"),
    "dataset": ("datasets", "blobs", "DatasetConfig", "trainers.core.config"),
    "search": ("samplers", "draw", "SearchConfig", "pipeline.config.schema"),
    "tracking": ("trackers", "notes", "TrackingConfig", "pipeline.config.schema"),
}
ENTRY_POINTS = {
    "launchers": "here",
    "models": "tiny",
    "programs": "fit",
    **{group: name for group, name, _, _ in OTHERS.values()},
}


def wheel(folder: Path, version: str) -> Path:
    """A distribution with one option of each kind, of which the launcher and the model do something."""
    path, about = folder / f"acme_parts-{version}-py3-none-any.whl", f"acme_parts-{version}.dist-info"
    files = {
        "acme_parts/__init__.py": "",
        "acme_parts/here.py": LAUNCHER,
        "acme_parts/tiny.py": MODEL,
        "acme_parts/fit.py": "import sys\n\nprint(sys.argv)\n",
        **{
            f"acme_parts/{name}.py": PLAIN.format(name=name, base=base, where=where)
            for _, name, base, where in OTHERS.values()
        },
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: acme-parts\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "".join(
            f"[paceline.{group}]\n{name} = acme_parts.{name}\n\n" for group, name in ENTRY_POINTS.items()
        ),
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in files) + f"{about}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has what this one has."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env/bin/python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    layer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (Path(site) / "parent.pth").write_text(f"{layer}\n{STAND_INS}\nimport light_start\n")
    return python


def install(python: Path, distribution: Path) -> None:
    quiet = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, str(distribution)], check=True)


@pytest.fixture
def doit(project: Project, python: Path) -> Doit:
    """A command with the options of the other package."""
    project.words = ["experiment=quickstart", "model=tiny", "cluster=here", "cluster.greeting=hi", "tracking=none"]
    project.words += ["trainer.max_steps=4", *ALONE]

    def call(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(python), *project.argv(verb, *words)[1:]]
        return subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    return call


@pytest.mark.ci
@pytest.mark.long  # composed, and in the key: the tests below
def test_a_launcher_and_a_model_of_another_package_train_and_its_version_is_in_the_key(
    project: Project, python: Path, doit: Doit, tmp_path: Path
) -> None:
    install(python, wheel(tmp_path, "1.2"))
    done = doit("train")
    assert done.returncode == 0, done.stdout
    assert "hi from here" in done.stdout
    key = json.loads((project.only_run() / "key.json").read_text())
    assert key["environment"]["acme-parts"].startswith("1.2")
    assert not any("acme" in name for name in key["code"])
    assert ": done already" in doit("train").stdout


def unpacked(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` where the distribution lies on Python's path."""
    with zipfile.ZipFile(wheel(folder, "1.2")) as archive:
        archive.extractall(folder / "site")
    env = {"PYTHONPATH": str(folder / "site"), "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_an_option_of_each_kind_is_composed_and_its_package_is_in_the_key(tmp_path: Path) -> None:
    words = ["cluster=here", "model=tiny", *(f"{group}={name}" for group, (_, name, _, _) in OTHERS.items())]
    code = f"""
from pathlib import Path
from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve
from pipeline.execution.run import code_reader, versions

words = {words!r} + ["search.n_trials=1"]
made = build(resolve(compose_config(words)), tuple(words), root=Path.cwd(), local_gpus=0)
print(*sorted(made.chosen), made.train.dataset.name, made.search.name)
print(made.tracking.tracker, made.cluster.settings.greeting)
print(versions(made, code_reader(Path.cwd())(made.chosen, ()))["acme-parts"])
"""
    done = unpacked(tmp_path, code)
    chosen = " ".join(f"acme_parts.{name}" for name in ("flat", "loose", "still", "tiny"))
    assert done.stdout == f"{chosen} blobs draw\nnotes hello\n1.2\n", done.stderr


@pytest.mark.ci
@pytest.mark.long
def test_a_script_of_another_package_is_a_program_whose_content_is_in_the_key(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve

words = ["program=fit", "program.args.lr=0.1"]
made = build(resolve(compose_config(words)), tuple(words), root=Path.cwd(), local_gpus=0)
print(made.script.path, made.script.file, [name for name in made.script.closure().digests if "acme" in name])
"""
    done = unpacked(tmp_path, code)
    assert done.stdout == f"_script/fit.py {tmp_path}/site/acme_parts/fit.py []\n", done.stderr


def test_help_lists_the_options_of_other_packages(tmp_path: Path) -> None:
    done = unpacked(
        tmp_path,
        "from pipeline.cli.help import installed_options; from pipeline.config.conf_files import groups; "
        "print([installed_options(group) for group in groups()])",
    )
    assert "'tiny': 'Of an installed package (acme_parts.tiny).'" in done.stdout
    assert "'here': 'Of an installed package (acme_parts.here).'" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_rank_says_which_options_there_are_with_those_of_other_packages(tmp_path: Path) -> None:
    code = "from trainers.core.options import module; print(module('model', 'tiny').__name__); module('model', 'tinny')"
    done = unpacked(tmp_path, code)
    assert done.stdout == "acme_parts.tiny\n"
    assert "model.name='tinny' is not an option; choose one of: own, resnet18" in done.stderr
    assert done.stderr.rstrip().endswith("tiny")
