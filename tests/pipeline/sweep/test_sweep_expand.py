"""A sweep's words stand for the trials that Hydra's multirun would make, each composed as Hydra composes it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest

from pipeline.config import compose
from pipeline.config.overrides.trials import Overrides, TrialComposer, jobs
from pipeline.core.errors import UsageError
from pipeline.sweep.expand import Space, expand

DIMENSIONS = [
    "model=small_cnn,resnet18",
    "model=glob(*)",
    "optimizer=sgd,adam",
    "experiment=quickstart,mnist_cnn",
    "schedule=glob(*,exclude=step)",
    "optimizer.lr=0.1,1e-2,1",
    "seed=range(3)",
    "trainer.epochs=choice(2,3)",
    "trainer.max_steps=null,5",
    "dataset.flip=true,false",
    "dataset.source=null,'a, b'",
    "cluster.workdir=/x,/y",
    "cluster.env={A: '1'},{A: '2'}",
    "cluster=local,pssh,two_node",
    "cluster.hosts=[{name: a}],[{name: b, env: {A: 1}}],[c,me@d:22]",
    "cluster.nproc_per_node=1,2",
    "tracking.experiment=a,'b c'",
    "+cluster.env.X=1,2",
    "++seed=4,5",
    "paths.runs=a,b",
    "paths.data=${paths.runs}/d,e",
    "optimizer={lr: 0.5},{lr: 0.25}",
    "seed=7",
    "optimizer.lr=0.7",
    "trainer.label_smoothing=0,0.1",
    "cluster.interface=${tracking.experiment}",
]


def resolved(make: Callable[[Overrides], Any], job: Overrides) -> Any:
    """The configuration, or how it was refused."""
    try:
        return make(job)
    except UsageError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.long
def test_each_trial_is_what_hydra_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "compose", hydra.compose)
    chance = random.Random(0)
    refused = compared = 0
    with compose.hydra_ready():
        for _ in range(8):
            words = chance.sample(DIMENSIONS, chance.randint(2, 5))
            composer = TrialComposer()
            for job in chance.sample(found := jobs(words), min(2, len(found))):
                theirs = resolved(lambda job: compose.resolve(compose.compose_now(job)), job)
                assert resolved(composer.resolve, job) == theirs, job
                compared += 1
                refused += isinstance(theirs, str)
    assert compared - refused > 8


def space(*words: str, root: Path) -> Space:
    return expand(words, root=root, local_gpus=0)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_trial_with_a_value_that_no_key_holds_is_refused_as_a_run_is(tmp_path: Path, value: str) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=rf"program\.args\.lr={value}: .* in quotes it reaches the script"):
        space("program.script=train.py", "program.torchrun=false", f"program.args.lr=1,{value}", root=tmp_path)


@pytest.mark.slow
def test_the_words_of_a_swept_script_stand_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["program.torchrun=false", "program.args.lr=1,2", "program.script=train.py"]
    found = [space(*order, root=tmp_path) for order in itertools.permutations(words)]
    assert {len(one.trials) for one in found} == {2}
    assert len({one.configurations_digest for one in found}) == 1


@pytest.mark.slow
def test_equal_configurations_are_one_trial_however_they_are_spelled(tmp_path: Path) -> None:
    found = space("optimizer.lr=0.1,0.10,1e-1,0.2", "seed=range(2)", root=tmp_path)
    assert [trial.chosen for trial in found.trials] == [
        ("optimizer.lr=0.1", "seed=0"),
        ("optimizer.lr=0.1", "seed=1"),
        ("optimizer.lr=0.2", "seed=0"),
        ("optimizer.lr=0.2", "seed=1"),
    ]
    assert found.duplicates == 4


@pytest.mark.slow
def test_a_named_grid_and_a_word_of_the_command_line_that_replaces_a_part_of_it(tmp_path: Path) -> None:
    found = space("sweep=lr_grid", "experiment=quickstart", "seed=5,6", root=tmp_path)
    assert [trial.config.train.seed for trial in found.trials[:2]] == [5, 6]
    assert sorted({trial.config.train.optimizer.lr for trial in found.trials}) == [0.03, 0.1, 0.3]


@pytest.mark.slow
def test_what_says_how_the_sweep_runs_is_no_part_of_a_trial(tmp_path: Path) -> None:
    plain = space("seed=0,1", root=tmp_path)
    other = space("seed=0,1", "sweep.slots=2", "sweep.name=x", "sweep.retries=0", root=tmp_path)
    assert other.configurations_digest == plain.configurations_digest
    assert [trial.overrides for trial in other.trials] == [trial.overrides for trial in plain.trials]
    assert "sweep" not in other.trials[0].config.resolved


@pytest.mark.slow
def test_nodes_gives_each_trial_hosts_of_its_own_and_the_batch_must_fit_them(tmp_path: Path) -> None:
    found = space("seed=0,1", "cluster=two_node", "sweep.nodes=1", "trainer.global_batch_size=65", root=tmp_path)
    assert [part.hosts[0].name for part in found.slots] == ["node0", "node1"]
    assert found.trials[0].config.cluster.nnodes == 1
    with pytest.raises(UsageError, match="65 can't be shared evenly by 2 ranks"):
        space("seed=0,1", "cluster=two_node", "trainer.global_batch_size=65", root=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lr=interval(0.01,1)"], "an interval has no end of values, so only a search can draw from it"),
        (["optimizer.lrr=1,2"], "unknown key 'optimizer.lrr'; did you mean optimizer.lr=1?"),
        (["optimizer.lr=1,-2"], "trial optimizer.lr=-2: optimizer.lr=-2.0 must be greater than 0"),
        (["sweep=nope", "seed=1,2"], "sweep has no option 'nope'"),
        (["seed=1,2", "sweep.slots=1,2"], "can't differ from trial to trial"),
        (["seed=range("], "seed=range( can't be read as a list [a,b], a mapping {a: 1} or a function"),
        (["seed=1,2", "tracking.experiment=a,b"], "a text with a comma is written tracking.experiment=\"'a,b'\""),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r".*") as caught:
        space(*words, root=tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("seed=range(1,1)", "seed=range(1,1) has no value in it"),
        ("optimizer.lr=range(0,1,-1)", "optimizer.lr=range(0,1,-1) has no value in it"),
        ("model=glob(zz*)", "model=glob(zz*) has no value in it: no option of model has such a name"),
        ("optimizer.lr=range(0,1,0.0)", "needs a step that isn't 0"),
        ("seed=range(nan,2)", "needs three finite numbers"),
        ("seed=range(0,1000000000)", "that would be 1,000,000,000 trials; a sweep takes at most 100,000"),
        ("seed=range(9,-99999999,-1)", "'interval(-99999999,9)'"),
        ("seed=1,2 seed=range(900) optimizer.lr=range(0,1,1e-3)", "optimizer.lr=range(0,1,1e-3) and the other words"),
    ],
)
def test_a_grid_without_trials_or_with_too_many_is_refused(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        jobs(words.split())


@pytest.mark.slow
def test_the_largest_grid_is_counted_as_it_is_made() -> None:
    words = ["seed=range(0,1)", "seed=range(5,1,-2)", "optimizer.lr=range(0.0,0.3,0.1)", "model=glob(resnet*)"]
    assert len(jobs(words)) == 2 * 3 * len(jobs(["model=glob(resnet*)"]))
    assert len(jobs(["seed=range(0,100000)"])) == 100_000


@pytest.mark.slow
def test_one_run_is_told_of_doit_sweep_whatever_the_sweep_is_written_as() -> None:
    for word in ("seed=1,2", "seed=range(1,1)", "model=glob(*)"):
        with pytest.raises(UsageError, match=rf"^{re.escape(word)}: several values are a sweep.*doit sweep"):
            compose.compose_config(["experiment=quickstart", word])
