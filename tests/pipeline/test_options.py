"""An option is one module with its settings and one YAML file: nothing shared is edited, no other run's key changes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster import launchers
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.config.schema import OPTIONS
from pipeline.core.errors import UsageError
from pipeline.core.options import Options
from pipeline.core.places import HOME as ROOT
from pipeline.core.specs import Cluster, Host

SETTINGS = """
from dataclasses import dataclass

{imports}

{constants}

@dataclass(kw_only=True)
class MineConfig({base}):
    {named}: str = "mine"
    strength: int = 3

    def __post_init__(self) -> None:
        {check}
"""
IN_TRAINERS = 'at_least("{group}.strength", self.strength, LOW)'
KINDS = {  # group → folder, base class, where it is imported from, the rest of the module
    "model": (
        "trainers/models", "ModelConfig", "import torch\nfrom trainers.core.config import ModelConfig, at_least",
        "def build(config, image):\n    return torch.nn.Linear(config.strength, image.num_classes)\n"),
    "optimizer": (
        "trainers/optimizers", "OptimizerConfig",
        "from trainers.core.config import OptimizerConfig, at_least\nfrom trainers.optimizers import Optimizer",
        "class Mine(Optimizer): ...\n"),
    "schedule": (
        "trainers/schedules", "ScheduleConfig", "from trainers.core.config import ScheduleConfig, at_least",
        "def rate(config, peak, step, *, total_steps, steps_per_epoch):\n    return peak / config.strength\n"),
    "strategy": (
        "trainers/strategies", "StrategyConfig",
        "from trainers.core.config import StrategyConfig, at_least\nfrom trainers.strategies import Layout",
        "class Mine(Layout): ...\n"),
    "dataset": (
        "pipeline/data/datasets",
        "DatasetConfig",
        "import numpy\nfrom trainers.core.config import DatasetConfig, at_least\nfrom pipeline.data.base import RawSet",
        "def local_inputs(config):\n    return []\n",
    ),
    "search": (
        "pipeline/sweep/samplers", "SearchConfig",
        "import optuna\nfrom pipeline.config.schema import SearchConfig\nfrom trainers.core.config import at_least",
        "def sampler(config, space, seed):\n    return optuna.samplers.RandomSampler(seed=seed)\n"),
    "cluster": (
        "pipeline/cluster/launchers", "ClusterConfig", "from pipeline.cluster.launchers.local import LocalTransport\n"
        "from pipeline.cluster.launchers.settings import ClusterConfig\n" "from trainers.core.config import at_least",
        "class MineTransport(LocalTransport): ...\n"),
}  # fmt: skip
ASKED = """
import json, sys
from pathlib import Path
from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve
from pipeline.core.errors import PacelineError
from pipeline.execution.run import code_reader, versions

def told(words):
    try:
        made = build(resolve(compose_config(words)), tuple(words), root=Path.cwd(), local_gpus=0)
    except PacelineError as error:
        return str(error)
    code = code_reader(Path.cwd())(made.chosen, made.cluster.python_path)
    return [made.canonical, dict(code.digests), versions(made, code), made.topology]

answers = [told(words) for words in json.loads(sys.argv[1])]
print(json.dumps({"answers": answers, "heavy": sorted({"torch", "optuna", "numpy"} & {*sys.modules})}))
"""


def asked(root: Path, *lines: list[str]) -> dict[str, Any]:
    """What a run with each line of words would be made of in the project ``root``, or why there is none."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED, json.dumps(lines)],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def write(root: Path, group: str, name: str = "mine", *, more: str = "") -> None:
    folder, base, imports, rest = KINDS[group]
    settings = SETTINGS.format(
        imports=imports,
        base=base,
        constants="LOW = 1",
        named="launcher" if group == "cluster" else "name",
        check=IN_TRAINERS.format(group=group),
    )
    (root / folder / f"{name}.py").write_text(settings + rest + more)
    named = "launcher: mine\nnproc_per_node: 1\nhosts: [{name: a}]" if group == "cluster" else "name: mine\nstrength: 5"
    text = f"defaults:\n  - /schema/{group}@_here_: mine\n  - _self_\n{named}\n"
    (root / "conf" / group / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project."""
    root = tmp_path_factory.mktemp("project")
    for name in ("conf", "pipeline", "trainers", "hydra_plugins"):
        shutil.copytree(ROOT / name, root / name)  # with compiled code: each command would compile it anew
    return root


@pytest.mark.slow
@pytest.mark.long
def test_an_option_of_each_kind_is_found_and_changes_no_run_that_is_there(project: Path) -> None:
    experiments = [[f"experiment={path.stem}"] for path in sorted((project / "conf/experiment").glob("*.yaml"))]
    lines = [*experiments, ["cluster=two_node", "strategy=fsdp", "search=tpe"]]
    before = asked(project, *lines)
    assert not any(isinstance(answer, str) for answer in before["answers"])
    for group in KINDS:
        write(project, group)
    after = asked(project, *lines, *([f"{group}=mine"] for group in KINDS))
    assert after["answers"][: len(lines)] == before["answers"]
    assert after["heavy"] == []
    for group, answer in zip(KINDS, after["answers"][len(lines) :], strict=True):
        assert not isinstance(answer, str), answer
        config, code, _, _ = answer
        if group not in ("search", "cluster"):
            assert config[group]["strength"] == 5
        assert (f"{KINDS[group][0]}/mine.py" in code) == KINDS[group][0].startswith("trainers/")
    wrong = [[f"{group}=mine", f"{group}.strength=0"] for group in KINDS]
    wrong += [["model=mime"], ["model=mine", "model.strenth=2"], ["schedule=mine", "schedule.strength=x"]]
    said = asked(project, *wrong)["answers"]
    assert said[: len(KINDS)] == [f"{group}.strength=0 must be at least 1" for group in KINDS]
    assert "model has no option 'mime'; did you mean mine? valid: mine, own, resnet18" in said[-3]
    assert "did you mean model.strength=2? valid in model: name, strength" in said[-2]
    assert "'x'" in said[-1]
    assert "is no whole number" in said[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class MineConfig(ModelConfig:\n", "trainers/models/broken.py: "),
        ("class MineConfig(config.ModelConfig): ...\n",
         "is not an option; valid: (none) (trainers/models/broken.py has no"),
        ("class MineConfig(ModelConfig):\n    name: str = 'mine'\n", "is no dataclass; write @dataclass"),
        ("import torch\n@dataclass\nclass MineConfig(ModelConfig):\n    width: int = torch.get_num_threads()\n",
         "name 'torch' is not defined; they can use literals, the standard library"),
        ("def low(): return 1\n@dataclass\nclass MineConfig(ModelConfig):\n    width: int = low()\n",
         "trainers/models/broken.py: its settings can't be read: name 'low'"),
        ("@dataclass\nclass A(ModelConfig):\n    a: int = 1\n@dataclass\nclass B(ModelConfig):\n    b: int = 1\n",
         "A and B are both settings; an option is a module of its own"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_read_are_said_when_they_are_chosen(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trainers" / "models"
    folder.mkdir(parents=True)
    imports = "from dataclasses import dataclass\nfrom trainers.core.config import ModelConfig\n"
    (folder / "broken.py").write_text(imports + text)
    monkeypatch.setattr("pipeline.core.options.HOME", tmp_path)
    with pytest.raises(UsageError) as caught:
        Options("model", "trainers.models", OPTIONS["model"].base).settings("broken")
    assert said in str(caught.value)


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_one_broken_option_stops_only_its_own_runs(project: Path) -> None:
    (project / "trainers/models/torn.py").write_text("class TornConfig(ModelConfig):\nnot python\n")
    (project / "conf/model/torn.yaml").write_text("defaults:\n  - /schema/model@_here_: torn\nname: torn\n")
    good, bad = asked(project, ["experiment=quickstart"], ["model=torn"])["answers"]
    assert not isinstance(good, str)
    assert bad.startswith("model=torn: trainers/models/torn.py: ")


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
def test_the_model_of_the_documentation_is_an_option(project: Path) -> None:
    python, yaml = (
        textwrap.dedent(block.partition("\n")[2])
        for block in re.findall(
            r"   ```(?:python|yaml)\n.*?(?=   ```)", (ROOT / "docs/models.md").read_text(), re.DOTALL
        )
    )
    (project / "trainers/models/tiny_mlp.py").write_text(python)
    (project / "conf/model/tiny_mlp.yaml").write_text(yaml)
    made, refused = asked(project, ["model=tiny_mlp", "model.hidden=128"], ["model=tiny_mlp", "model.hidden=0"])[
        "answers"
    ]
    assert made[0]["model"] == {"name": "tiny_mlp", "hidden": 128}
    assert refused == "model.hidden=0 must be at least 1"


@pytest.mark.parametrize("group", list(OPTIONS))
def test_both_halves_read_the_same_settings(group: str) -> None:
    """The class that is read out of the source has the fields of the one that an import gives."""
    from dataclasses import fields
    from importlib import import_module

    options = OPTIONS[group]
    assert options.names()
    for name in options.names():
        module = import_module(f"{options.package}.{name}")
        (real,) = [
            item
            for item in vars(module).values()
            if isinstance(item, type) and item.__module__ == module.__name__ and {*item.__bases__} & {*options.bases}
        ]
        found = options.settings(name)
        assert [(item.name, item.default) for item in fields(found)] == [
            (item.name, item.default) for item in fields(real)
        ]
        assert (
            found.__post_init__.__code__.co_code == real.__post_init__.__code__.co_code
            if hasattr(real, "__post_init__")
            else not hasattr(found, "__post_init__")
        )


def test_a_module_counts_however_its_class_is_laid_out_if_a_command_line_can_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trainers" / "models"
    folder.mkdir(parents=True)
    text = "from dataclasses import dataclass\nfrom trainers.core.config import ModelConfig\n@dataclass\n"
    (folder / "wide.py").write_text(f"{text}class A(\n    ModelConfig,\n):\n    name: str = 'wide'\n")
    (folder / "not-a-name.py").write_text(f"{text}class A(ModelConfig):\n    name: str = 'x'\n")
    (folder / "helper.py").write_text("class A: ...\n")
    monkeypatch.setattr("pipeline.core.options.HOME", tmp_path)
    options = Options("model", "trainers.models", OPTIONS["model"].base)
    assert options.names() == ["wide"]
    assert options.settings("wide")().name == "wide"


def test_what_a_launcher_can_do_is_known_without_its_module() -> None:
    here = Cluster(launcher="local", hosts=(Host(name="localhost"),))
    assert launchers.capabilities(here) == Capabilities(shares_run_dir=True, is_this_computer=True)
    assert launchers.capabilities(replace(here, launcher="pssh")) == Capabilities()


def test_an_entry_point_that_leads_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.options.installed_options", lambda package: {"gone": "nowhere.gone"})
    options = Options("model", "trainers.models", OPTIONS["model"].base)
    with pytest.raises(
        UsageError, match=r"model=gone: an installed package says that it is nowhere\.gone, which isn't"
    ):
        options.settings("gone")
