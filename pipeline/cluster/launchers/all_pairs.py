"""All hosts connect to each other, asked of their agents at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.cluster import reachability
from pipeline.core.specs import NodeFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

_LISTENING_S = 10.0  # what an agent waits for the others, beyond the time of a slow login


def check(launcher: AgentLauncher, facts: Sequence[NodeFacts]) -> None:
    """One command to all hosts, which listen and connect at the same time. Raises HostError."""
    request = {
        "do": "reach",
        "nodes": reachability.nodes(facts),
        "hello": secrets.token_hex(8),
        "answer": secrets.token_hex(8),
        "slow_s": launcher.slow_s or 0.0,
    }
    answers = launcher.ask(request, timeout_s=launcher.short_s + _LISTENING_S)
    values = launcher.demand("checking that the hosts reach each other", answers)
    failures = reachability.unreached([values[host.label] for host in launcher.cluster.hosts])
    if failures:
        raise reachability.error(failures, facts)
