"""A person's own defaults: ~/.config/paceline/defaults.yaml and conf/local.yaml of the project."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.config import compose, conf_files, memo
from pipeline.config.overrides import origins
from pipeline.core.errors import UsageError
from pipeline.keys.content_key import canonical_config
from tests.integration.commands import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project and a home without defaults; the file for all projects."""
    monkeypatch.delenv(conf_files.OWN_VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for module in ("conf_files", "composition_errors", "overrides.origins"):
        monkeypatch.setattr(f"pipeline.config.{module}.ROOT", tmp_path)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.setattr(compose, "CONF_DIRS", (tmp_path / "conf",))
    path = tmp_path / "home" / "paceline" / "defaults.yaml"
    path.parent.mkdir(parents=True)
    return path


def found(*words: str) -> dict[str, tuple[object, str]]:
    return {".".join(item.keys): (item.value, item.origin) for item in origins.values(words)}


def test_the_projects_go_before_the_users_and_experiment_and_words_before_both(mine: Path, tmp_path: Path) -> None:
    mine.write_text("seed: 1\ntrainer: {epochs: 1, max_steps: 11}\noptimizer: {lr: 0.1}\n")
    (tmp_path / "conf" / "local.yaml").write_text("trainer:\n  epochs: 2\noptimizer: {lr: 0.2}\n")
    user = "home/paceline/defaults.yaml"  # with its whole path where it isn't inside of the project
    values = found("experiment=quickstart", "optimizer.lr=0.3")
    assert values["seed"] == (1, user)
    assert values["trainer.max_steps"] == (11, user)
    assert values["trainer.epochs"] == (20, "conf/experiment/quickstart.yaml")
    assert values["optimizer.lr"] == (0.3, "command line")
    assert found()["trainer.epochs"] == (2, "conf/local.yaml")


def test_an_entry_of_their_defaults_list_chooses_an_option_unless_a_word_does(mine: Path, tmp_path: Path) -> None:
    mine.write_text("defaults:\n  - optimizer: adamw\n  - tracking: none\n")
    (tmp_path / "conf" / "local.yaml").write_text("defaults:\n  - override /optimizer: muon\n")
    assert (found()["optimizer.name"][0], found()["tracking.tracker"][0]) == ("muon", None)
    assert found("optimizer=sgd")["optimizer.name"] == ("sgd", "conf/optimizer/sgd.yaml")
    assert conf_files.own_merged() == {"defaults": [{"override /optimizer": "muon"}, {"override /tracking": "none"}]}


def test_they_count_in_a_key_by_the_values_that_they_set(mine: Path) -> None:
    def canonical(*words: str) -> object:
        return canonical_config(compose.resolve(compose.compose_config(words)))

    before = canonical()
    mine.write_text("paths: {runs: /scratch/runs}\ntrainer: {epochs: 5}\n")
    assert canonical("trainer.epochs=10") == before
    after = canonical()
    mine.unlink()
    assert canonical("trainer.epochs=5") == after != before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\ntrainer:\n  epohcs: 3\n", "{file}, line 3: unknown key 'trainer.epohcs'; did you mean trainer.epoc"),
        ("defaults:\n  - trackig: none\n", "{file}, line 2: there is no group 'trackig' to override; did you mean "),
        ("defaults:\n  - quickstart\n", "{file}: 'quickstart' chooses no option, and its defaults list does nothing e"),
    ],
)
def test_a_mistake_in_them_is_named_with_file_line_and_mend(mine: Path, tmp_path: Path, text: str, said: str) -> None:
    for path, shown in ((mine, mine.relative_to(tmp_path)), (tmp_path / "conf/local.yaml", "conf/local.yaml")):
        path.write_text(text)
        with pytest.raises(UsageError) as caught:
            compose.resolve(compose.compose_config(["seed=1", "model=small_cnn"]))
        assert str(caught.value).startswith(said.format(file=shown))
        path.unlink()


def test_a_remembered_composition_is_forgotten_when_they_change_and_found_where_they_put_the_runs(
    mine: Path, tmp_path: Path
) -> None:
    for name in ("pipeline", "trainers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    local, known = tmp_path / "conf" / "local.yaml", {"paths": {"runs": "elsewhere"}}
    local.write_text("paths:\n  data: d\n  runs: elsewhere\n")
    for path in (local, mine):
        memo.ComposeMemo(tmp_path, ()).keep(known)
        assert memo.ComposeMemo(tmp_path, ()).recall() == known
        with path.open("a") as file:
            file.write("# more\n")
        assert memo.ComposeMemo(tmp_path, ()).recall() is None


def test_a_file_named_by_the_variable_stands_for_both(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.write_text("seed: 1\n")
    (tmp_path / "conf" / "local.yaml").write_text("seed: 2\n")
    (tmp_path / "other.yaml").write_text("paths: {data: d}\n")
    monkeypatch.setenv(conf_files.OWN_VARIABLE, str(tmp_path / "other.yaml"))
    assert (found()["seed"], found()["paths.data"]) == ((0, "conf/config.yaml"), ("d", "other.yaml"))
    monkeypatch.setenv(conf_files.OWN_VARIABLE, "")
    assert conf_files.own_files() == {}
