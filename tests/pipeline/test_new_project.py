"""`paceline init`, and what a project of one's own has in front of Paceline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl

from hydra_plugins.paceline_plugins import PacelineSearchPath
from pipeline.cli import invocation
from pipeline.cli import main as new_project
from pipeline.config import compose
from pipeline.config.conf_files import groups
from pipeline.config.overrides import origins
from pipeline.core import places
from pipeline.core.errors import PacelineError, UsageError
from pipeline.keys.import_closure import import_closure


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    new_project.init(["acme"])
    return tmp_path / "acme"


def test_a_new_project_has_a_dodo_of_two_lines_and_no_other_name_in_it(project: Path) -> None:
    files = (path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file())
    names = sorted(name for name in files if not name.startswith(".git/"))
    assert names == [
        *(".gitignore", "README.md", "acme/__init__.py", "acme/nets.py", "acme/script.py"),
        *("conf/experiment/example.yaml", "conf/model/my_net.yaml", "dodo.py", "pyproject.toml", "tests/test_nets.py"),
    ]
    assert len((project / "dodo.py").read_text().splitlines()) == 2
    assert not any(new_project.NAME_IN_TEMPLATE in (project / name).read_text() for name in names)
    assert {"/runs/", "/data/", "/mlflow.db*"} < {*(project / ".gitignore").read_text().split()}


def test_a_new_project_is_a_repository_unless_that_is_unwanted_or_it_lies_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new_project.init(["with_it"])
    new_project.init(["without", "--no-git"])
    assert [(tmp_path / name / ".git").is_dir() for name in ("with_it", "without")] == [True, False]
    new_project.init(["with_it/inside"])
    assert not (tmp_path / "with_it" / "inside" / ".git").exists()


def test_a_new_project_answers_in_json(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pipeline.cli.main", "init", "acme", "--json"]
    env = {**os.environ, "PYTHONPATH": str(places.HOME)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"]) == ("paceline.init/1", True)
    assert answer["data"]["lines"][1:] == ["  cd acme", "  paceline train experiment=example", "  paceline ui"]


def test_the_next_commands_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my runs").mkdir()
    said = new_project.init(["my runs/acme"]).splitlines()
    assert said[0] == f"made {tmp_path}/my runs/acme; what to try next:"
    assert said[1:] == ["  cd 'my runs/acme'", "  paceline train experiment=example", "  paceline ui"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "paceline init takes one word, the name of the project"),
        (["a", "b"], "paceline init takes one word"),
        (["--force"], "paceline init takes one word"),
        ([""], "paceline init takes one word"),
        (["my-project"], "'my-project' can't be the name of a Python package\n  try: paceline init my_project"),
        (["2nets"], "'2nets' can't be the name of a Python package\n  try: paceline init my_2nets"),
        (["__main__"], "'__main__' can't be the name of a Python package\n  try: paceline init main"),
        (["class"], "'class' can't be the name of a Python package\n  try: paceline init my_class"),
        (["größe"], "can't be the name of a Python package"),
        (["$(x)"], "can't be the name of a Python package\n  try: paceline init x"),
        (["torch"], "there is a module torch in this Python already\n  try: paceline init my_torch"),
        (["json"], "there is a module json in this Python already"),
        (["pipeline"], "there is a module pipeline in this Python already"),
        (["runs"], "runs is a name that the project needs itself\n  try: paceline init my_runs"),
    ],
)
def test_a_name_that_can_not_be_a_projects_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        new_project.init(words)
    assert said in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_what_is_there_is_left_alone_but_an_empty_folder_becomes_the_project(project: Path) -> None:
    (project / "dodo.py").write_text("mine")
    with pytest.raises(UsageError, match="is there already, and holds something"):
        new_project.init(["acme"])
    (project.parent / "file").touch()
    with pytest.raises(UsageError, match="is there already, and is no folder"):
        new_project.init(["file"])
    assert (project / "dodo.py").read_text() == "mine"
    (project.parent / "empty").mkdir()
    new_project.init(["empty"])
    assert (project.parent / "empty/empty/nets.py").is_file()


def test_the_folder_that_a_shell_stands_in_is_filled_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "acme").mkdir()
    monkeypatch.chdir(here)
    before = here.stat().st_ino
    assert new_project.init(["."]).splitlines()[1:] == ["  paceline train experiment=example", "  paceline ui"]
    assert (here.stat().st_ino, (here / "acme/nets.py").is_file()) == (before, True)
    assert [path.name for path in tmp_path.iterdir()] == ["acme"]


def test_a_project_that_can_not_be_written_whole_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PacelineError, match=f"the project {tmp_path}/acme can't be made: No space left on device"):
        new_project.init(["acme"])
    assert not any(tmp_path.iterdir())


def test_a_project_is_found_from_every_folder_below_and_a_clone_is_one(project: Path) -> None:
    assert places.enclosing(project / "conf/model") == project
    assert places.enclosing(project.parent) is None
    assert places.enclosing(places.HOME / "trainers") == places.HOME
    assert places.code_of(project) == places.HOME == places.code_of(places.HOME)
    assert places.conf_dirs(project) == (project / "conf", places.HOME / "conf")
    assert places.conf_dirs(places.HOME) == (places.HOME / "conf",)


@pytest.mark.slow
def test_of_two_options_with_one_name_the_projects_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "conf/schedule").mkdir()
    (project / "conf/schedule/step.yaml").write_text(
        "# Ours.\ndefaults:\n  - /schema/schedule@_here_: step\n  - _self_\nname: step\ngamma: 0.25\n"
    )
    monkeypatch.setattr(compose, "CONF_DIRS", places.conf_dirs(project))
    words = ["experiment=example", "schedule=step"]
    composed = compose.resolve(compose.compose_config(words))
    assert composed["model"]["target"] == "acme.nets:MyNet"
    assert composed["schedule"]["gamma"] == 0.25
    told = {".".join(value.keys): value.origin for value in origins.values(words)}
    assert told["schedule.gamma"] == "conf/schedule/step.yaml"
    assert told["dataset.holdout"] == "Paceline's conf/dataset/digits.yaml"
    found = {group.name: group.options for group in groups(project)}
    assert found["schedule"]["step"] == "Ours."
    assert {"my_net", "resnet18"} < {*found["model"]}


def test_other_applications_and_older_commits_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    search_path = ConfigSearchPathImpl()
    for module in (None, ModuleType("of an older commit")):
        monkeypatch.setitem(sys.modules, "pipeline.config.compose", module)
        PacelineSearchPath().manipulate_search_path(search_path)
    assert search_path.get_path() == []


@pytest.mark.slow
def test_the_option_of_the_docs_is_one_of_pacelines_with_another_value(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (places.HOME / "docs/projects.md").read_text(encoding="utf-8")
    (project / "conf/model/wide.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    monkeypatch.setattr(compose, "CONF_DIRS", places.conf_dirs(project))
    model = compose.resolve(compose.compose_config(["model=wide"]))["model"]
    assert (model["name"], model["width"]) == ("small_cnn", 64)


@pytest.mark.slow
def test_the_closure_has_pacelines_sources_wherever_they_lie(project: Path) -> None:
    there = import_closure(project, ["trainers.classifier", "acme.nets"])
    here = import_closure(places.HOME, "trainers.classifier")
    own = {name: digest for name, digest in there.digests.items() if name.startswith("acme/")}
    assert {**here.digests, **own} == there.digests
    assert {*own} == {"acme/__init__.py", "acme/nets.py"}
    assert there.versions == here.versions


@pytest.mark.parametrize("name", ["trainers.py", "pipeline/__init__.py", "paceline.py"])
def test_a_module_of_the_project_with_a_name_of_pacelines_is_refused(project: Path, name: str) -> None:
    places.refuse_hiding_modules(project)
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).touch()
    with pytest.raises(UsageError, match="has the name of Paceline's own module"):
        places.refuse_hiding_modules(project)


def test_a_restarted_command_learns_where_it_was_typed_from_a_variable_of_pacelines(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_STARTED_IN", str(project / "data"))  # such variables are kept from scripts and keys
    monkeypatch.chdir(project.parent)
    invocation.change_folder(project)
    assert (Path.cwd(), invocation.typed_in()) == (project, project / "data")


def test_a_dodo_of_another_project_is_refused(project: Path) -> None:
    with pytest.raises(UsageError, match=f"{project} is another project than {places.ROOT}"):
        places.refuse_other_code(project)


def test_a_folder_with_a_script_becomes_a_project_and_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('loss: 0.5')\n")
    (tmp_path / ".gitignore").write_text("mine\n")
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\nline-length = 90\n")
    assert new_project.init(["."]).splitlines()[1:] == ["  paceline run train.py", "  paceline ui"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".gitignore", "dodo.py", "pyproject.toml", "train.py")
    ]
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    tables = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]
    assert (tables["ruff"], tables["doit"]["loader"]) == ({"line-length": 90}, "paceline")
    with pytest.raises(UsageError, match=r"has a dodo\.py already"):
        new_project.init(["."])


def test_a_script_of_ones_own_that_uses_hydra_loads_nothing_of_paceline() -> None:
    """Hydra imports all of an environment's plug-ins."""
    code = "import sys; from hydra.core.plugins import Plugins; Plugins.instance()"
    shown = "print([name for name in sys.modules if name.split('.')[0] in ('pipeline', 'trainers')])"
    done = subprocess.run([sys.executable, "-c", f"{code}; {shown}"], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
