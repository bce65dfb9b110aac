"""Before a run: hosts where somebody else computes are refused, or waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from pipeline.cluster import host_versions
from pipeline.cluster.agent.claims import BUSY
from pipeline.cluster.hosts import Hosts
from pipeline.cluster.launchers import claims
from pipeline.cluster.launchers.agent_launcher import AgentLauncher
from pipeline.cluster.launchers.base import AttemptSpec
from pipeline.cluster.preflight import occupation
from pipeline.cluster.running import Watchers
from pipeline.core.errors import HostError
from pipeline.runs import attempts
from trainers.contract import run_folder

_LOOK_S = 0.2
ASK_AGAIN_S = 5.0


def until_free(hosts: Hosts, spec: AttemptSpec, watchers: Watchers, check: Callable[[], None]) -> None:
    """Refuse hosts where somebody else computes, or wait until nobody does, as ``cluster.when_busy`` says.

    Nothing is held while it waits. The start claims each host, and is refused where another run was quicker.

    Args:
        check: raises when a signal wants the end.

    Raises:
        HostError: names who is on which host since when; or a host can't be asked.
    """
    if claims.policy(hosts.cluster) == claims.SHARE or not isinstance(hosts.launcher, AgentLauncher):
        return
    wait = _Wait(hosts, spec, watchers, check)
    if waits(hosts, spec):
        wait.until_free()
    else:
        occupation.refuse(wait.others(), hosts.cluster.nnodes)


def waits(hosts: Hosts, spec: AttemptSpec) -> bool:
    """Whether this run waits for busy hosts; a restart does, as its user isn't there to start it again."""
    policy = claims.policy(hosts.cluster)
    return policy == claims.WAIT or (policy == claims.REFUSE and spec.is_restart)


def was_forestalled(error: HostError, hosts: Hosts, spec: AttemptSpec) -> bool:
    """Whether a start failed because another run claimed a host first, and this run waits for it."""
    return BUSY in error.what and waits(hosts, spec)


def wait_a_moment(hosts: Hosts, spec: AttemptSpec, watchers: Watchers, check: Callable[[], None]) -> None:
    """After a start that was forestalled. Two runs that took one host each have both let go of it, and must not try
    again at the same moment. Raises HostError, and as ``check`` does."""
    _Wait(hosts, spec, watchers, check).pause(random.uniform(0.0, ASK_AGAIN_S))
    hosts.forget()


class _Wait:
    """Ask the hosts of one run again and again who is on them."""

    def __init__(self, hosts: Hosts, spec: AttemptSpec, watchers: Watchers, check: Callable[[], None]) -> None:
        self._hosts, self._spec, self._watchers, self._check = hosts, spec, watchers, check
        self._prefix = attempts.prefix(spec.run_key, spec.run_dir)
        self._said = ""

    def others(self) -> list[occupation.Occupation]:
        """Who else is on the hosts, as they answered last. Raises HostError."""
        facts = self._hosts.facts(self._spec.pack, host_versions.asked(self._spec.versions))
        return occupation.occupied(self._hosts.cluster, facts, self._prefix)

    def until_free(self) -> None:
        """Raises HostError: a host could not be asked at first, or since ``lease_s``, for as long as a run goes on
        without its command."""
        answered = None
        while True:
            try:
                busy = self.others()
            except HostError as error:
                if answered is None or time.monotonic() - answered > self._hosts.cluster.lease_s:
                    raise
                self._say(f"waiting, and a host doesn't answer: {error.what}; it is asked again")
            else:
                if not busy:
                    return
                answered = time.monotonic()
                self._say(f"waiting for {busy[0].host}: {busy[0].who}")
            self.pause(ASK_AGAIN_S)
            self._hosts.forget()

    def pause(self, seconds: float) -> None:
        """Raises what ``check`` does, and HostError where `doit stop` was typed meanwhile: nothing runs yet."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check()
            if (self._spec.run_dir / run_folder.STOP).exists():
                raise HostError("doit stop has ended the wait for the hosts")
            time.sleep(_LOOK_S)

    def _say(self, text: str) -> None:
        """Once when it begins or changes; who waits is shown the newest."""
        if not self._said:
            self._watchers.on_launch(lambda: self._said)
        if text != self._said:
            self._said = text
            self._watchers.on_job(text)
