"""What a run claims on its hosts; docs/sharing-hosts.md says what for."""

from __future__ import annotations

import contextlib
import json
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cluster.launchers.settings import POLICIES
from pipeline.core.specs import Cluster, Host
from trainers.contract import run_folder

_AUTO, REFUSE, WAIT, SHARE = POLICIES
WHEN_BUSY = "cluster.when_busy=wait waits until it is free, cluster.when_busy=share starts beside it; or other hosts"


def policy(cluster: Cluster) -> str:
    """refuse, wait or share; GPUs are somebody's alone unless the configuration says otherwise."""
    if cluster.when_busy != _AUTO:
        return cluster.when_busy
    return REFUSE if cluster.device == "cuda" else SHARE


def resources(host: Host, device: str) -> list[str]:
    """What ranks of that host compute on: ``gpu:0``, …, or ``cpu``."""
    if device != "cuda":
        return ["cpu"]
    chosen = {**host.placement, **host.env}.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(host.nproc_per_node)] if chosen is None else chosen.split(",")
    return [f"gpu:{name.strip()}" for name in names[: host.nproc_per_node] if name.strip()]


@cache
def group() -> str:
    """Of this process: its runs don't refuse each other, as a sweep arranges its trials itself."""
    return secrets.token_hex(8)


def claim(cluster: Cluster, host: Host, attempts: str, what: str) -> dict[str, Any]:
    """What the agent is told (``stake`` in agent/running/claims.py)."""
    return {
        "resources": resources(host, cluster.device),
        "attempts": attempts,
        "group": group(),
        "what": what,
        "alone": policy(cluster) != SHARE,
    }


def title(run_dir: Path, run_key: str) -> str:
    """How a run is called where others read it."""
    model = ""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        config = json.loads((run_dir / run_folder.CONFIG).read_text(encoding="utf-8"))
        model = f" ({config['model']['name']})"
    return f"run {run_key}{model}"
