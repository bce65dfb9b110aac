"""What is made of the judgements on hosts: a line for each fault, a refusal, a summary."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pipeline import diagnostics
from pipeline.cluster import preflight
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.cluster.preflight import Check, Report, State, judgement
from pipeline.core.errors import HostError
from tests.pipeline.test_plan import facts
from tests.pipeline.test_preflight_checks import ONE, limits, told

if TYPE_CHECKING:
    from pipeline.cluster.launchers import Launcher

ROOT = Path(__file__).resolve().parents[2]


def check(host: str, state: State = State.WARNING, seen: str = "1") -> Check:
    return Check(host=host, name="x", state=state, seen=seen, wanted="2", hint="do it")


def test_hosts_with_the_same_fault_share_a_line() -> None:
    assert judgement.lines([check("a"), check("b"), check("c", seen="3")]) == [
        "a, b: x: 1 (wanted: 2); do it",
        "c: x: 3 (wanted: 2); do it",
    ]
    (line,) = judgement.lines([check(f"n{number}") for number in range(16)])
    assert line == "n0, n1, n2, n3 and 12 more: x: 1 (wanted: 2); do it"


def test_failures_are_refused_with_every_host_and_warnings_are_not() -> None:
    judgement.refuse([check("a"), check("b", State.OK)], 2)
    with pytest.raises(HostError) as caught:
        judgement.refuse([check("a", State.FAILED), check("b", State.FAILED, "3"), check("c")], 3)
    assert str(caught.value) == (
        "preflight: 2 of 3 hosts can't take part\n  a: x: 1 (wanted: 2); do it\n  b: x: 3 (wanted: 2); do it"
    )


def test_the_report_shows_refusals_of_the_plan_as_failed_checks_too() -> None:
    error = HostError(
        "the cluster can't run this:\n  node1: python has no torch; install it\n  torch differs", hint="hint"
    )
    report = Report(facts=[facts(0), facts(1)], checks=[check("node0")], refusals=[error])
    value = preflight.as_json(report)
    assert value["ok"] is False
    assert [(row["host"], row["name"], row["state"], row["seen"], row["hint"]) for row in value["checks"]] == [
        ("node1", "run", "failed", "python has no torch; install it", "hint"),
        (None, "run", "failed", "torch differs", "hint"),
        ("node0", "x", "warning", "1", "do it"),
    ]
    assert [row["host"] for row in value["hosts"]] == ["node0", "node1"]
    with pytest.raises(HostError, match=r"no torch; install it\n  torch differs\n  try: hint"):
        report.raise_if_failed()


def test_the_summary_has_a_line_a_check_and_names_hosts_that_are_not_ok() -> None:
    checks = [check("a", State.OK, "fine"), check("b"), check("c", State.FAILED, "bad")]
    rows = [line.split() for line in preflight.summary(checks).splitlines()]
    assert rows == [["check", "ok", "warning", "failed", "seen"], ["x", "1", "b", "c", "bad"]]


def test_a_training_shows_a_warning_once() -> None:
    hosts = Hosts(ONE)
    answers = [told(0), told(1, limits=limits(256, 256))]
    hosts._launcher = cast("Launcher", SimpleNamespace(probe=lambda *_: answers, capabilities=Capabilities()))
    hosts.facts(None)
    (note,) = hosts.notes(answers)
    assert note.startswith("warning: node1: open files: a process of the login may have 256 (wanted: at least 512")
    assert hosts.notes(answers) == []


def test_every_check_has_its_line_in_the_documentation() -> None:
    package = Path(preflight.__file__).parent
    modules = [*package.glob("*.py"), Path(diagnostics.__file__)]
    source = "".join(path.read_text(encoding="utf-8") for path in modules)
    names = set(
        re.findall(
            r'(?:name=|compared\(|from_error\(error, |_at_least\(\S+, |judged\(\s*\S+,\s*|quantity=)"([^"]+)"', source
        )
    )
    assert {"clock", "MTU", "disk", "GPU errors", "InfiniBand rate", "run", "matrix product"} <= names
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("### What preflight checks")[2]
    assert sorted(name for name in names if f"`{name}`" not in table) == []
