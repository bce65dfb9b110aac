"""`doit accept`: an edit that a person calls harmless trains nothing; `doit reproduce` proves it or takes it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_provenance import A, Checkout, copied


def said_everywhere(checkout: Checkout, key: str, words: str) -> None:
    """Who looks at the key by any verb reads by whose word it holds."""
    assert "state    ACCEPTED\n" in (status := checkout.doit("status", f"run={key}"))
    assert f"  {words}" in status
    assert f"train     done   {words}" in checkout.doit("plan", *A)
    assert f"  {key}  seed=0  {words}" in checkout.doit("plan", *A, "seed=0,1")
    assert f"{key}  done    {words}" in checkout.doit("sweep", *A, "seed=0,1", "dry_run=1")


@pytest.fixture
def trained(tmp_path: Path, fetched: Path) -> tuple[Checkout, str]:
    """A checkout that has finished A, and the run's key."""
    checkout = copied(tmp_path / "project", fetched)
    assert "no finished run is there to accept" in checkout.doit("accept", *A, code=1)
    checkout.doit("train", *A)
    return checkout, checkout.why(*A)["key"]


def edited(checkout: Checkout) -> tuple[Path, str]:
    """A module with an edit that changes nothing, and what it was before. It is imported at second hand."""
    module = checkout.root / "trainers" / "distributed" / "rank_state.py"
    before = module.read_text()
    module.write_text(before + "UNUSED = 1\n")
    return module, before


@pytest.mark.ci
@pytest.mark.long
def test_a_harmless_edit_is_accepted_and_every_verb_says_so(trained: tuple[Checkout, str], tmp_path: Path) -> None:
    checkout, base = trained
    assert "finished: there is nothing to accept" in checkout.doit("accept", *A, code=1)
    said = checkout.doit("accept", *A, "seed=1", code=3)
    assert f"more than code and environment differs from the nearest finished run, {base}:\n  seed: 0 → 1" in said
    edited(checkout)
    shown = checkout.doit("accept", *A)
    key = checkout.why(*A)["key"]
    assert f"{key} is accepted, not proven: as {base}, by " in shown
    assert "differs in:\n  trainers/distributed/rank_state.py changed" in shown
    assert f"{key} is accepted, not proven: as {base}" in checkout.doit("train", *A)
    assert f"{key}: accepted, not proven: as {base}" in checkout.doit("why", *A)
    assert f"{key}  ACCEPTED" in checkout.doit("runs")
    said_everywhere(checkout, key, f"accepted, not proven: as {base}")
    archive = tmp_path / "run.tar.gz"
    assert f"{key} is accepted, not proven: as {base}" in checkout.doit("export", f"run={key}", f"to={archive}")
    assert checkout.launches() == 1
    assert f"is itself accepted, not proven: as {base}" in checkout.doit("accept", *A, "seed=1", f"run={key}", code=3)
    assert "it is no longer" in checkout.doit("accept", *A, "undo=1")
    assert checkout.why(*A)["reason"] == "not finished yet"


@pytest.mark.long
def test_a_harmless_edit_is_proven_and_a_harmful_one_is_withdrawn(
    trained: tuple[Checkout, str], tmp_path: Path
) -> None:
    checkout, base = trained
    module, before = edited(checkout)
    checkout.doit("accept", *A)
    key = checkout.why(*A)["key"]
    archive = tmp_path / "run.tar.gz"
    checkout.doit("export", f"run={key}", f"to={archive}")
    assert f"{key} is accepted and proven equal: as {base}" in checkout.doit("reproduce", f"run={archive}")
    said_everywhere(checkout, key, f"accepted and proven equal: as {base}")
    assert f"{key} is accepted and proven equal" in checkout.doit("train", *A)

    module.write_text(before)
    checkout.doit("accept", *A, "seed=1", f"run={base}")
    other = checkout.why(*A, "seed=1")["key"]
    said = checkout.doit("reproduce", f"run={other}", code=1)
    assert f"{other} was accepted, not proven: as {base}" in said
    assert "it came out otherwise, so the acceptance is withdrawn" in said
    assert checkout.why(*A, "seed=1")["reason"] == "not finished yet"
    assert checkout.launches() == 1
