"""Before a run: hosts where somebody else computes are refused, or waited for in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pipeline.cluster import host_versions
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers import claims
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.preflight import occupation
from pipeline.cluster.running import Watchers
from pipeline.core.errors import HostError
from pipeline.core.specs import Host, NodeFacts
from pipeline.runs import attempts
from trainers.contract import run_folder

_LOOK_S = 0.2
_CONNECT_AGAIN_S = 1.0
_ASK_AGAIN_S = 5.0  # of processes that hold no place in a queue


@contextmanager
def places(hosts: Hosts, spec: AttemptSpec, watchers: Watchers, check: Callable[[], None]) -> Iterator[Watchers]:
    """The hosts are this run's, as far as ``cluster.when_busy`` wants that; the watchers to go on with.

    A place that was waited for is kept until the run has started there, which then holds it itself. A run that is
    refused, or shares, needs none: each host's agent looks again before it starts anything.

    Args:
        check: raises when a signal wants the end.

    Raises:
        HostError: names who is on which host since when; or a host can't be asked.
    """
    launcher, policy = hosts.launcher, claims.policy(hosts.cluster)
    if policy == claims.SHARE or not isinstance(launcher, AgentLauncher):
        yield watchers
        return
    queue = _Queue(launcher, hosts, spec, watchers, check)
    if policy == claims.REFUSE and not spec.is_restart:
        occupation.refuse(queue.others(), hosts.cluster.nnodes)
        yield watchers
        return
    try:
        queue.wait()

        def on_start() -> None:
            queue.leave()
            watchers.on_start()

        yield replace(watchers, on_start=on_start)
    finally:
        queue.leave()


def in_common_order(hosts: Sequence[Host], facts: Sequence[NodeFacts]) -> list[Host]:
    """The hosts as everybody would order them, whatever he calls them and whichever comes first in his list."""
    named = zip(hosts, facts, strict=True)
    return [host for host, _ in sorted(named, key=lambda pair: str(pair[1].extra.get("machine") or pair[1].identity))]


class _Queue:
    """This run's places on its hosts."""

    def __init__(
        self,
        launcher: AgentLauncher,
        hosts: Hosts,
        spec: AttemptSpec,
        watchers: Watchers,
        check: Callable[[], None],
    ) -> None:
        self._launcher, self._hosts, self._spec = launcher, hosts, spec
        self._watchers, self._check = watchers, check
        self._prefix = attempts.prefix(spec.run_key, spec.run_dir)
        self._places: dict[str, claims.Place] = {}  # by the host's label
        self._said = ""

    def _facts(self) -> list[NodeFacts]:
        return self._hosts.facts(self._spec.pack, host_versions.asked(self._spec.versions))

    def others(self) -> list[occupation.Occupation]:
        """Who else is on the hosts, as they told last."""
        return occupation.occupied(self._hosts.cluster, self._facts(), self._prefix)

    def _heed(self) -> None:
        """Raises what ``check`` does, and HostError where `doit stop` was typed meanwhile: nothing runs yet."""
        self._check()
        if (self._spec.run_dir / run_folder.STOP).exists():
            raise HostError("doit stop has taken the run out of the queue")

    def wait(self) -> None:
        """One host after the other, in an order that is the same for everybody: nobody waits for one who waits for
        him. Where a place was lost meanwhile somebody else may have it, so all are waited for anew: whoever keeps a
        later one and waits for an earlier one breaks that order. Then until no process without a claim is on their
        GPUs."""
        order, began = in_common_order(self._hosts.cluster.hosts, self._facts()), False
        while any(self._place_lost(host) for host in order):
            self.leave()
            for host in order:
                began |= self._wait_for(host)
        if began:
            self._hosts.forget()
        while found := [one for one in self.others() if one.processes]:
            self._say(f"waiting for {found[0].host}: {'; '.join(found[0].processes)}")
            self._pause(_ASK_AGAIN_S)
            self._hosts.forget()

    def _place_lost(self, host: Host) -> bool:
        place = self._places.get(host.label)
        return place is None or bool(place.lost)

    def _wait_for(self, host: Host) -> bool:
        """Until nobody goes before this run there; whether anybody did. Whoever waits for hours outlives a connection:
        one that breaks is made anew for as long as a run goes on without its command (``lease_s``)."""
        place, waited, heard = self._take(host), False, time.monotonic()
        while place.ahead is None or place.ahead or place.lost:
            self._heed()
            if place.lost:
                over = not waited or time.monotonic() - heard > self._hosts.cluster.lease_s
                if place.refused or (over and place.ahead is None):
                    raise HostError(f"{host.label}: its queue can't be waited in: {place.lost}", hosts=[host.label])
                self._say(f"waiting for {host.label}: the connection to its queue broke ({place.lost}); making another")
                self._pause(_CONNECT_AGAIN_S)
                place = self._take(host)
            elif place.ahead:
                waited, heard = True, time.monotonic()
                self._say(f"waiting for {host.label}: {'; '.join(place.ahead)}")
            time.sleep(_LOOK_S)
        return waited

    def _take(self, host: Host) -> claims.Place:
        """The next place in its queue; where the host hasn't noticed yet that the one before was lost, the same one."""
        title = claims.title(self._spec.run_dir, self._spec.run_key)
        wish = {**claims.claim(self._hosts.cluster, host, self._prefix, title)}
        if (lost := self._places.pop(host.label, None)) is not None:
            lost.leave()
        self._places[host.label] = claims.Place(self._launcher.connection(host).argv, wish)
        return self._places[host.label]

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._heed()
            time.sleep(_LOOK_S)

    def _say(self, text: str) -> None:
        """Once when it begins or changes; who waits is shown the newest."""
        if not self._said:
            self._watchers.on_launch(lambda: self._said)
        if text != self._said:
            self._said = text
            self._watchers.on_job(text)

    def leave(self) -> None:
        while self._places:
            self._places.popitem()[1].leave()
