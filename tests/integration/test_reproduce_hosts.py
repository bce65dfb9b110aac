"""A run of two hosts made again: by its MLflow id in a clone without its folder, and coming out otherwise."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from pipeline.core import documents
from pipeline.lab import Lab
from tests.integration.test_provenance import Checkout, copied

TWO = ("experiment=quickstart", "trainer.max_steps=2", "cluster=two_node")


@pytest.mark.lab
@pytest.mark.long
def test_a_run_of_two_hosts_is_made_again_elsewhere(tmp_path: Path, lab: Lab) -> None:
    store, hosts = f"tracking.uri='sqlite:///{tmp_path}/mlflow.db'", f"cluster.ssh_config='{lab.ssh_config}'"
    first = copied(tmp_path / "first")
    with (first.root / "trainers" / "distributed" / "rank_state.py").open("a") as file:
        file.write("# edited\n")
    (first.root / "trainers" / "new_file.py").write_text('"""Untracked."""\n')
    first.doit("train", *TWO, hosts, store)
    ((key, folder),) = first.runs().items()
    result = json.loads((folder / "result.json").read_text())

    first.git("clone", "-q", str(first.root), str(tmp_path / "a clone"))
    clone = Checkout(tmp_path / "a clone")
    shown = clone.doit("reproduce", f"run={result['mlflow_run_id']}", store, hosts, "keep=1")
    assert f"REPRODUCED {key}: weights_sha256, metrics and steps are equal\nits key is the same" in shown
    assert "2 nodes, 2 ranks, pssh" in shown
    assert (clone.root / "runs" / ".reproduced" / key / "code" / "trainers" / "new_file.py").exists()

    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = probe.getsockname()[1]
    down = f"cluster.hosts=[{{name: 127.0.0.1, port: {closed}}}, {{name: localhost, port: {closed}}}]"
    said = first.doit("reproduce", f"run={key}", down, "cluster.ssh_config=null", code=1)
    assert f"127.0.0.1:{closed}: unreachable: Connection refused" in said
    assert "its training ended with exit code 1, for the reason above" in said

    altered = {
        **documents.read_sealed(folder / "result.json"),
        "weights_sha256": "0" * 64,
        "metrics": {**result["metrics"], "test/accuracy": 2.0},
    }
    documents.write_sealed(folder / "result.json", altered)  # sealed anew: a run that came out otherwise, not an edit
    first.doit("export", f"run={key}", f"to={tmp_path}/altered.tar.gz")
    shown = clone.doit(
        "reproduce", f"run={tmp_path}/altered.tar.gz", "cluster=local", "cluster.nproc_per_node=1", code=1
    )
    assert "topology     nnodes: 2 → 1; other ranks, other weights" in shown
    assert f"NOT REPRODUCED {key}: " in shown
    assert "values differ\n  nnodes: 2 → 1\n  test/accuracy: 2.0 → " in shown
    assert f"  weights_sha256: {'0' * 64} → " in shown
    assert "packages" not in shown
