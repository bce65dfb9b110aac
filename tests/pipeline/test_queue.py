"""`doit queue`: who computes on the hosts, and which runs of this project wait for them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cli.commands import hosts
from pipeline.cluster.agent import wire
from pipeline.cluster.attempt import run as attempt
from pipeline.core.errors import UsageError
from pipeline.core.locks import FileLock
from pipeline.core.specs import Cluster, Host
from pipeline.runs.folder import RunFolder
from pipeline.runs.lock import HostWait, HostWaitRecord, waits_under_way
from tests.contract.listening import listener
from tests.pipeline.conftest import Printed
from tests.pipeline.test_claims import NOW, row, waiting
from tests.pipeline.test_preflight_checks import told
from tests.pipeline.test_preflight_gpus import A100


def test_runs_and_other_processes_are_listed_by_host_and_who_waits_below() -> None:
    alice = row("a", "gpu:0")._replace(user="alice", title="run 5a0c12ab34cd (resnet18)", since=NOW)
    busy = told(0, nvidia_smi=A100._replace(owners=f"4242, bob, {int(NOW)}, "), claims=(alice,))
    cluster = Cluster(launcher="pssh", hosts=(Host(name="node0", nproc_per_node=2), Host(name="node1")), device="cuda")
    wait = HostWait(key="cf0848aa0011", host="node0", who="alice's run has GPU 0", since=NOW)
    found = hosts.queue_of(cluster, [busy, told(1)], [wait])
    at = wire.clock(NOW)
    head, first, second, process, last = hosts.queue_text(found).splitlines()
    assert head.split() == ["host", "user", "run", "on", "since"]
    assert first.split("  ") == ["node0", "alice", "run 5a0c12ab34cd (resnet18)", "GPU 0", at]
    assert second.split() == ["node1", "-", "free"]
    assert process == f"node0: bob's /opt/venv/bin/python, -u (pid 4242) is on GPU 1 since {at}"
    assert last == f"cf0848aa0011 waits since {at} for node0: alice's run has GPU 0"


def test_a_run_that_waits_is_known_while_its_command_lives_and_until_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "PROBE_AGAIN_S", 0.0)
    monkeypatch.setattr(attempt, "AgentLauncher", SimpleNamespace)
    folder, seen = RunFolder(tmp_path / "0123456789ab"), list[HostWait]()
    folder.path.mkdir()
    _, hosts, spec = waiting(folder.path, "wait", [[row("a", "gpu:0")], []])
    lock = FileLock(folder.lock)
    assert lock.take()
    listening = listener(on_notice=lambda _: seen.extend(waits_under_way(tmp_path)))
    attempt.until_free(hosts, spec, listening, lambda: None)
    assert [(wait.key, wait.host, wait.who) for wait in seen] == [("0123456789ab", "node0", "bob's run a")]
    assert waits_under_way(tmp_path) == []
    HostWaitRecord(folder.path).write("node0", "bob's run a")
    assert len(waits_under_way(tmp_path)) == 1
    lock.release()  # as when the command was killed
    assert waits_under_way(tmp_path) == []


def test_it_answers_in_json_and_leaves_a_schedulers_queue_to_the_scheduler(printed: Printed, tmp_path: Path) -> None:
    answer: dict[str, Any] = json.loads(printed(hosts.queue, tmp_path, "json=1"))
    assert (answer["schema"], answer["data"]["hosts"], answer["data"]["waiting"]) == (
        "paceline.queue/1",
        ["localhost"],
        [],
    )
    with pytest.raises(UsageError, match="slurm has a queue of its own"):
        printed(hosts.queue, tmp_path, "cluster=slurm")
