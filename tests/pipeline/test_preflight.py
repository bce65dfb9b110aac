"""Preflight on this computer, and its table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.cli.commands import diagnostics, train
from pipeline.cli.session import ROOT, session
from pipeline.cluster import preflight
from pipeline.cluster.launchers import create
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host
from tests.pipeline.finished_folder import finished


def local(**host: object) -> Cluster:
    return Cluster(launcher="local", hosts=(Host(name="localhost", **host),))  # type: ignore[arg-type]


def test_this_computer_can_take_part_and_is_shown_as_one_row() -> None:
    report = preflight.examine(local(nproc_per_node=2))
    report.raise_if_failed()
    facts = report.facts
    assert facts[0].python == sys.executable
    assert all(len(line) <= 50 for line in preflight.table(facts, 50).splitlines())
    head, row = preflight.table(facts, 120).splitlines()
    assert head.split()[:3] == ["host", "address", "interface"]
    assert row.split()[:2] == ["localhost", "127.0.0.1"]


def test_missing_interpreter_shows_the_value_and_the_field() -> None:
    with pytest.raises(HostError, match=r"localhost: program not found: /no/python \(cluster\.python=/no/python\)"):
        preflight.examine(local(python="/no/python"))


def test_unknown_launcher_shows_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"cluster\.launcher='psh' is not an option; did you mean pssh\?"):
        create(Cluster(launcher="psh", hosts=(Host(name="a"),)))


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Makes these the words of the command line, in folders that hold nothing."""

    def given(*typed: str) -> None:
        paths = [f"paths.runs={tmp_path}/runs", f"paths.data={tmp_path}/data"]
        monkeypatch.setattr(sys, "argv", ["doit", *typed, *paths])
        session.cache_clear()

    yield given
    session.cache_clear()


def test_a_batch_that_the_ranks_cannot_share_keeps_no_host_from_being_asked(
    words: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    words("preflight", "cluster.nproc_per_node=3")
    diagnostics.preflight(session())
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "1 host can take part"
    last = printed.err.splitlines()[-1]
    assert last.startswith("warning: a training with these words would be refused: trainer.global_batch_size=")
    assert "can't be shared evenly by 3 ranks" in last


def test_attach_says_that_nothing_is_under_way_where_the_data_was_never_fetched(words: Callable[..., None]) -> None:
    words("attach", "seed=5")
    with pytest.raises(
        UsageError, match="nothing of this run is under way here: its data set was never fetched"
    ) as hit:
        train.attach(session())
    assert hit.value.hint is not None
    assert hit.value.hint.startswith("doit attach with the words of the command that has started it")


def test_attach_without_words_names_no_run_where_none_is_under_way(words: Callable[..., None]) -> None:
    words("attach")
    with pytest.raises(UsageError, match=r"nothing to attach to: no run under .*runs is under way"):
        train.attach(session())


@pytest.mark.parametrize("named", [True, False])  # without words it is the only run under way
def test_attach_takes_the_folder_of_the_data_from_the_run_or_asks_for_it(
    words: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    words("train")
    typed = {"overrides": [*session().config.overrides]}  # of which its hosts are read
    resolved = session().config.resolved
    key = finished(tmp_path / "runs", config=resolved, provenance=typed, result=False).key
    monkeypatch.setattr(
        sys, "argv", ["doit", "attach", *([f"run={key}"] if named else []), f"paths.runs={tmp_path}/runs"]
    )
    (tmp_path / "data").mkdir()
    session.cache_clear()
    with pytest.raises(UsageError, match=f"the data of run {key} isn't in {tmp_path}/data\n  try: .*paths.data="):
        train.attach(session())
    (tmp_path / "data").rmdir()
    session.cache_clear()
    assert session().config.data_dir == ROOT / "data"
