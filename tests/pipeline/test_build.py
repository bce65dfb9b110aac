"""Typed configuration: hosts, ranks and the values that can't work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.build import RunConfig, build
from pipeline.core.errors import UsageError
from pipeline.core.places import ROOT
from pipeline.execution.run import code_reader
from tests.pipeline.composed import composed


def configured(*overrides: str, root: Path = Path("/project"), gpus: int = 0) -> RunConfig:
    return build(composed(overrides), overrides, root=root, local_gpus=gpus)


def test_auto_is_all_gpus_or_two_cpu_ranks() -> None:
    assert configured(gpus=4).cluster.world_size == 4
    assert configured(gpus=0).cluster.world_size == 2


@pytest.mark.slow
def test_hosts_take_what_they_leave_open_from_the_cluster() -> None:
    cluster = configured(
        "cluster=pssh",
        "cluster.nproc_per_node=2",
        "++cluster.env={A: '1', B: '2'}",
        "cluster.interface=eth1",
        "trainer.global_batch_size=120",
        "cluster.hosts=[{name: a, nproc_per_node: 4, env: {B: '3'}}, {name: b, user: me, port: 2222, interface: ib0}]",
    ).cluster
    first, second = cluster.hosts
    assert (first.nproc_per_node, dict(first.env), first.interface) == (4, {"A": "1", "B": "3"}, "eth1")
    assert (second.nproc_per_node, second.label, second.interface) == (2, "me@b:2222", "ib0")
    assert cluster.world_size == 6


def test_hosts_may_be_told_by_their_names_alone() -> None:
    words = ("cluster=pssh", "cluster.hosts=[node1, me@10.0.0.2:2222]", "cluster.spares=[1e3]")
    cluster = configured(*words).cluster
    assert [host.label for host in (*cluster.hosts, *cluster.spares)] == ["node1", "me@10.0.0.2:2222", "1e3"]
    assert [(host.name, host.port, host.user) for host in cluster.hosts][1] == ("10.0.0.2", 2222, "me")


@pytest.mark.parametrize("word", ["optimizer.arguments.eps=1e-6", "optimizer.arguments={eps: 1e-6}"])
def test_arguments_of_torchs_class_need_no_plus(word: str) -> None:
    assert configured("optimizer=torch", word).resolved["optimizer"]["arguments"] == {"eps": 1e-6}


@pytest.mark.slow
def test_fsdp_takes_the_classes_of_torch_that_update_each_element_alone() -> None:
    words = ("optimizer=torch", "strategy=fsdp")
    assert configured(*words, "optimizer.class_name=RAdam").train.strategy.name == "fsdp"
    with pytest.raises(UsageError, match="fsdp updates slices of tensors, which Adafactor can't; choose optimizer=sgd"):
        configured(*words, "optimizer.class_name=Adafactor")


def test_a_hostfile_replaces_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("# rack 1\nme@gpu1:2222 slots=4\n\ngpu2\n")
    words = [
        "cluster=two_node",
        "cluster.hostfile=hosts.txt",
        "cluster.nproc_per_node=2",
        "trainer.global_batch_size=120",
    ]
    cluster = configured(*words, root=tmp_path).cluster
    assert [(host.label, host.nproc_per_node) for host in cluster.hosts] == [("me@gpu1:2222", 4), ("gpu2", 2)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+note=1"], "unknown key 'note'; "),
        (["optimizer.arguments.eps=1"],
         "optimizer.arguments is not a field of optimizer=sgd; it has: decay_bias_and_norm, "),
        (["+trainer.max_epochs=3"],
         "trainer.max_epochs is not a field of trainer=default; it has: "),
        (["++optimizer.foo=1"], "optimizer.foo is not a field of optimizer=sgd; it has: decay_bias_and_norm, "),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0 must be greater than 0"),
        (["optimizer.lr_scaling=cube"],
         "optimizer.lr_scaling='cube' is not an option; choose one of: none, linear, sqrt"),
        (["trainer.precision=fp8"], "choose one of: auto, fp32, bf16, fp16"),
        (["trainer.epochs=0"], "trainer.epochs=0 must be at least 1"),
        (["seed=9223372036854775808"], "seed=9223372036854775808 must be at most 9223372036854775807"),
        (["cluster.launcher=psh"], "did you mean pssh?"),
        (["cluster.nproc_per_node=0"], "must be a whole number from 1 or auto"),
        (["cluster=two_node", "cluster.nproc_per_node=auto"], "auto only for cluster=local"),
        (["cluster=pssh"], "cluster.hosts is empty"),
        (["cluster=pssh", "cluster.hostfile="], "cluster.hostfile is empty; is a shell variable unset?"),
        (["cluster=pssh", "cluster.nproc_per_node=1", "cluster.hosts=[{name: 'a,b'}]"], "can be given: it holds ','"),
        (["cluster=two_node", "cluster.hosts=[{name: a}, {name: a}]"], "names a twice"),
        (["cluster=two_node", "++cluster.hosts.0.slots=4"], "cluster.hosts node0: 'slots' is no field of a host; did"),
        (["cluster=two_node", "cluster.spares=[c]", "+cluster.spares.0.x=4"], "cluster.spares c: 'x' is no field of a"),
        (["cluster=pssh", "cluster.hosts=[{port: 22}]"], "cluster.hosts[0].name is missing: every host has a name"),
        (["cluster=pssh", "cluster.hostfile='~nosuch/hosts'"],
         "cluster.hostfile=~nosuch/hosts: ~nosuch stands for the home of a user who isn't known here"),
        (["cluster=two_node", "cluster.ssh_config='~nosuch/c'"], "cluster.ssh_config=~nosuch/c: ~nosuch stands for"),
        (["cluster=two_node", "cluster.spares=[{name: c}, {name: c}]"], "cluster.spares names c twice"),
        (["cluster=two_node", "cluster.spares=[{name: c, nproc_per_node: 2}]"],
         "cluster.spares c can take no host's place: it has 2 ranks (nproc_per_node=2), and node0 has 1; "),
        (["cluster=two_node", "cluster.spares=[{name: c, env: {A: 1}}]"],
         "cluster.spares c can take no host's place: its env has A='1', and that of node0 not set; "),
        (["cluster=two_node", "cluster.spares=[{name: node0}]"], "cluster.hosts and cluster.spares both name node0; "),
        (["cluster.hosts=[{name: a}]"], "use cluster=pssh"),
        (["cluster=pssh", "cluster.hostfile=nowhere.txt"], "cluster.hostfile=nowhere.txt"),
        (["cluster.nproc_per_node=3", "trainer.global_batch_size=100"],
         "trainer.global_batch_size=100 can't be shared evenly by 3 ranks; nearest that can: 99 or 102"),
        (["trainer.global_batch_size=1"], "nearest that can: 2, or at most 1 rank (cluster.nproc_per_node)"),
        (["cluster.device=gpu"], "cluster.device='gpu' is not an option; did you mean cuda? valid: auto, cpu, cuda"),
        (["trainer.accumulate_steps=3"], "2 ranks × 3 micro-batches (trainer.accumulate_steps); nearest that can: 126"),
        (["trainer.shards=8", "cluster.nproc_per_node=3"],
         "trainer.shards=8 can't be shared evenly by 3 ranks; numbers of ranks that can: 1, 2, 4, 8"),
        (["trainer.shards=8", "trainer.global_batch_size=12"],
         "=12 can't be shared evenly by 8 parts (trainer.shards); nearest that can: 8 or 16"),
        (["trainer.shards=4", "cluster=pssh", "cluster.hosts=[{name: a}, {name: b, env: {OMP_NUM_THREADS: 2}}]"],
         "OMP_NUM_THREADS in the env of a and b differs; set it for all of them, as cluster.env.OMP_NUM_THREADS"),
        (["cluster=slurm", "cluster.spares=[c]"],
         "cluster.spares is about hosts that are named, and slurm queues jobs"),
        (["cluster=slurm", "cluster.when_busy=wait"],
         "cluster.when_busy=wait is about hosts that are named, and slurm"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        configured(*overrides)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (Path(__file__).parents[2] / "conf/experiment").glob("*.yaml"))
)
@pytest.mark.parametrize(("cluster", "nnodes"), [("local", 1), ("two_node", 2)])
def test_every_experiment_composes_for_one_and_two_nodes(name: str, cluster: str, nnodes: int) -> None:
    assert configured(f"experiment={name}", f"cluster={cluster}").cluster.nnodes == nnodes


@pytest.mark.slow
def test_a_strategy_needs_its_own_code_alone() -> None:
    strategies = {f"trainers/strategies/{name}.py" for name in ("ddp", "fsdp")}
    for name in ("ddp", "fsdp"):
        code = code_reader(ROOT)(configured(f"strategy={name}").chosen, ())
        assert strategies & {*code.digests} == {f"trainers/strategies/{name}.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"A": "a\0b"}, "cluster.env.A holds a NUL character"),
        ({"A": [1, 2]}, r"cluster.env.A=\[1, 2\] must be one text, number or boolean"),
        ({"A": {"b": 1}}, r"cluster.env.A=\{'b': 1\} must be one text"),
        ({"A": None}, "cluster.env.A=None must be one text"),
        ({"A=B": "x"}, "cluster.env: 'A=B' can't be the name of a variable"),
        ({"": "x"}, "cluster.env: '' can't be the name of a variable"),
        ({"A\0": "x"}, "can't be the name of a variable"),
        ({"A": "\udcff"}, "cluster.env.A is not text"),
    ],
)
def test_a_variable_that_no_process_can_have_is_refused(env: dict[str, Any], said: str) -> None:
    resolved = composed(["cluster=local"])
    resolved["cluster"]["env"] = env
    with pytest.raises(UsageError, match=said):
        build(resolved, (), root=Path("/"), local_gpus=0)
    resolved["cluster"].update(
        launcher="pssh", nproc_per_node=1, env={}, hosts=[{"name": "node0", "nproc_per_node": 1, "env": env}]
    )
    with pytest.raises(UsageError, match=said.replace("cluster.env", "cluster.hosts node0: env")):
        build(resolved, (), root=Path("/"), local_gpus=0)


def test_numbers_and_booleans_are_variables_in_pythons_spelling() -> None:
    words = ["++cluster.env={A: true, B: 1e-3, C: 007, D: 'two\nlines'}"]
    built = build(composed(words), (), root=Path("/"), local_gpus=0)
    assert built.cluster.hosts[0].env == {"A": "True", "B": "0.001", "C": "007", "D": "two\nlines"}


@pytest.mark.parametrize(
    "word", ["paths.runs='a\nb'", "tracking.experiment='a\x1b[2Jb'", "dataset.source='a\0b'", "cluster.workdir='\x7f'"]
)
def test_a_control_character_in_a_value_is_refused_with_its_field(word: str) -> None:
    with pytest.raises(UsageError, match=rf"{word.partition('=')[0]}='.*' holds a control character"):
        build(composed([word]), (word,), root=Path("/"), local_gpus=0)


def test_what_ranks_would_refuse_is_refused_before_they_start() -> None:
    with pytest.raises(UsageError, match=r"trainer\.sync_batchnorm=true needs GPUs"):
        configured("trainer.sync_batchnorm=true", "cluster.nproc_per_node=2")
    configured("trainer.sync_batchnorm=true", "cluster.nproc_per_node=1")


@pytest.mark.parametrize("word", ["optimizer.lr=inf", "optimizer.lr=1e400", "optimizer.weight_decay=nan"])
def test_a_number_without_an_end_is_refused_with_its_field(word: str) -> None:
    with pytest.raises(UsageError, match=rf"^{word.partition('=')[0]}=(inf|nan) must be a finite number$"):
        configured(word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("paths.runs=''", "paths.runs is empty"),
        (f"paths.runs='{__file__}'", r"^paths.runs=/.*test_build.py: /.*test_build.py is no folder; name one, or "),
        ("paths.data=/dev/null/x", "^paths.data=/dev/null/x: /dev/null is no folder"),
        (f"paths.runs=a/{'b' * 256}", r"paths.runs=a/b+… \(258 characters\) is too long for a folder's name"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_anything_starts(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        configured(word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.lease_s=nan", r"cluster\.lease_s=nan must be a finite number from 5"),
        ("cluster.connect_timeout_s=-1", r"cluster\.connect_timeout_s=-1 must be a finite number from 0\.1"),
        ("cluster.max_restarts=-1", r"cluster\.max_restarts=-1 must be a finite number from 0"),
    ],
)
def test_a_time_or_count_of_the_cluster_that_cannot_be_is_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        configured(word)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("name: 'a b'", r"cluster\.hosts: 'a b' is not a host name that ssh can be given: it holds ' '"),
        ("name: '-oProxyCommand=id'", "it begins with '-'"),
        ("name: ''", "it is empty"),
        ("name: a, user: 'x;id'", r"'x;id@a' is not a user name that ssh can be given: it holds ';'"),
        ("name: a, port: 0", r"cluster\.hosts a: port=0 must be a whole number from 1 to 65535"),
        ("name: a, nproc_per_node: 0", r"cluster\.hosts a: nproc_per_node=0 must be at least 1"),
    ],
)
def test_a_host_that_ssh_cannot_be_given_is_refused_before_anything_starts(entry: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        configured("cluster=pssh", f"cluster.hosts=[{{{entry}}}]", "cluster.nproc_per_node=1")
    with pytest.raises(UsageError, match=said.replace("hosts", "spares")):
        configured("cluster=two_node", f"cluster.spares=[{{{entry}}}]")


def test_hosts_that_ssh_can_be_given_are_taken() -> None:
    names = ("gpu-1.example.org", "fd00::7", "fe80::1%eth0", "knöterich_2")
    listed = ", ".join(f"{{name: '{name}', user: 'CORP\\\\me'}}" for name in names)
    built = configured("cluster=pssh", f"cluster.hosts=[{listed}]", "cluster.nproc_per_node=1")
    assert tuple(host.name for host in built.cluster.hosts) == names


def test_a_hostfile_that_is_a_folder_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, said in ((tmp_path, "can't be read: Is a directory"), (tmp_path / "binary", "is not a text file")):
        with pytest.raises(UsageError, match=said):
            configured("cluster=pssh", f"cluster.hostfile='{path}'", "cluster.nproc_per_node=1")


def test_a_hostfile_that_may_have_no_end_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(UsageError, match=rf"cluster\.hostfile={path} is no ordinary file; write its lines"):
            configured("cluster=pssh", f"cluster.hostfile='{path}'", "cluster.nproc_per_node=1")


def test_the_folder_of_runs_may_lie_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert configured("paths.runs='~/runs'").runs_dir == Path("/home/me/runs")


def test_a_workdir_that_depends_on_where_a_login_begins_is_refused() -> None:
    words = ("cluster=pssh", "cluster.hosts=[{name: a}]", "cluster.nproc_per_node=1")
    with pytest.raises(UsageError, match=r"cluster\.workdir=scratch must be an absolute path on the hosts"):
        configured(*words, "cluster.workdir=scratch")
    assert configured(*words, "cluster.workdir='~/scratch'").cluster.settings.workdir == "~/scratch"
