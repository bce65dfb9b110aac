"""Hosts and GPUs are dealt out to slots without changing any key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.cli.commands.sweep import run_trials
from pipeline.cli.invocation import Invocation
from pipeline.cluster.plan import environment
from pipeline.config.compose import compose_config, resolve
from pipeline.config.schema import NotifyConfig, SweepConfig
from pipeline.core.errors import UsageError
from pipeline.core.specs import Cluster, Host
from pipeline.keys.content_key import topology
from pipeline.sweep.expand import host_overrides, slots
from pipeline.sweep.folder import SweepFolder
from trainers.contract.host_facts import HostFacts

FACTS = HostFacts(
    host="a", identity="a", hostname="a", address="a", interface=None, python="p", python_version="3.12.0",
    torch_version="2", gpus=4, cpus=8, memory_bytes=1, disk_free_bytes=1, home="/h",
)  # fmt: skip


def cluster(*hosts: Host, launcher: str = "pssh") -> Cluster:
    return Cluster(launcher=launcher, hosts=hosts)


def local(nproc: int = 1) -> Cluster:
    return cluster(Host(name="localhost", nproc_per_node=nproc), launcher="local")


def test_a_sweep_says_that_it_takes_no_spares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.sweep.conduct.Conductor.run", lambda _: [])
    for spares, said in (((), ""), ((Host(name="c"),), "cluster.spares: a sweep takes none; ")):
        parts = slots(dataclasses.replace(cluster(Host(name="a")), spares=spares), SweepConfig(), [])
        trial = SimpleNamespace(config=SimpleNamespace(notify=NotifyConfig(), resolved={}, cluster=parts[0]))
        what: Any = SimpleNamespace(key="", slots=parts, settings=SimpleNamespace(retries=0), trials=[trial])
        source, folder = cast("Any", SimpleNamespace(total=1)), SweepFolder(tmp_path / "sweep")
        run_trials(what, source, folder, "2 trials", Invocation(verb="sweep"))
        assert capsys.readouterr().err.partition("a trial")[0].removesuffix("2 trials\n") == said


def test_nodes_cuts_the_hosts_into_groups_and_a_command_names_the_group() -> None:
    whole = cluster(*(Host(name=name, port=2200) for name in "abcde"))
    found = slots(whole, SweepConfig(nodes=2), [])
    assert [[host.name for host in part.hosts] for part in found] == [["a", "b"], ["c", "d"]]
    assert host_overrides(whole, found[1]) == (
        "cluster.hostfile=null",
        "cluster.hosts=[{name: 'c', nproc_per_node: 1, port: 2200}, {name: 'd', nproc_per_node: 1, port: 2200}]",
    )


def test_the_command_of_a_trial_gives_its_hosts_the_same_variables_again() -> None:
    values = {"FOLDER": r"C:\\data\x", "QUOTED": "it's", "LITERAL": "${HOME}"}
    whole = cluster(*(Host(name=name, env=values) for name in "ab"))
    composed = resolve(
        compose_config(["cluster=pssh", *host_overrides(whole, slots(whole, SweepConfig(nodes=1), [])[0])])
    )
    assert [host["env"] for host in composed["cluster"]["hosts"]] == [values]


def test_gpus_of_this_computer_are_shared_by_as_many_trials_as_they_suffice_for() -> None:
    found = slots(local(2), SweepConfig(), ["4", "5", "6", "7"])
    assert [part.hosts[0].placement for part in found] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    assert topology(found[0]) == topology(found[1]) == topology(local(2))
    env = environment(found[1].hosts[0], FACTS, run_dir="/r")
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) == ("6,7", "2")


def test_without_gpus_one_trial_at_a_time_unless_more_are_asked_for() -> None:
    assert len(slots(local(2), SweepConfig(), [])) == 1
    shared = slots(local(2), SweepConfig(slots=2), [])
    assert [(dict(part.hosts[0].placement), part.hosts[0].shared_by) for part in shared] == [({}, 2), ({}, 2)]


@pytest.mark.parametrize(
    ("whole", "settings", "said"),
    [
        (cluster(Host(name="a"), Host(name="b")), SweepConfig(nodes=3), "sweep.nodes=3 must lie between 1 and"),
        (cluster(Host(name="a"), Host(name="b", nproc_per_node=2)), SweepConfig(nodes=1), "b and a differ in nproc"),
        (local(), SweepConfig(slots="two"), "sweep.slots=two must be a whole number"),
        (local(2), SweepConfig(slots=3), "needs 6 GPUs, there are 4; set cluster.nproc_per_node=1"),
        (dataclasses.replace(local(), hosts=(Host(name="localhost", env={"CUDA_VISIBLE_DEVICES": "0"}),)),
         SweepConfig(slots=2), "cluster.env sets CUDA_VISIBLE_DEVICES=0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_mend(whole: Cluster, settings: SweepConfig, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        slots(whole, settings, ["0", "1", "2", "3"])
