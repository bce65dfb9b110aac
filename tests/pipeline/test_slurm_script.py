"""The script that sbatch is given, and the names of nodes that Slurm gives back."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pipeline.cluster.agent.schedulers import expand_nodelist
from pipeline.cluster.launchers import LAUNCHERS
from pipeline.cluster.launchers.slurm import script
from pipeline.cluster.launchers.transport.payload import BOOTSTRAP
from pipeline.core.specs import Cluster, Host
from pipeline.execution import dry_run
from tests.pipeline.test_planning import planned
from trainers.core.config import ConfigError

GOLDEN = Path(__file__).parent / "golden"


SETTINGS = LAUNCHERS.settings("slurm")


def script_of(**change: object) -> str:
    """Two nodes with four ranks each, in a folder that a shell could take apart."""
    host = Host(name="granted0", nproc_per_node=4, python="/opt/my python/bin/python")
    settings = SETTINGS(nnodes=2, **change)
    cluster = Cluster(launcher="slurm", hosts=(host, host), settings=settings, device="cuda")
    return script(cluster, "paceline-0123456789ab-1a2b3c-d4e5f6", "/home/me/it's a $(touch x) run")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {}),
        ("full", {"partition": "gpu", "account": "lab", "qos": "high", "constraint": "a100&nvlink",
         "gres": "gpu:a100:4", "cpus_per_task": 32, "mem": "64G", "time_limit": "2-00:00:00", "sbatch": ["--exclusive",
         "--mail-type=END"], "setup": ["module load cuda", "ulimit -n 65536"]}),
    ],
)  # fmt: skip
def test_the_script_is_the_one_that_was_read_by_a_person(name: str, change: dict[str, object]) -> None:
    shown = script_of(**change).replace(shlex.quote(BOOTSTRAP), "BOOTSTRAP")
    assert shown == (GOLDEN / f"slurm_{name}.sh").read_text()


@pytest.mark.slow
def test_a_plan_shows_the_script_before_the_commands_of_nodes_without_names(tmp_path: Path) -> None:
    trial = planned(tmp_path, "cluster=slurm", "cluster.nnodes=2", "cluster.partition=gpu")
    plan = trial.launch
    said = "granted0 to granted1 stand for the hosts that slurm will grant when the run asks for them\n#!/bin/bash\n"
    assert said in dry_run.text([trial])
    assert "\n#SBATCH --nodes=2\n" in plan.submission
    assert "\n#SBATCH --partition=gpu\n" in plan.submission
    assert [node.host for node in plan.nodes] == ["granted0", "granted1"]
    assert "--master-addr=<address of granted0>" in plan.nodes[1].argv


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": "a b"}, r"cluster\.partition='a b' can't stand in a line of sbatch"),
        ({"mem": "-5"}, r"cluster\.mem='-5' must be a size that sbatch knows"),
        ({"cpus_per_task": 0}, r"cluster\.cpus_per_task=0 must be null or a whole number from 1"),
        ({"time_limit": "3600"}, r"cluster\.time_limit='3600' must be minutes:seconds"),
        ({"sbatch": ["exclusive"]}, r"cluster\.sbatch: 'exclusive' is no option of sbatch"),
        ({"sbatch": ["--exclusive\nreboot"]}, r"cluster\.sbatch: '--exclusive\\nreboot' is no option of sbatch"),
        ({"sbatch": ["--comment=it's"]}, r"cluster\.sbatch: .* is not quoted as a shell would read it"),
        ({"sbatch": ["-N4"]}, r"'-N4' would make another job of it than the run needs; cluster\.nnodes="),
        ({"sbatch": ["--array 0-3"]}, r"'--array 0-3' would make another job .*; each trial of a sweep"),
        ({"sbatch": ["--job-name=mine"]}, r"by its name the job is found again"),
        ({"sbatch": ["--job=mine"]}, r"by its name the job is found again"),
        ({"sbatch": ["--arr=0-3"]}, r"'--arr=0-3' would make another job .*; each trial of a sweep"),
        ({"sbatch": ["--exclusive --array=0-3"]}, r"'--exclusive --array=0-3' is more than one option"),
        ({"sbatch": ["--comment=a job.sh"]}, r"'--comment=a job.sh' is more than one option; .*--comment='a b'"),
        ({"sbatch": ["--quiet"]}, r"then it doesn't tell the number of the job"),
        ({"setup": ["#SBATCH --array=0-3"]}, r"cluster\.setup: '#SBATCH --array=0-3' is an option of sbatch"),
    ],
)
def test_what_would_break_the_script_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SETTINGS(**change)


@pytest.mark.parametrize("option", ["-p gpu", "--partition gpu", "--comment='a b'", "--nodelist=n1", "--hold"])
def test_options_that_only_look_alike_are_passed_on(option: str) -> None:
    assert SETTINGS(sbatch=[option]).sbatch == [option]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node0", ["node0"]),
        ("node[001-003,007],gpu-a", ["node001", "node002", "node003", "node007", "gpu-a"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a[3],b[8-9]-ib", ["a3", "b8-ib", "b9-ib"]),
    ],
)
def test_node_names_are_written_out(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize("text", ["node[1", "node]1[", "node[a-b]", "node[1-]"])
def test_node_names_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"range of numbers|brackets"):
        expand_nodelist(text)
