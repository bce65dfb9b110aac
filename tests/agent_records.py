"""Records of the agent's requests for tests, where only some of their fields matter."""

from __future__ import annotations

from typing import Any

from pipeline.cluster.agent.requests import Access, JobRequest, NodeStart, ProbeRequest, StartRequest

HERE = Access(is_local=True)


def node_start(**fields: Any) -> NodeStart:
    """Return a node's part of a start."""
    blank = {"host": "node0", "identity": "", "node_rank": 0, "first_rank": 0, "run_dir": "", "state_dir": ""}
    return NodeStart(**{**blank, "own_folders": (), **fields})


def start_request(*nodes: NodeStart, **fields: Any) -> StartRequest:
    """Return a start on this computer."""
    blank = {"run_key": "k", "run_id": "r", "attempt_prefix": "r", "registry": "/nowhere", "lease_s": 600.0}
    return StartRequest(**{**blank, "nodes": nodes, "access": HERE, **fields})


def job_request(**fields: Any) -> JobRequest:
    """Return the first request to a job's node."""
    blank = {"scheduler": "slurm", "folder": "/nowhere", "lease_s": 600.0, "probe": ProbeRequest(workdir="/tmp")}
    return JobRequest(**{**blank, **fields})
