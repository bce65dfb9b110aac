"""docs/own-data.md as printed, with the names of the classes in the report, and the same from image files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

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
    example = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
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
