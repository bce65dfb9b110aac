"""What the other nodes see of a host that no longer answers here, and which hosts are gone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.core.specs import LaunchPlan

_SEEN = {
    "answers": "its ssh server answers {who}: the host is alive, but can't be reached from here",
    "silent": "the host is alive, as {who} sees, but its ssh server says nothing: frozen, or overloaded",
    "refuses": "the host is alive, as {who} sees, but no ssh server listens there any more",
    "unreachable": "{who} can't reach it either: the host, or its link, is down",
}

_DEAD = ("unreachable", "silent")


def ssh_server(plan: LaunchPlan, host: str) -> tuple[str, int] | None:
    """Address and port of a node's ssh server, as its identity tells; None without ssh."""
    identity = next((node.identity for node in plan.nodes if node.host == host), "")
    address, _, port = [*identity.split(" "), "", ""][1].rpartition(":")
    return (address, int(port)) if port.isdecimal() and port != "0" else None


def is_dead(host: str, asked_of: Sequence[str], seen: Mapping[str, Sequence[str]], others: Sequence[str]) -> bool:
    """Whether all ``others`` were asked of a host and none of them is answered there, so that its ranks are cut off."""
    if host not in asked_of or not others or not set(others) <= seen.keys():
        return False
    at = asked_of.index(host)
    return all(at < len(seen[other]) and seen[other][at] in _DEAD for other in others)


def described(lost: Sequence[str], seen: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each lost host that others were asked about.

    Args:
        seen: host that was asked → what it said of each of ``lost``, in their order.
    """
    lines = []
    for number, host in enumerate(lost):
        said = {who: answers[number] for who, answers in seen.items() if number < len(answers)}
        best = next((kind for kind in _SEEN if kind in said.values()), None)
        if best is not None:
            who = " and ".join(name for name, kind in said.items() if kind == best)
            lines.append(f"{host}: {_SEEN[best].format(who=who)}")
    return lines
