from typing import Any

import pytest

from pipeline.runs.contents import distinguishing_labels, run_name

CONFIG: dict[str, Any] = {"model": {"name": "resnet18"}, "dataset": {"name": "cifar10"}, "optimizer": {"name": "sgd"}}
KEY = "9176099e4463"


@pytest.mark.parametrize(
    ("words", "apart"),
    [
        (["optimizer.lr=0.1", "seed=2"], ("lr=0.1", "seed=2")),
        (["optimizer=adam", "+optimizer.lr=1e-3"], ("adam", "lr=1e-3")),
        (["seed=1", "seed=2"], ("seed=2",)),
        (["a.x.width=1", "b.width=2"], ("x.width=1", "b.width=2")),
        (["optimizer.lr=0.012345678901"], ("lr=0.01235",)),
        (["cluster=two_node", "++cluster.env.A=1", "paths.runs=/r", "tracking@x=none", "sweep.name=a"], ()),
        (["+notify.command=mail"], ()),
        (["~dataset.flip"], ("~dataset.flip",)),
        (["model.name=small_cnn", "optimizer.name=adam"], ("small_cnn", "adam")),
        (["dataset.source='" + "x" * 50 + "'"], ("source=" + "x" * 31 + "…",)),
    ],
)
def test_what_sets_a_run_apart(words: list[str], apart: tuple[str, ...]) -> None:
    assert distinguishing_labels(words, CONFIG) == apart


def test_a_run_by_itself_has_model_and_data_and_what_it_was_told() -> None:
    words = ["experiment=cifar10_resnet18", "model=resnet18", "dataset=cifar10", "trainer.epochs=3", "cluster=two_node"]
    assert run_name(CONFIG, words, KEY) == "resnet18 cifar10 epochs=3 · 9176"
    assert run_name(CONFIG, [], KEY) == "resnet18 cifar10 · 9176"
    assert len(run_name(CONFIG, [f"a.b{number}={number}" for number in range(250)], KEY)) < 130


def test_a_script_is_called_by_its_file() -> None:
    config = {"program": {"name": "script", "script": "examples/gpt/train.py", "args": {"lr": 1}}}
    words = ["program=script", "program.script=examples/gpt/train.py", "program.args.lr=1"]
    assert run_name(config, words, KEY) == "train lr=1 · 9176"
