"""A composition that was made before is found for the same words and files, and for no others."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from pipeline.config.memo import ComposeMemo
from tests.integration.commands import ROOT
from tests.pipeline.composed import composed

pytestmark = pytest.mark.slow

EDITED = [
    "conf/experiment/quickstart.yaml",
    "pipeline/config/schema.py",
    "trainers/models/small_cnn.py",
    "pipeline/cluster/launchers/local.py",
]
WORDS = ("experiment=quickstart", "optimizer.lr=1e-1")
SOME = {"paths": {"runs": "runs"}}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name in ("pipeline", "trainers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    ComposeMemo(tmp_path, WORDS).keep(composed(WORDS))
    return tmp_path


def test_what_is_remembered_is_what_hydra_composes(project: Path) -> None:
    assert ComposeMemo(project, WORDS).recall() == composed(WORDS)
    assert ComposeMemo(project, WORDS[::-1]).recall() is None
    assert ComposeMemo(project, ()).recall() is None


def test_an_edit_of_what_a_composition_is_made_from_forgets_it(project: Path) -> None:
    for name in EDITED:
        before = (project / name).read_bytes()
        (project / name).write_bytes(before + b"# more\n")
        assert ComposeMemo(project, WORDS).recall() is None, name
        (project / name).write_bytes(before)
        assert ComposeMemo(project, WORDS).recall() is not None
    (project / "trainers/models/mine.py").touch()
    assert ComposeMemo(project, WORDS).recall() is None


def test_what_takes_a_value_from_outside_is_never_remembered(project: Path) -> None:
    words = ("paths.runs=${oc.env:HOME}/runs",)
    ComposeMemo(project, words).keep(SOME)
    assert ComposeMemo(project, words).recall() is None
    (project / "conf" / "cluster" / "mine.yaml").write_text("python: ${oc.env:PYTHON}\n")
    ComposeMemo(project, WORDS).keep(SOME)
    assert ComposeMemo(project, WORDS).recall() is None


def test_a_value_of_an_options_default_or_of_ones_own_resolver_is_never_remembered(project: Path) -> None:
    for name, old, new in (
        ("trainers/models/small_cnn.py", "width: int = 32", 'width: int = "${oc.env:WIDTH,32}"'),
        ("trainers/models/small_cnn.py", "width: int = 32", 'width: int = int(os.environ.get("WIDTH", 32))'),
        ("conf/config.yaml", "seed: 0", "seed: ${mine:0}"),
        ("conf/config.yaml", "seed: 0", "seed: ${oc.${kind}:SEED}"),
    ):
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))
        ComposeMemo(project, WORDS).keep(SOME)
        assert ComposeMemo(project, WORDS).recall() is None, new
        (project / name).write_text(text)


def test_nothing_is_remembered_where_hydra_searches_other_folders(project: Path) -> None:
    config = project / "conf" / "config.yaml"
    config.write_text(re.sub(r"\nhydra:.*\n", "\nhydra:\n  searchpath: [/shared]\n", config.read_text()))
    ComposeMemo(project, WORDS).keep(SOME)
    assert ComposeMemo(project, WORDS).recall() is None


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
        ComposeMemo(project, WORDS).keep(SOME)
        assert ComposeMemo(project, WORDS).recall() == SOME
        path.write_text(path.read_text().replace("1", "2"))
        assert ComposeMemo(project, WORDS).recall() is None
    ComposeMemo(project, WORDS).keep(SOME)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.yaml").write_text("seed: 3\n")
    (project / "conf" / "shared").unlink()
    (project / "conf" / "shared").symlink_to(tmp_path / "other")
    assert ComposeMemo(project, WORDS).recall() is None


def test_an_edit_that_keeps_size_and_time_of_a_file_is_seen(project: Path) -> None:
    path = project / "conf" / "config.yaml"
    before = path.stat()
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ComposeMemo(project, WORDS).recall() is None


def test_nothing_is_remembered_of_what_has_a_secret(project: Path) -> None:
    words = (*WORDS, "++cluster.env.API_TOKEN=abcdefgh1234")
    ComposeMemo(project, words).keep(composed(words))
    assert ComposeMemo(project, words).recall() is None
    assert "abcdefgh1234" not in (project / "runs/.paceline/composed.json").read_text()


def test_a_composition_is_remembered_with_the_runs_it_leads_to(project: Path, tmp_path: Path) -> None:
    for word in ("paths.runs=else/where", "paths.runs='else where'", f'paths.runs="{tmp_path}/x y"'):
        words = (*WORDS, word)
        resolved = composed(words)
        ComposeMemo(project, words).keep(resolved)
        assert ComposeMemo(project, words).recall() == resolved
        assert (project / resolved["paths"]["runs"] / ".paceline" / "composed.json").exists()


def test_a_composition_whose_runs_cannot_be_seen_in_its_words_is_made_anew(project: Path) -> None:
    for word in ("paths={runs: other}", "+experiment.paths=1", "paths.runs=${paths.data}", r"paths.runs=a\ b"):
        ComposeMemo(project, (word,)).keep({"paths": {"runs": "other"}})
        assert ComposeMemo(project, (word,)).recall() is None, word
    assert not (project / "runs/.paceline/composed.json").read_text().count("other")
