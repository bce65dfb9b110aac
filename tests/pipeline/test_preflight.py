"""Preflight on this computer, and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.cluster import preflight
from pipeline.cluster.launchers import create
from pipeline.core.errors import HostError, UsageError
from pipeline.core.specs import Cluster, Host


def local(**host: object) -> Cluster:
    return Cluster(launcher="local", hosts=(Host(name="localhost", **host),))  # type: ignore[arg-type]


def test_this_computer_can_take_part_and_is_shown_as_one_row() -> None:
    report = preflight.examine(local(nproc_per_node=2), global_batch_size=8)
    report.refuse()
    facts = report.facts
    assert facts[0].python == sys.executable
    head, row = preflight.table(facts).splitlines()
    assert head.split()[:3] == ["host", "address", "interface"]
    assert row.split()[:2] == ["localhost", "127.0.0.1"]


def test_missing_interpreter_shows_the_value_and_the_field() -> None:
    with pytest.raises(HostError, match=r"localhost: program not found: /no/python \(cluster\.python=/no/python\)"):
        preflight.examine(local(python="/no/python"), global_batch_size=8)


def test_an_interpreter_that_is_a_folder_is_an_error_with_the_value(tmp_path: Path) -> None:
    told = rf"localhost: {tmp_path} can't be run: Permission denied \(cluster\.python={tmp_path}\)"
    with pytest.raises(HostError, match=told):
        preflight.examine(local(python=str(tmp_path)), global_batch_size=8)


def test_unknown_launcher_shows_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"cluster\.launcher='psh' is not an option; did you mean pssh\?"):
        create(Cluster(launcher="psh", hosts=(Host(name="a"),)))


def test_batch_is_checked_before_anything_is_started() -> None:
    with pytest.raises(UsageError, match="global_batch_size=9"):
        preflight.examine(local(nproc_per_node=2), global_batch_size=9)
