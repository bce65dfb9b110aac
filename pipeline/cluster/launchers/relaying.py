"""Files that one host passes on to others, over the network that connects the hosts (``agent/relay.py``)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.cluster.launchers.arriving import Transfer
from pipeline.cluster.launchers.replies import Answer
from pipeline.core.specs import NodeFacts

if TYPE_CHECKING:
    from pipeline.cluster.launchers.agent_launcher import AgentLauncher

SLOWEST_BYTES_PER_S = 1e6  # a transfer that is slower is given up
_LISTENING_S = 10.0  # what an agent waits for the others, beyond the time of a slow login
_BRANCHES = 2  # nodes to which each node passes on what it gets


def relay(
    launcher: AgentLauncher,
    request: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    nodes: Sequence[NodeFacts],
    rows: Sequence[Mapping[str, Any]],
    *,
    what: str,
) -> dict[str, str]:
    """Let the first of ``nodes`` serve the others; host → why it could not be served.

    Args:
        files: name, ``bytes`` and sha256 of each.
        rows: what else each of ``nodes`` is told of itself.
        what: the name of the files, for who waits.
    """
    total_bytes = sum(file["bytes"] for file in files)
    wanted = {fact.host for fact in nodes}
    asked = {
        **request,
        "files": [*files],
        "nodes": [{**place, **own} for place, own in zip(tree(nodes), rows, strict=True)],
        "secret": secrets.token_hex(16),
        "slow_s": launcher.slow_s or 0.0,
    }
    launcher.transfer = Transfer.begin(what, [fact.host for fact in nodes[1:]], total_bytes, nodes[0].host)
    answers = launcher.ask(
        asked,
        hosts=[host for host in launcher.cluster.hosts if host.label in wanted],
        timeout_s=launcher.short_s + _LISTENING_S + total_bytes / SLOWEST_BYTES_PER_S,
    )
    told = {fact.host: _why(answers[fact.host]) for fact in nodes[1:]}
    return {host: _named(why, nodes) for host, why in told.items() if why}


def tree(nodes: Sequence[NodeFacts]) -> list[dict[str, Any]]:
    """Who listens where, and from whom each takes: from the node above it, else from the first."""
    rows = []
    for number, fact in enumerate(nodes):
        sources = list(dict.fromkeys([(number - 1) // _BRANCHES, 0])) if number else []
        port = fact.extra.get("free_ports", [fact.free_port])[0]  # one at which all hosts have just been reached
        rows.append({"identity": fact.identity, "address": fact.address, "port": port, "sources": sources})
    return rows


def notes(what: str, source: str, unserved: Mapping[str, str]) -> list[str]:
    """A line for each reason why hosts (label → reason) could not be served by ``source``."""
    return [
        f"{', '.join(host for host, its in unserved.items() if its == why)} could not get {what} from {source} "
        f"({why}), so this computer sent it"
        for why in dict.fromkeys(unserved.values())
    ]


def _why(answer: Answer) -> str:
    """Why a host hasn't got it from another one; '' where it has."""
    return answer.error or str((answer.value or {}).get("unserved", ""))


def _named(why: str, nodes: Sequence[NodeFacts]) -> str:
    """``node 1: refused`` with the host's name."""
    for number, fact in enumerate(nodes):
        why = why.replace(f"node {number}: ", f"{fact.host}: ")
    return why
