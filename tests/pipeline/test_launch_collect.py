"""Collecting outputs through a real agent, here on this machine: verified, whole, or an error."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from os import getuid
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import TrainingError
from pipeline.launch import cut_metrics
from pipeline.launchers.agent_launcher import BOOTSTRAP
from pipeline.launchers.collect import receive


def node_folder(folder: Path) -> Path:
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("step-00000002", "final"):
        (checkpoints / f"{name}.pt").write_bytes(name.encode())
        (checkpoints / f"{name}.json").write_text(json.dumps({"sha256": hashlib.sha256(name.encode()).hexdigest()}))
    for name in ("metrics.jsonl", "predictions.json", "summary.json"):
        (folder / name).write_text(name)
    return folder


def collect(node: Path, run_dir: Path, *, final: bool = True) -> None:
    run_dir.mkdir(exist_ok=True)
    me = f"{socket.gethostname()} 127.0.0.1:0 uid {getuid()}"
    request: dict[str, Any] = {"local": True, "nodes": [{"identity": me, "run_dir": str(node)}]}
    receive([sys.executable, "-c", BOOTSTRAP], request, run_dir, host="node0", final=final)


def test_everything_comes_and_what_the_node_dropped_goes(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-00000001.pt").touch()
    collect(node, run_dir)
    came = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()}
    assert came == {str(path.relative_to(node)) for path in node.rglob("*") if path.is_file()}


def test_altered_weights_are_refused_and_nothing_is_left_in_place(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    (node / "checkpoints" / "final.pt").write_bytes(b"altered")
    with pytest.raises(TrainingError, match=r"node0 ended well, .* damaged on the way: final\.pt"):
        collect(node, run_dir)
    assert list(run_dir.iterdir()) == []


def test_missing_summary_is_named(tmp_path: Path) -> None:
    node = node_folder(tmp_path / "node")
    (node / "summary.json").unlink()
    with pytest.raises(TrainingError, match=r"missing: summary\.json"):
        collect(node, tmp_path / "run")


def test_after_a_failure_only_what_can_be_resumed_from_comes(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    collect(node, run_dir, final=False)
    assert not (run_dir / "summary.json").exists()
    assert (run_dir / "checkpoints" / "step-00000002.pt").exists()


def test_a_host_that_answers_nothing_is_an_error_only_at_the_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('gone')"]
    receive(argv, {}, tmp_path, host="node0", final=False)
    with pytest.raises(TrainingError, match="node0: its outputs could not be collected: gone"):
        receive(argv, {}, tmp_path, host="node0", final=True)


def test_metrics_after_the_last_checkpoint_are_cut_off(tmp_path: Path) -> None:
    rows = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"step": 4')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000002.pt").touch()
    assert cut_metrics(tmp_path).read_text() == rows[0] + rows[1]


def test_shards_come_with_their_checkpoint_and_an_altered_one_is_refused(tmp_path: Path) -> None:
    node, run_dir = node_folder(tmp_path / "node"), tmp_path / "run"
    shards, old = node / "checkpoints" / "shards-00000002", run_dir / "checkpoints" / "shards-00000001"
    for folder in (shards, old):
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"what they hold")
        (folder / "__0_0.distcp").write_bytes(b"a slice")
    side = node / "checkpoints" / "step-00000002.json"
    known = {f"{shards.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.iterdir()}
    side.write_text(json.dumps({**json.loads(side.read_text()), "shards": known}))
    collect(node, run_dir)
    assert {path.name for path in (run_dir / "checkpoints" / shards.name).iterdir()} == {".metadata", "__0_0.distcp"}
    assert not old.exists()
    (shards / "__0_0.distcp").write_bytes(b"altered")
    with pytest.raises(TrainingError, match=r"damaged on the way: step-00000002\.pt"):
        collect(node, run_dir)
