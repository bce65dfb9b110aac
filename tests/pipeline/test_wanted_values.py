"""Words choose the runs that they trained, and no others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.commands import clean, compare, runs
from pipeline.cli.session import session
from pipeline.config import compose
from pipeline.core.errors import UsageError
from pipeline.core.specs import State
from pipeline.runs import journal
from tests.pipeline.conftest import Printed

OPTIONS = {
    "model/wide": "defaults:\n  - small_cnn\n  - _self_\nwidth: 64\n",
    "trainer/fast": "defaults:\n  - default\n  - _self_\nepochs: 3\n",
}
RUNS = {  # first letter of the key → words
    "a": ("model=small_cnn", "seed=1", "cluster.nproc_per_node=1"),
    "b": ("model=wide", "cluster=pssh", "cluster.hosts=[x,y]"),
    "c": ("model=small_cnn", "trainer=fast", "cluster=two_node", "tracking.experiment=trash"),
    "d": ("optimizer=torch", "optimizer.arguments={eps: 1e-6}", "dataset=torchvision", "dataset.class=MNIST"),
}


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory, composing: None) -> Iterator[Path]:
    """A run of each of these words, in a project with two options of its own."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(compose.CONF_DIRS[0], project / "conf")
    for name, text in OPTIONS.items():
        (project / f"conf/{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "CONF_DIRS", (project / "conf",))
        for letter, words in RUNS.items():
            folder = project / "runs" / (letter * 12)
            folder.mkdir(parents=True)
            (folder / "key.json").write_text('{"version": 2, "topology": {"nproc_per_node": [1]}}')
            (folder / "config.json").write_text(json.dumps(compose.resolve(compose.compose_config(words))))
            ended = journal.Entry(state=State.FAILED, attempt=1, time=1e9 + ord(letter))
            journal.append(folder / "journal.jsonl", ended)
        yield project / "runs"


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        *((words, key) for key, words in RUNS.items()),
        (("model=wide", "model.width=32"), "ac"),
        (("model=small_cnn",), "abc"),
        (("trainer=default",), "abd"),
        (("tracking=none",), ""),
        (("cluster=local", "cluster.nproc_per_node=1"), "ad"),  # of d it was auto
        (("cluster.nproc_per_node=auto",), "d"),
    ],
)
def test_words_choose_the_runs_that_they_trained(
    runs_dir: Path, printed: Printed, words: tuple[str, ...], keys: str
) -> None:
    listed = printed(runs.runs, runs_dir, *words)
    assert [line[0] for line in listed.splitlines() if "  FAILED" in line] == [*keys]
    removed = printed(clean.clean, runs_dir, "state=FAILED", *words)
    assert [line[0] for line in removed.splitlines() if "  FAILED" in line] == [*keys]
    try:
        compared = [run.key[0] for run in compare.chosen_runs(session(), [])]
    except UsageError as error:
        compared = [] if "matches these values" in error.what else [error.what]
    assert sorted(compared) == [*keys]


def test_arguments_choose_the_runs_of_scripts_without_the_scripts_name(tmp_path: Path, printed: Printed) -> None:
    for letter, lr in (("a", 0.5), ("b", 0.7)):
        folder = tmp_path / (letter * 12)
        folder.mkdir()
        (folder / "key.json").write_text('{"version": 2, "topology": {"nproc_per_node": [1]}}')
        (folder / "config.json").write_text(json.dumps({"program": {"name": "script", "args": {"lr": lr}}}))
        journal.append(folder / "journal.jsonl", journal.Entry(state=State.FAILED, attempt=1, time=1e9))
    assert printed(runs.runs, tmp_path, "program.args.lr=0.7").splitlines()[2].startswith("bbbbbbbbbbbb  FAILED")
    assert printed(runs.runs, tmp_path, "program.args.lr=0.9").endswith("matches these values\n")


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("search=tpe", "search=tpe: a run doesn't tell its search; choose by what that sets, such as model=…"),
        ("search.n_trials=5", "search.n_trials=5: a run doesn't tell its search.n_trials; choose by what that sets"),
        ("cluster.env.MY_TOKEN=abcdefgh", "cluster.env.MY_TOKEN is secret, which no file of a run tells; leave it out"),
    ],
)
def test_a_word_that_no_run_tells_is_refused(runs_dir: Path, printed: Printed, word: str, said: str) -> None:
    for verb in (runs.runs, clean.clean):
        with pytest.raises(UsageError) as refused:
            printed(verb, runs_dir, word)
        assert str(refused.value).startswith(said)
