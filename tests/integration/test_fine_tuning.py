"""docs/fine-tuning.md as printed, and a run made again whose first run is gone."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from pipeline.lab import Lab
from tests.integration.commands import ROOT
from tests.integration.test_own_models import TWO_STEPS, typed
from tests.integration.test_provenance import Checkout, copied

FIRST = "experiment=quickstart seed=1 trainer.max_steps=1"
ONE_RANK = TWO_STEPS.replace("nproc_per_node=2", "nproc_per_node=1")  # two: tests/trainers/test_freezing.py


def results(checkout: Checkout) -> dict[str, Path]:
    """The folders of finished runs, by what they started from; '' where the weights were fresh."""
    found = [json.loads(path.read_text()) for path in (checkout.root / "runs").glob("*/result.json")]
    return {row.get("init", {}).get("said", ""): checkout.root / "runs" / row["key"] for row in found}


@pytest.mark.ci
@pytest.mark.long
def test_the_example_of_the_page_trains_as_printed(tmp_path: Path, fetched: Path) -> None:
    page = (ROOT / "docs/fine-tuning.md").read_text()
    (example,) = re.findall(r"\A# [^\n]*\n\n```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, f'python() {{ {sys.executable} "$@"; }}\nset -e\n{example}', ONE_RANK)
    assert done.returncode == 0, done.stdout
    runs = results(checkout)
    of_file, of_run = runs["init.weights=resnet18.pt"], runs["init.run=experiment=quickstart seed=1 trainer.epochs=2"]
    assert "fc.weight, fc.bias fresh, as the file has other classes" in done.stdout
    assert json.loads((of_file / "result.json").read_text())["init"]["fresh"] == ["fc.weight", "fc.bias"]
    assert json.loads((of_run / "init.json").read_text())["run"] == runs[""].name
    key = json.loads((of_run / "key.json").read_text())["config"]
    assert key["init"] == {"sha256": json.loads((runs[""] / "checkpoints/final.json").read_text())["sha256"]}
    assert len([*(checkout.root / "data/weights").glob("*.pt")]) == 2

    again = typed(checkout, example.splitlines()[-1], ONE_RANK)
    assert f"{of_run.name} is finished" in again.stdout, again.stdout


@pytest.mark.long
def test_a_sweep_trains_the_first_run_once_and_a_trial_is_made_again_after_that_one_is_gone(
    tmp_path: Path, fetched: Path
) -> None:
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, f"doit sweep experiment=quickstart init.run='{FIRST}' optimizer.lr=0.1,0.2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f"init.run={FIRST} comes first: run ") == 1, done.stdout
    first = results(checkout)[""]
    trial = results(checkout)[f"init.run={FIRST}"]
    shutil.rmtree(first)
    shutil.rmtree(checkout.root / "data/weights")
    done = typed(checkout, f"doit reproduce {trial.name}", words="")
    assert f"REPRODUCED {trial.name}" in done.stdout, done.stdout
    assert "its key is the same" in done.stdout


@pytest.mark.ci
@pytest.mark.long
def test_a_first_run_that_fails_is_told_as_the_reason_and_nothing_else_begins(tmp_path: Path, fetched: Path) -> None:
    checkout = copied(tmp_path / "project", fetched)
    said = "experiment=quickstart trainer.max_steps=1 trainer.freeze=[nothing]"
    done = typed(checkout, f"doit train experiment=quickstart init.run='{said}'", ONE_RANK)
    assert done.returncode == 1
    assert f"init.run={said} failed, and this run starts from its weights: " in done.stdout, done.stdout
    assert "'nothing' matches no parameter of the network; its names begin with: features, classifier" in done.stdout
    assert len([*(checkout.root / "runs").glob("*/journal.jsonl")]) == 1


@pytest.mark.long
def test_initial_weights_and_image_files_reach_two_hosts(lab: Lab, tmp_path: Path) -> None:
    checkout = copied(tmp_path / "project")
    for name, colour in (("cat", "orange"), ("dog", "brown")):
        folder = checkout.root / "photos" / name
        folder.mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (40 + number, 30), colour).save(folder / f"{number}.jpg")
    small = "dataset.image_size=16 dataset.holdout=4 trainer.global_batch_size=8 trainer.max_steps=2 model=small_cnn"
    files = f"dataset=folder dataset.source=photos dataset.decoded_limit=0 {small} ++cluster.env.OMP_NUM_THREADS=1"
    words = [*files.split(), "cluster=two_node", f"cluster.ssh_config={lab.ssh_config}", "tracking=none"]
    first = f"{files} seed=1"

    said = checkout.doit("train", *words, f"init.run='{first}'")
    assert f"init.run={first} comes first: run " in said
    runs = results(checkout)
    of_run = runs[f"init.run={first}"]
    assert {len(json.loads((run / "result.json").read_text())["hosts"]) for run in runs.values()} == {2}

    torch.save({"state_dict": torch.load(runs[""] / "checkpoints/final.pt")}, checkout.root / "w.pt")
    assert "not kept" not in checkout.doit("train", *words, "init.weights=w.pt")
    of_file = results(checkout)["init.weights=w.pt"]
    assert of_file != of_run
    told = [json.loads((run / "result.json").read_text()) for run in (of_run, of_file)]
    assert told[0]["weights_sha256"] == told[1]["weights_sha256"]
    assert told[0]["init"]["fresh"] == []
    launches = checkout.launches()
    for word in (f"init.run='{first}'", "init.weights=w.pt"):
        assert "is finished" in checkout.doit("train", *words, word)
    assert checkout.launches() == launches == 3
