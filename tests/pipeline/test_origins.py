"""`doit config`: where each value comes from. And what `doit train` does with the options of Hydra's command line."""

from __future__ import annotations

import pytest
import yaml  # type: ignore[import-untyped]

from pipeline.config import compose
from pipeline.config.overrides import origins
from tests.integration import preloaded

WORDS = (
    "experiment=cifar10_resnet50", "optimizer.lr=0.3", "cluster=two_node", "cluster.env.A=1",
    "++cluster.env={B_TOKEN: s3cret}", "dataset.source=${paths.data}/x",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[origins.Value]:
    return origins.values(WORDS)


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("seed", 0, "conf/config.yaml"),
        ("model.name", "resnet50", "conf/model/resnet50.yaml"),
        ("optimizer.momentum", 0.9, "conf/optimizer/sgd.yaml"),
        ("optimizer.lr", 0.3, "command line"),
        ("optimizer.lr_scaling", "none", "default of SGDConfig"),
        ("trainer.epochs", 30, "conf/experiment/cifar10_resnet18.yaml"),
        ("cluster.env.A", "1", "command line"),
        ("cluster.env.B_TOKEN", "***", "command line"),
        ("cluster.lease_s", 600.0, "default of PsshConfig"),
        ("dataset.source", "data/x", "command line"),
        ("sweep.slots", "auto", "default of SweepConfig"),
    ],
)
def test_a_value_comes_from_what_was_merged_last(
    found: list[origins.Value], key: str, value: object, origin: str
) -> None:
    assert [(item.value, item.origin) for item in found if ".".join(item.keys) == key] == [(value, origin)]


@pytest.mark.slow
def test_what_is_printed_is_the_composition_as_yaml(found: list[origins.Value]) -> None:
    read = yaml.safe_load(origins.as_yaml(found))
    composed = compose.resolve(compose.compose_config(WORDS))
    assert read.pop("cluster")["env"] == {"A": "1", "B_TOKEN": "***"}
    assert read == {name: section for name, section in composed.items() if name != "cluster"}


@pytest.mark.ci
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train", "--cfg", "job", "seed=7"], 0, "seed: 7\ndataset:\n  name: cifar10\n"),
        (["train", "--info", "defaults"], 0, "\nDefaults List\n"),
        (["config", "seed=7"], 0, "seed: 7                                       # command line\n"),
        (["plan", "--multirun", "seed=1,2"], 3,
         "ERROR: --multirun is an option of Hydra's command line, which doit plan"),
        (["-Z", "train"], 3, "ERROR: doit run: option -Z not recognized\n  try: doit help run\n"),
    ],
)  # fmt: skip
def test_options_of_hydra_and_doit_do_what_their_users_expect(words: list[str], code: int, said: str) -> None:
    done = preloaded.doit(*words)
    assert (done.returncode, done.stdout[: len(said)]) == (code, said)
