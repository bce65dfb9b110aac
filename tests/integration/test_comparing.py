"""docs/comparing.md: its example, typed as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.commands import ROOT
from tests.integration.test_own_models import typed
from tests.integration.test_provenance import copied

SMALL = "trainer.max_steps=2 cluster.nproc_per_node=1 tracking=none"


@pytest.mark.long
def test_the_example_of_the_page_leads_to_a_table_a_picture_and_a_page_as_printed(
    tmp_path: Path, fetched: Path
) -> None:
    (example, *_) = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/comparing.md").read_text(), re.M | re.S)
    assert example.count("\n") <= 15
    checkout = copied(tmp_path / "project", fetched)
    lines = example.splitlines()
    assert lines[-1].startswith("doit report ")
    done = typed(checkout, "set -e\n" + "\n".join(lines[:-1]), SMALL)
    assert done.returncode == 0, done.stdout
    assert "2 configurations, 4 runs" in done.stdout
    assert "B against A: " in done.stdout
    table = (checkout.root / "table.md").read_text()
    assert re.search(r"\| A optimizer.lr=0.1 \| 2 \| [\d.]+ ± [\d.]+ \| [\d.]+ ± [\d.]+ \|", table), table
    assert (checkout.root / "curves.pdf").read_bytes().startswith(b"%PDF")
    done = typed(checkout, lines[-1], "")
    assert "4 of 4 runs finished, 2 configurations\n  report       runs/reports/sweep-" in done.stdout
