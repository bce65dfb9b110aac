"""The shell decides nothing: its environment doesn't reach the ranks, and what the key doesn't hold isn't there."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.cluster.attempt.run import run_attempt
from pipeline.cluster.events import LogLine
from pipeline.cluster.hosts import Hosts
from pipeline.core.specs import Cluster, Host
from tests.contract.listening import listener
from tests.contract.stub import make
from tests.integration.commands import Project

TINY = ("experiment=quickstart", "trainer.max_steps=12", "cluster.nproc_per_node=1", "tracking=none")
OTHER_ARITHMETIC = {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3"}


@pytest.mark.long
def test_a_shell_that_changes_arithmetic_changes_no_weights_and_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = project.doit("train", *TINY)
    assert plain.returncode == 0, plain.stdout
    assert "isn't passed" not in plain.stdout
    first = project.result()
    assert first["nodes"][0]["threads_per_rank"] == 1
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        said = (
            f"each rank computes with 1 thread and has {len(cores)} cores, whose number must not decide the weights; "
        )
        assert f"{said}cluster.nproc_per_node={len(cores)} or cluster.env.OMP_NUM_THREADS={len(cores)} " in plain.stdout
    (project.only_run() / "result.json").unlink()
    for path in project.only_run().glob("checkpoints/*"):
        path.unlink()
    for name, value in {**OTHER_ARITHMETIC, "PYTHONHASHSEED": "7", "PYTHONSTARTUP": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    os.sched_setaffinity(0, {min(cores)})  # as taskset does
    try:
        again = project.doit("train", *TINY)
    finally:
        os.sched_setaffinity(0, cores)
    assert again.returncode == 0, again.stdout
    assert project.result()["weights_sha256"] == first["weights_sha256"]  # only_run: under the same key
    assert project.result()["nodes"] == first["nodes"]
    (said,) = [line for line in again.stdout.splitlines() if "aren't passed to the ranks" in line]
    assert said.startswith("localhost: ATEN_CPU_CAPABILITY=default, DNNL_MAX_CPU_ISA=AVX2, ")
    for name, value in {**OTHER_ARITHMETIC, "PYTHONHASHSEED": "7"}.items():
        assert f"{name}={value}" in said.partition(" of this shell ")[0]
        assert f" cluster.env.{name}={value} " in said

    taken = project.doit("train", *TINY, "cluster.env.ATEN_CPU_CAPABILITY=default")
    assert taken.returncode == 0, taken.stdout
    others = [folder for folder in project.run_folders() if folder.name != first["key"]]
    other = json.loads((others[0] / "result.json").read_text())
    assert other["nodes"][0]["cpu_capability"] == "DEFAULT"
    if first["nodes"][0]["cpu_capability"] != "DEFAULT":
        assert other["weights_sha256"] != first["weights_sha256"]


@pytest.mark.ci
@pytest.mark.long
def test_ranks_see_nothing_of_the_shell_but_what_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {
        "LD_PRELOAD": "/nowhere/lib.so",
        "PYTHONHOME": "/nowhere",
        "PYTHONPATH": "/nowhere",
        "OF_MY_MODEL": "1",
        "WORLD_SIZE": "9",
        "TORCHELASTIC_MAX_RESTARTS": "7",
    }
    for name, value in {**foreign, "CUDA_VISIBLE_DEVICES": "", "TZ": "UTC"}.items():
        monkeypatch.setenv(name, value)
    stub = make(tmp_path, "print('ENV=' + json.dumps(dict(os.environ)), flush=True); finish(rank, run)")
    lines: list[LogLine] = []
    host = Host(name="localhost", env={"OF_MY_CLUSTER": "2", "TZ": "CET"})
    notes: list[str] = []
    hosts = Hosts(Cluster(launcher="local", hosts=(host,), device="cpu"))
    run_attempt(stub.spec(), closing(hosts), listener(lines.append, on_note=notes.append))
    (seen,) = [json.loads(line.text[4:]) for line in lines if line.text.startswith("ENV=")]
    assert not {"LD_PRELOAD", "PYTHONHOME", "OF_MY_MODEL"} & seen.keys()
    assert (seen["WORLD_SIZE"], seen["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "0")
    assert (seen["TZ"], seen["OF_MY_CLUSTER"], seen["CUDA_VISIBLE_DEVICES"]) == ("CET", "2", "")
    assert (seen["PYTHONHASHSEED"], seen["HOME"]) == ("0", os.environ["HOME"])
    assert "/nowhere" not in seen["PYTHONPATH"]
    (note,) = notes
    assert "LD_PRELOAD=/nowhere/lib.so" in note
    assert "PYTHONHOME=/nowhere" in note
    assert "OF_MY_MODEL" not in note
