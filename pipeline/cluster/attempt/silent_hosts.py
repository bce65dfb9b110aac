"""Decide which hosts of an attempt that don't answer are lost, by asking the other hosts whether they reach them.

A host whose link to the controller alone is broken trains on until the end of its lease, and may come back. If no other
host reaches it either, its ranks are cut off from the others, and waiting is useless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from pipeline.cluster.agent.requests import ExamineOrder
from pipeline.cluster.events import Doing, Emit, NodeAnswers, NodeLost, NodeSilent, Notice
from pipeline.core.specs import LaunchPlan
from trainers.contract.beats import NodeExamination

_MOST_ASKED_ABOUT = 3  # at most so many hosts in one request, because each takes a second if it doesn't answer
_ASK_AGAIN_S = 5.0  # between two requests to the other hosts
_ANSWER_S = 3.5  # limit for their answers

_REACH_TEXTS = {  # kind of answer of an ssh server → text, the best answer first
    "answers": "its ssh server answers {who}: the host is alive, but can't be reached from here",
    "silent": "the host is alive, as {who} sees, but its ssh server says nothing: frozen, or overloaded",
    "refuses": "the host is alive, as {who} sees, but no ssh server listens there any more",
    "unreachable": "{who} can't reach it either: the host, or its link, is down",
}

_DEAD = ("unreachable", "silent")  # answers after which a host counts as dead

Ask = Callable[[ExamineOrder], None]
"""Asks every host that answers whether it reaches the ssh servers in the order."""


class SilentHosts:
    """The hosts that don't answer. ``replaceable``: a further attempt gives a lost host's place to another one."""

    def __init__(self, plan: LaunchPlan, emit: Emit, *, replaceable: bool) -> None:
        self._plan, self._emit, self._replaceable = plan, emit, replaceable
        self.reached: dict[str, dict[str, str]] = {}
        """Silent host → other host → kind of answer that the other one got: a key of ``_REACH_TEXTS``."""
        self._reasons: dict[str, str] = {}  # silent host → what the controller noticed
        self._waited_for: set[str] = set()  # silent hosts that were reported to the user
        self._asked_at = 0.0  # monotonic: the last request

    def __len__(self) -> int:
        return len(self._reasons)

    def take(self, event: NodeSilent | NodeAnswers | NodeExamination) -> None:
        """Take the news of a host: it is silent, answers again, or says which ssh servers it reaches."""
        match event:
            case NodeSilent():
                self._reasons[event.host] = event.reason
                self._asked_at = 0.0
            case NodeAnswers():
                self._reasons.pop(event.host, None)
                if event.host in self._waited_for:  # the user was told that it is silent
                    self._waited_for.remove(event.host)
                    text = f"{event.host} answers again, after {event.silent_s:.0f} s; nothing is lost"
                    self._emit(Notice(text=text))
                    self._report_wait()
            case NodeExamination():
                kinds = dict(event.peers)
                for host, answers in self.reached.items():
                    address, port = ssh_server(self._plan, host) or ("", 0)
                    kind = kinds.get(f"{address}:{port}")
                    if kind is not None:
                        answers[event.host] = kind

    def forget(self, host: str) -> None:
        self._reasons.pop(host, None)

    def lost(self, ask: Ask, ended: Collection[str], *, is_over: bool) -> list[NodeLost]:
        """Return the silent hosts that are lost: no other host reaches them, waiting can't help, or the run is over."""
        others = [node.host for node in self._plan.nodes if node.host not in self._reasons and node.host not in ended]
        now = time.monotonic()
        if self._reasons and others and not is_over and now - self._asked_at > _ASK_AGAIN_S:
            self._asked_at = now
            self._ask_anew(ask, [*self._reasons])
        is_time_up = now - self._asked_at > _ANSWER_S
        answered = {other for answers in self.reached.values() for other in answers}
        # while answers may come, all other hosts have to agree that a host is dead; then those that have answered
        witnesses = [other for other in others if other in answered or not is_time_up]
        lost = []
        for host, reason in self._reasons.items():
            # waiting can't help where a host has no ssh server to ask, or where a spare can replace the only host
            is_useless = ssh_server(self._plan, host) is None or (self._plan.nnodes == 1 and self._replaceable)
            is_lost = is_useless or is_dead(self.reached.get(host, {}), witnesses)
            if is_lost and not is_over:  # reported now, as stopping the others takes seconds
                self._report(host, "the attempt is ended")
            if is_lost or is_over:
                lost.append(NodeLost(host=host, reason=reason))
        for end in lost:
            self.forget(end.host)
        if is_time_up or answered.issuperset(others):
            self._report_silence()
        return lost

    def ask_about(self, ask: Ask, lost: Sequence[str]) -> None:
        """Ask the other hosts whether they reach the lost ones, unless they have answered that already."""
        if not any(self.reached.values()) or not self.reached.keys() >= {*lost}:
            self._ask_anew(ask, lost)

    def _ask_anew(self, ask: Ask, hosts: Sequence[str]) -> None:
        """Ask the other hosts about these ones, and forget earlier answers."""
        servers = {host: ssh_server(self._plan, host) for host in hosts}
        with_server = [(host, server) for host, server in servers.items() if server is not None][:_MOST_ASKED_ABOUT]
        self.reached = {host: {} for host, _ in with_server}
        if with_server:
            ask(ExamineOrder(peers=tuple(server for _, server in with_server)))

    def _report_silence(self) -> None:
        """Tell the user once about each silent host for which the attempt waits."""
        new = [host for host in self._reasons if host not in self._waited_for]
        for host in new:
            lease_ends = time.strftime("%H:%M:%S", time.localtime(time.time() + self._plan.lease_s))
            until = f"{lease_ends} (cluster.lease_s={self._plan.lease_s:g})"
            self._report(host, f"its ranks may train on until {until}, so it is waited for")
        if new:
            self._waited_for.update(new)
            self._report_wait()

    def _report(self, host: str, what_follows: str) -> None:
        line = f"{host} {self._reasons[host]}; {what_follows}"
        self._emit(Notice(text="\n".join([line, *lines_on_lost({host: self.reached.get(host, {})})])))

    def _report_wait(self) -> None:
        hosts = ", ".join(sorted(self._waited_for))
        self._emit(Doing(what=f"waiting for {hosts}, whose ranks may train on" if hosts else None))


def ssh_server(plan: LaunchPlan, host: str) -> tuple[str, int] | None:
    """Return address and port of a node's ssh server, by its identity (``NAME ADDRESS:PORT …``); None without ssh."""
    identity = next((node.identity for node in plan.nodes if node.host == host), "")
    address, _, port = [*identity.split(" "), "", ""][1].rpartition(":")
    return (address, int(port)) if port.isdecimal() and port != "0" else None


def is_dead(answers: Mapping[str, str], others: Collection[str]) -> bool:
    """Return whether a host's ranks are cut off: none of the ``others`` reached it, by their ``answers``."""
    return bool(others) and all(answers.get(other) in _DEAD for other in others)


def lines_on_lost(reached: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each lost host: whether others could reach it. ``reached``: lost host → other → its answer."""
    lines = []
    for host, answers in reached.items():
        best = next((kind for kind in _REACH_TEXTS if kind in answers.values()), None)
        if best is not None:
            who = " and ".join(other for other, kind in answers.items() if kind == best)
            lines.append(f"{host}: {_REACH_TEXTS[best].format(who=who)}")
    return lines
