"""A composition that was made before is found for the same words and files, and for no others."""

from __future__ import annotations

import os
import re
import shutil
import time
import types
from pathlib import Path

import pytest

from pipeline.config import build, remembered
from pipeline.config.basis import Basis
from pipeline.config.remembered import OPTION_FOLDERS, BuiltBasis, Composition
from pipeline.config.schema import OPTIONS
from pipeline.core.errors import UsageError
from tests.integration.commands import ROOT
from tests.pipeline.composed import composed

EDITED = [
    "conf/experiment/quickstart.yaml",
    "pipeline/config/schema.py",
    "trainers/core/config.py",
    "trainers/core/trainer_config.py",
    "trainers/models/small_cnn.py",
    "trainers/models/mine.py",  # a new one
    "pipeline/data/datasets/digits.py",
    "pipeline/cluster/launchers/local.py",
    "pipeline/core/cluster.py",
]
WORDS = ("experiment=quickstart", "optimizer.lr=1e-1")
SOME = {"paths": {"runs": "runs"}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name in ("pipeline", "trainers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    Composition(tmp_path, WORDS).keep(composed(WORDS))
    return tmp_path


def test_what_is_remembered_is_what_hydra_composes(project: Path) -> None:
    assert Composition(project, WORDS).recall() == composed(WORDS)
    assert Composition(project, WORDS[::-1]).recall() is None
    assert Composition(project, ()).recall() is None


@pytest.mark.parametrize("name", EDITED)
def test_an_edit_of_what_a_composition_is_made_from_forgets_it(project: Path, name: str) -> None:
    with (project / name).open("a") as file:
        file.write("# more\n")
    assert Composition(project, WORDS).recall() is None


def test_what_takes_a_value_from_outside_is_never_remembered(project: Path) -> None:
    words = ("paths.runs=${oc.env:HOME}/runs",)
    Composition(project, words).keep(SOME)
    assert Composition(project, words).recall() is None
    (project / "conf" / "cluster" / "mine.yaml").write_text("python: ${oc.env:PYTHON}\n")
    Composition(project, WORDS).keep(SOME)
    assert Composition(project, WORDS).recall() is None


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("trainers/models/small_cnn.py", "width: int = 32", 'width: int = "${oc.env:WIDTH,32}"'),
        ("trainers/models/small_cnn.py", "width: int = 32", 'width: int = int(os.environ.get("WIDTH", 32))'),
        ("conf/config.yaml", "seed: 0", "seed: ${mine:0}"),
        ("conf/config.yaml", "seed: 0", "seed: ${oc.${kind}:SEED}"),
    ],
)
def test_a_value_of_an_options_default_or_of_ones_own_resolver_is_never_remembered(
    project: Path, name: str, old: str, new: str
) -> None:
    text = (project / name).read_text()
    assert old in text
    (project / name).write_text(text.replace(old, new))
    Composition(project, WORDS).keep(SOME)
    assert Composition(project, WORDS).recall() is None


def test_a_reference_within_the_configuration_is_remembered(project: Path) -> None:
    words = ("trainer.max_steps=${seed}", "optimizer.lr=${oc.decode:'1'}")
    Composition(project, words).keep(SOME)
    assert Composition(project, words).recall() == SOME


@pytest.mark.parametrize("entry", ["file://{shared}", "{shared}", "pkg://shared_conf"])
def test_a_file_of_a_folder_on_hydras_search_path_is_looked_at(
    project: Path, tmp_path_factory: pytest.TempPathFactory, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path_factory.mktemp("elsewhere") / "shared_conf"
    monkeypatch.syspath_prepend(str(shared.parent))
    recipe = shared / "experiment" / "team.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("# @package _global_\noptimizer: {lr: 0.05}\n")
    config = project / "conf" / "config.yaml"
    added = f"\nhydra:\n  searchpath: ['{entry.format(shared=shared)}']\n"
    config.write_text(re.sub(r"\nhydra:.*\n", added, config.read_text()))
    Composition(project, WORDS).keep(SOME)
    assert Composition(project, WORDS).recall() == SOME
    recipe.write_text(recipe.read_text().replace("0.05", "0.2"))
    assert Composition(project, WORDS).recall() is None
    Composition(project, WORDS).keep(SOME)
    config.write_text(config.read_text().replace(entry.format(shared=shared), "s3://bucket/conf"))
    Composition(project, WORDS).keep(SOME)  # nobody can tell here whether that has changed
    assert Composition(project, WORDS).recall() is None


def test_a_file_behind_a_symbolic_link_and_a_plugin_of_hydra_are_looked_at(project: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "mine.yaml").write_text("seed: 1\n")
    (project / "conf" / "shared").symlink_to(shared)
    (shared / "up").symlink_to(project / "conf")
    (project / "hydra_plugins").mkdir()
    plugin = project / "hydra_plugins" / "mine.py"
    plugin.write_text("x = 1\n")
    for path in (shared / "mine.yaml", plugin):
        Composition(project, WORDS).keep(SOME)
        assert Composition(project, WORDS).recall() == SOME
        path.write_text(path.read_text().replace("1", "2"))
        assert Composition(project, WORDS).recall() is None
    Composition(project, WORDS).keep(SOME)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.yaml").write_text("seed: 3\n")
    (project / "conf" / "shared").unlink()
    (project / "conf" / "shared").symlink_to(tmp_path / "other")
    assert Composition(project, WORDS).recall() is None


def test_files_that_nobody_has_written_to_are_not_read_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(0.03)  # what was written a moment ago is read
    Composition(project, WORDS)
    with monkeypatch.context() as patched:
        patched.setattr(remembered, "_name", None)
        assert Composition(project, WORDS).recall() == composed(WORDS)
    path = project / "conf" / "config.yaml"
    before = path.stat()
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Composition(project, WORDS).recall() is None


def test_a_file_system_that_counts_whole_seconds_is_read_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000 * 10**9
    monkeypatch.setattr("time.time_ns", lambda: now)
    about = types.SimpleNamespace(st_size=1, st_mtime_ns=0, st_ino=1, st_dev=1, st_ctime_ns=now - 10**9)
    monkeypatch.setattr(remembered, "os", types.SimpleNamespace(stat=lambda _: about))
    assert remembered._seen(WORDS, {"conf/config.yaml": "config.yaml"}) is None
    about.st_ctime_ns += 1
    assert remembered._seen(WORDS, {"conf/config.yaml": "config.yaml"}) is not None


def _built(project: Path, words: tuple[str, ...], *, gpus: int = 0) -> Basis:
    return build.build(composed(words), words, root=project, local_gpus=gpus).basis


def test_what_a_composition_was_built_to_is_remembered_for_this_computer(project: Path) -> None:
    built = _built(project, WORDS)
    BuiltBasis(Composition(project, WORDS), project, 0).keep(built)
    found = BuiltBasis(Composition(project, WORDS), project, 0).recall()
    assert found == built
    assert BuiltBasis(Composition(project, WORDS), project, 2).recall() is None  # two ranks, but on GPUs
    assert BuiltBasis(Composition(project, WORDS), project.parent, 0).recall() is None
    with (project / "pipeline/cluster/plan.py").open("a") as file:
        file.write("# other checks\n")
    assert BuiltBasis(Composition(project, WORDS), project, 0).recall() is None


def test_of_a_script_all_is_remembered_but_where_its_files_lie(project: Path) -> None:
    (project / "my").mkdir()
    (project / "my/train.py").touch()
    words = ("program.script=my/train.py", "program.args.lr=0.1", "program.workdir=my")
    Composition(project, words).keep(composed(words))
    built = _built(project, words)
    BuiltBasis(Composition(project, words), project, 0).keep(built)
    known = BuiltBasis(Composition(project, words), project, 0)
    assert known.recall() == built
    (project / "my/train.py").unlink()
    with pytest.raises(UsageError, match=r"program\.script=my/train\.py: there is no "):
        known.recall()


def test_other_hosts_in_the_hostfile_are_another_basis(project: Path) -> None:
    (project / "hosts").write_text("a slots=1\nb slots=1\n")
    words = ("cluster=pssh", "cluster.hostfile=hosts")
    Composition(project, words).keep(composed(words))
    BuiltBasis(Composition(project, words), project, 0).keep(_built(project, words))
    found = BuiltBasis(Composition(project, words), project, 0).recall()
    assert found is not None
    assert found.key_parts.topology["nnodes"] == 2
    (project / "hosts").write_text("a slots=1\nc slots=1\n")
    assert BuiltBasis(Composition(project, words), project, 0).recall() is None
    (project / "hosts").unlink()
    assert BuiltBasis(Composition(project, words), project, 0).recall() is None


def test_nothing_is_remembered_of_what_has_a_secret(project: Path) -> None:
    words = (*WORDS, "++cluster.env.API_TOKEN=abcdefgh1234")
    resolved = composed(words)
    Composition(project, words).keep(resolved)
    BuiltBasis(Composition(project, words), project, 0).keep(_built(project, words))
    assert BuiltBasis(Composition(project, words), project, 0).recall() is None
    assert "abcdefgh1234" not in (project / "runs/.paceline/composed.json").read_text()


def test_the_modules_of_every_group_of_options_are_looked_at() -> None:
    assert {group: options.package.replace(".", "/") for group, options in OPTIONS.items()} == OPTION_FOLDERS


def test_a_torn_file_costs_one_composition(project: Path) -> None:
    (project / "runs" / ".paceline" / "composed.json").write_text('{"')
    assert Composition(project, WORDS).recall() is None
    Composition(project, WORDS).keep(SOME)
    assert Composition(project, WORDS).recall() == SOME


@pytest.mark.parametrize("word", ["paths.runs=else/where", "paths.runs='else where'", 'paths.runs="/tmp/x y"'])
def test_a_composition_is_remembered_with_the_runs_it_leads_to(project: Path, tmp_path: Path, word: str) -> None:
    words = (*WORDS, word.replace("/tmp", str(tmp_path)))
    resolved = composed(words)
    Composition(project, words).keep(resolved)
    assert Composition(project, words).recall() == resolved
    assert (project / resolved["paths"]["runs"] / ".paceline" / "composed.json").exists()


@pytest.mark.parametrize(
    "word", ["paths={runs: other}", "+experiment.paths=1", "paths.runs=${paths.data}", r"paths.runs=a\ b"]
)
def test_a_composition_whose_runs_cannot_be_seen_in_its_words_is_made_anew(project: Path, word: str) -> None:
    Composition(project, (word,)).keep({"paths": {"runs": "other"}})
    assert Composition(project, (word,)).recall() is None
    assert not (project / "runs/.paceline/composed.json").read_text().count("other")


@pytest.mark.slow
def test_a_basis_is_built_anew_where_files_of_this_computer_decide(project: Path, tmp_path: Path) -> None:
    words = ("dataset=arrays", f"dataset.source='{tmp_path}/mine.npz'")
    for before in (None, b"some"):
        if before is not None:
            (tmp_path / "mine.npz").write_bytes(before)
        Composition(project, words).keep(composed(words))
        built = _built(project, words)
        assert (built.inputs is None) == (before is None)
        BuiltBasis(Composition(project, words), project, 0).keep(built)
        assert BuiltBasis(Composition(project, words), project, 0).recall() is None
