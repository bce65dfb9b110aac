"""The plan without asking a host: as pure data, from the launch's own renderer, with no torch in the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.build import build
from pipeline.config.compose import compose_config, resolve
from pipeline.execution import dry_run
from tests.integration.commands import ROOT

pytestmark = pytest.mark.slow


def planned(tmp_path: Path, *overrides: str) -> dry_run.PlannedRun:
    words = ("experiment=quickstart", f"paths.runs={tmp_path}/runs", f"paths.data={tmp_path}/data", *overrides)
    config = build(resolve(compose_config(words)), words, root=tmp_path, local_gpus=0)
    return dry_run.planned(config, None, None, root=tmp_path)


def test_what_only_a_probe_can_tell_is_a_named_placeholder(tmp_path: Path) -> None:
    hosts = "cluster.hosts=[{name: a, port: 23, nproc_per_node: 2}, {name: b, address: 10.0.0.2, interface: eth1}]"
    plan = planned(tmp_path, "cluster=pssh", hosts, "cluster.python=/opt/py", "trainer.global_batch_size=66").launch
    first, second = plan.nodes
    assert (first.argv[0], first.argv[1].endswith("/code/trainers/torchrun.py")) == ("/opt/py", True)
    assert "--master-addr=<address of a:23>" in first.argv
    assert "--master-port=<free port of a:23>" in second.argv
    assert "--local-addr=10.0.0.2" in second.argv
    assert (first.env["OMP_NUM_THREADS"], second.env["GLOO_SOCKET_IFNAME"]) == ("1", "eth1")
    assert (first.first_rank, second.first_rank, plan.world_size) == (0, 2, 3)


def test_without_its_data_a_run_has_no_key_and_every_step_says_what_it_waits_for(tmp_path: Path) -> None:
    trial = planned(tmp_path, "tracking=none")
    assert trial.key is None
    assert [(step.name, step.done, step.why) for step in trial.steps] == [
        ("fetch", False, "digits isn't here"),
        ("train", False, "its data isn't fetched, so its key isn't known yet"),
        ("evaluate", False, "after train"),
        ("record", True, "tracking is switched off"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_graph_shares_a_fetch_and_escapes_what_it_names(tmp_path: Path) -> None:
    trials = [planned(tmp_path, f"seed={seed}") for seed in (0, 1)]
    graph, dot = dry_run.mermaid(trials), dry_run.dot(trials)
    assert graph.count("fetch0 -->") == 2
    assert "fetch1" not in graph
    assert '  fetch0 [label="fetch\\nto do: digits isn\'t here", style=dashed];' in dot
    assert dot.count(" -> ") == 6


def test_the_run_that_init_run_names_is_a_step_of_the_plan_and_of_the_graph(tmp_path: Path) -> None:
    trial = planned(tmp_path, "init.run='experiment=quickstart seed=1'", "tracking=none")
    steps = {step.name: step for step in trial.steps}
    assert [*steps] == ["fetch", "init", "train", "evaluate", "record"]
    waits = "init.run=experiment=quickstart seed=1: its run is to be trained first, whose key isn't known yet"
    assert (steps["init"].done, steps["init"].why) == (False, waits)
    assert "  init0 --> train0" in dry_run.mermaid([trial]).splitlines()


def test_of_a_script_its_words_are_shown_with_their_placeholders(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    words = ("program.script=train.py", "program.args=[--lr,'0.1',--out,'{run}/my net']", f"paths.runs={tmp_path}/runs")
    config = build(resolve(compose_config(words)), words, root=tmp_path, local_gpus=0)
    plan = dry_run.planned(config, None, None, root=tmp_path)
    assert plan.script == ("train.py", "--lr", "0.1", "--out", "{run}/my net")
    assert dry_run.text([plan]).splitlines()[1] == "  script    train.py --lr 0.1 --out '{run}/my net'"


def test_neither_torch_nor_mlflow_is_imported_for_a_plan() -> None:
    code = "import sys, pipeline.execution.dry_run, pipeline.cli.commands.explain"
    shown = "print({'torch', 'mlflow', 'sklearn'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {shown}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
