"""docs/own-data.md as printed, with the names of the classes in the report, and the same from image files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from pipeline.lab import Lab
from tests.integration.commands import ROOT
from tests.integration.test_own_models import TWO_STEPS, typed
from tests.integration.test_provenance import copied

ONE_RANK = TWO_STEPS.replace("nproc_per_node=2", "nproc_per_node=1")  # two: tests/trainers/test_encoded.py


@pytest.mark.ci
@pytest.mark.long
def test_the_example_of_the_page_trains_as_printed_and_from_files_to_the_same_weights(
    tmp_path: Path, fetched: Path
) -> None:
    page = (ROOT / "docs/own-data.md").read_text()
    example = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    done = typed(checkout, f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n{example}', ONE_RANK)
    assert done.returncode == 0, done.stdout
    (result,) = (checkout.root / "runs").glob("*/result.json")
    report = json.loads((result.parent / "evaluation/report.json").read_text())
    assert (report["classes"], sorted(report["per_class"])) == (["cat", "dog"], ["cat", "dog"])
    assert "pillow" not in json.loads((result.parent / "key.json").read_text())["environment"]

    done = typed(checkout, f"{example.splitlines()[-1]} dataset.decoded_limit=0", ONE_RANK)
    assert done.returncode == 0, done.stdout
    (other,) = (path for path in (checkout.root / "runs").glob("*/result.json") if path != result)
    assert "pillow" in json.loads((other.parent / "key.json").read_text())["environment"]
    weights = [json.loads(path.read_text())["weights_sha256"] for path in (result, other)]
    assert weights[0] == weights[1]


@pytest.mark.lab
@pytest.mark.long  # of one host: tests/pipeline/data
def test_another_list_of_classes_is_another_run_on_two_hosts_and_the_first_one_stays(
    tmp_path: Path, fetched: Path, lab: Lab
) -> None:
    checkout = copied(tmp_path / "project", fetched)
    for number, name in enumerate(("cat", "dog", "emu")):
        (checkout.root / "photos" / name).mkdir(parents=True)
        for image in range(20):
            Image.new("RGB", (16, 16), (80 * number, 12 * image, 0)).save(checkout.root / f"photos/{name}/{image}.png")
    (checkout.root / "photos/emu").rename(checkout.root / "emu")
    data = ("dataset=folder", "dataset.source=photos", "dataset.holdout=10", "trainer.global_batch_size=16")
    words = (
        *data,
        "trainer.max_steps=1",
        "tracking=none",
        "cluster=two_node",
        f"cluster.ssh_config='{lab.ssh_config}'",
    )
    assert "FINISHED" in checkout.doit("train", *words)
    (checkout.root / "emu").rename(checkout.root / "photos/emu")
    assert "FINISHED" in checkout.doit("train", *words)
    (checkout.root / "photos/emu").rename(checkout.root / "emu")
    assert "is finished" in checkout.doit("train", *words)
    reports = [json.loads((run / "evaluation/report.json").read_text()) for run in checkout.runs().values()]
    assert sorted(report["classes"] for report in reports) == [["cat", "dog"], ["cat", "dog", "emu"]]
