"""The content key: what changes it, what does not."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.preflight import versions_on_hosts
from pipeline.config.build import RunConfig, build
from pipeline.core.errors import UsageError
from pipeline.execution.run import overridden
from pipeline.keys import ABSENT
from pipeline.keys.content_key import ContentKey, canonical_config, content_key, differences
from pipeline.keys.installed import version
from tests.pipeline.composed import composed

ENVIRONMENT = {"python": "3.11.7", "torch": "2.15.0"}


def configured(*overrides: str, local_gpus: int = 0) -> RunConfig:
    return build(composed(overrides), overrides, root=Path("/project"), local_gpus=local_gpus)


def key_of(*overrides: str, **parts: Any) -> ContentKey:
    config = configured(*overrides)
    made = {"code": {"trainers/a.py": "1"}, "data_digest": "d", "environment": ENVIRONMENT, **parts}
    return content_key(canonical=config.canonical, topology=config.topology, **made)


@pytest.mark.parametrize(
    "same",
    [
        ("optimizer.lr=1e-1",),
        ("optimizer.lr=.10",),
        ("trainer.epochs=10", "seed=0"),
        ("seed=0", "trainer.epochs=10"),
        ("paths.runs=/elsewhere", "tracking.uri=http://host:5000"),
        ("dataset.source=/mnt/data",),
        ("cluster.lease_s=5", "cluster.collective_timeout_s=60", "cluster.max_restarts=3",
         "cluster.python=/usr/bin/python3"),
        ("cluster.env.CUDA_VISIBLE_DEVICES='2,3'", "cluster.env.NCCL_DEBUG=INFO", "cluster.env.TMPDIR=/scratch"),
    ],
)  # fmt: skip
def test_spelling_order_and_whereabouts_do_not_change_the_key(same: tuple[str, ...]) -> None:
    assert key_of(*same).digest == key_of().digest


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        ("optimizer.lr=0.2",),
        ("seed=1",),
        ("model=resnet50",),
        ("cluster.nproc_per_node=4",),
        ("cluster=two_node",),
        ("++cluster.env={OMP_NUM_THREADS: '3'}",),
        ("cluster.env.ATEN_CPU_CAPABILITY=default",),
        ("cluster.env.NCCL_ALGO=Tree",),
        ("cluster.env.OF_MY_MODEL=1",),
    ],
)
def test_configuration_and_topology_change_the_key(other: tuple[str, ...]) -> None:
    assert key_of(*other).digest != key_of().digest


@pytest.mark.parametrize(
    "part",
    [{"code": {"trainers/a.py": "2"}}, {"data_digest": "e"}, {"environment": {**ENVIRONMENT, "torch": "2.16.0"}}],
)
def test_code_data_and_environment_change_the_key(part: dict[str, Any]) -> None:
    assert key_of(**part).digest != key_of().digest


@pytest.mark.slow
def test_the_order_inside_of_an_argument_counts_and_that_of_arguments_by_name_does_not() -> None:
    own = ("model=own", "model.target=torchvision.models:resnet18")
    first = configured(*own, "model.args.parts={b: 8, a: 16}", "model.args.z=1", "model.args.c=2")
    assert list(first.resolved["model"]["args"]) == ["c", "parts", "z"]  # what **more gets
    assert list(first.resolved["model"]["args"]["parts"]) == ["b", "a"]
    told = canonical_config(first.resolved)
    assert told["order"] == {"model.args.parts": ["b", "a"]}
    swapped = configured(*own, "model.args.c=2", "model.args.parts={b: 8, a: 16}", "model.args.z=1")
    assert canonical_config(swapped.resolved) == told
    other = configured(*own, "model.args.parts={a: 16, b: 8}", "model.args.z=1", "model.args.c=2")
    assert "order" not in canonical_config(other.resolved)  # the key that it had when no order was kept


def test_two_hosts_by_other_names_have_the_same_key() -> None:
    hosts = "cluster.hosts=[{name: a, port: 22, user: me}, {name: b}]"
    assert key_of("cluster=two_node", hosts).digest == key_of("cluster=two_node").digest


@pytest.mark.slow
def test_with_shards_their_number_stands_in_the_key_in_place_of_the_ranks() -> None:
    words = ("trainer.shards=8",)
    alone = key_of(*words)
    for cluster in (
        ("cluster.nproc_per_node=4",),
        ("cluster=two_node",),
        ("cluster=pssh", "cluster.hosts=[{name: a}]"),
    ):
        assert key_of(*words, *cluster).digest == alone.digest
    other = [("trainer.shards=4",), ("cluster.env.OMP_NUM_THREADS=2",), ("cluster.device=cuda",), ("trainer.shards=0",)]
    assert len({alone.digest, *(key_of(*words, *more).digest for more in other)}) == 1 + len(other)


def test_a_run_has_the_key_that_it_had_before_fields_came_whose_defaults_it_keeps() -> None:
    config = configured()
    groups = ("dataset", "trainer", "optimizer")
    before = {**config.resolved, **{group: {**config.resolved[group]} for group in groups}}
    added = "shards clip_norm patience ema class_weights sync_batchnorm loss loss_args metrics freeze digests"
    del before["init"]
    for name in added.split():
        del before["trainer"][name]
    del before["optimizer"]["decay_bias_and_norm"]
    for name in ("augmentation", "augmentation_args", "random_resized_crop"):
        del before["dataset"][name]
    assert canonical_config(config.resolved) == canonical_config(before) == before_paths(before)
    assert set(key_of().parts["topology"]) == {"nnodes", "device", "nproc_per_node", "env"}


def before_paths(resolved: dict[str, Any]) -> dict[str, Any]:
    """All of a configuration that is part of the key."""
    found = {name: value for name, value in resolved.items() if name not in ("cluster", "tracking", "paths")}
    return {**found, "dataset": {name: value for name, value in found["dataset"].items() if name != "source"}}


@pytest.mark.parametrize(
    "word",
    [
        "trainer.clip_norm=1",
        "trainer.patience=3",
        "trainer.ema=0.9",
        "trainer.class_weights=balanced",
        "trainer.class_weights=[1,2]",
        "trainer.sync_batchnorm=true",
        "optimizer.decay_bias_and_norm=false",
        "trainer.freeze=[features.*]",
        "init.weights=w.pt",
    ],
)
def test_a_field_that_came_later_is_in_the_key_once_it_is_set(word: str) -> None:
    alone = "cluster.nproc_per_node=1"  # with more, normalising over all ranks needs GPUs
    assert key_of(word, alone).digest != key_of(alone).digest


def test_the_order_of_arguments_is_a_difference_only_between_the_same_arguments() -> None:
    def parts(*names: str) -> dict[str, Any]:
        order = {} if [*names] == sorted(names) else {"order": {"program.args": [*names]}}
        return {"config": {"program": {"args": dict.fromkeys(names, 1)}, **order}}

    texts = [[str(item) for item in differences(parts("b", "a"), parts(*others))] for others in (("b",), ("a", "b"))]
    assert texts == [["program.args.a: 1 → (absent)"], ["order of program.args: b, a → a, b"]]
    without = {"config": {"program": {"args": None}}}
    assert {item.field.partition(".")[0] for item in differences(parts("b", "a"), without)} == {"program"}


def test_the_order_of_frozen_patterns_and_one_said_twice_are_no_other_run() -> None:
    alone = "cluster.nproc_per_node=1"
    keys = {key_of(f"trainer.freeze=[{said}]", alone).digest for said in ("a.*,b.*", "b.*,a.*", "a.*,b.*,a.*")}
    assert len(keys) == 1
    assert key_of("trainer.freeze=[a.*]", alone).digest not in keys


@pytest.mark.slow
def test_versions_are_those_that_python_names() -> None:
    names = {found.name for found in importlib.metadata.distributions()}
    assert {name: version(name) for name in names} == {name: importlib.metadata.version(name) for name in names}
    assert version("no-such-package") is None


def device_of(*overrides: str, local_gpus: int = 0) -> str:
    config = configured(*overrides, local_gpus=local_gpus)
    key = content_key(canonical=config.canonical, topology=config.topology, code={}, data_digest="d", environment={})
    return str(key.parts["topology"]["device"])


def test_a_run_on_gpus_has_another_key_than_the_same_command_without() -> None:
    words = ("cluster.nproc_per_node=2",)
    assert (device_of(*words), device_of(*words, local_gpus=2)) == ("cpu", "cuda")
    assert device_of(*words, "cluster.device=cpu", local_gpus=2) == "cpu"
    assert device_of(*words, "cluster.env.CUDA_VISIBLE_DEVICES=''", local_gpus=2) == "cpu"


def test_gpus_of_this_computer_say_nothing_of_other_hosts() -> None:
    assert device_of("cluster=two_node", local_gpus=8) == "cpu"
    assert device_of("cluster=two_node", "cluster.device=cuda") == "cuda"


def test_what_the_hosts_have_is_the_keys_where_it_is_told() -> None:
    assert overridden(ENVIRONMENT, {"torch": "2.9.1"}) == {"python": "3.11.7", "torch": "2.9.1"}
    with pytest.raises(
        UsageError, match=r"cluster\.environment\.torhc: the run doesn't import that; did you mean torch"
    ):
        overridden(ENVIRONMENT, {"torhc": "2.9.1"})
    parts = {"torch": ABSENT, "torch.nn": ABSENT, "wandb.sdk": ABSENT}  # a script where torch is missing
    assert overridden(parts, {"torch": "2.9.1"}) == {"torch": "2.9.1", "wandb.sdk": ABSENT}


def test_asking_the_hosts_needs_hosts_that_are_known_before_the_run() -> None:
    with pytest.raises(UsageError, match=r"cluster\.environment=hosts: cluster=slurm grants hosts when the run starts"):
        versions_on_hosts(configured("cluster=slurm", "cluster.nproc_per_node=1").cluster, ENVIRONMENT)
    with pytest.raises(UsageError, match=r"cluster\.environment=here must be hosts, or versions of distributions"):
        configured("cluster.environment=here")
