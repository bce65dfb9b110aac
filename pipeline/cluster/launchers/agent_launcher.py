"""What every launcher that starts the node agent by a command shares: requests, answers, live streams."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, ClassVar

from pipeline.cluster import launchers, networks, reachability
from pipeline.cluster.agent.claims import BUSY
from pipeline.cluster.launchers import agent_requests, claims
from pipeline.cluster.launchers.answers import Answer, Output, answer_in
from pipeline.cluster.launchers.base import NOT_ENDED, AttemptSpec, Launcher, PackSource, Place
from pipeline.cluster.launchers.environments import Environment, LockFile
from pipeline.cluster.launchers.payload import message, new_token
from pipeline.cluster.launchers.probe_answer import node_facts
from pipeline.cluster.launchers.sending import (
    SLOWEST_BYTES_PER_S,
    Transfer,
    append,
    append_run,
    pack_bytes,
    rides_with_the_run,
    weights_bytes,
)
from pipeline.cluster.launchers.settings import Capabilities
from pipeline.cluster.launchers.streams import Connection, Streams
from pipeline.core.errors import HostError
from pipeline.core.specs import Cluster, Event, Host, LaunchPlan, NodeFacts
from pipeline.runs import attempts

ANSWER_S = 8.0  # what a short command takes once it is connected
USUAL_S = 3.5  # an answer to the probe that takes longer is that of a slow login
_ROWS, _HINTS = 20, 3  # of an error: more would push its beginning off the screen
CONNECT_AGAIN_S = 5.0  # to a host that has answered before
_LISTENING_S = 10.0  # for which an agent waits for the others, beyond the time of a slow login


class AgentLauncher(Launcher, ABC):
    """The verbs of ``Launcher`` on top of two ways to reach hosts: ``exchange`` and ``stream_argv``."""

    silent_s: ClassVar[float] = 0.0
    """How long a live agent may say nothing before it counts as lost; 0: as long as ssh takes to notice a lost host."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._silent: set[str] = set()  # hosts that did not answer when the run had to stop
        self.transfer: Transfer | None = None  # what was sent last, or is under way
        self._tokens: dict[str, str] = {}  # host label → that of the newest request
        self._notes: list[str] = []
        self.environment: LockFile | None = None  # of which hosts get their environment from here
        self.slow_s: float | None = None  # None: no host has answered yet

    @property
    def capabilities(self) -> Capabilities:
        return launchers.capabilities(self.cluster)

    # ------------------------------------------------------------------ what a launcher brings
    @abstractmethod
    def exchange(self, stdin: IO[bytes], hosts: Sequence[Host], timeout_s: float) -> dict[str, Output]:
        """Run the agent on ``hosts`` at once with the file ``stdin`` from its beginning; host label → what it wrote."""

    @abstractmethod
    def stream_argv(self, host: Host) -> list[str]:
        """The command of a live agent on one host."""

    def arrived(self, labels: Sequence[str]) -> dict[str, int]:
        """How much the hosts of ``labels`` have told to have of what the newest request brings; those that told."""
        return {}

    def remote_shell(self, host: Host) -> list[str]:
        """The command that reaches the host, up to its name, for programs that bring their own remote command (rsync);
        empty: there is none."""
        return []

    def go_alone(self) -> None:
        """Called when a connection broke or hangs: later commands open connections of their own."""

    @abstractmethod
    def place(self, host: Host, facts: NodeFacts, spec: AttemptSpec, run_id: str) -> Place: ...

    @abstractmethod
    def registry(self, run_dir: Path) -> str:
        """The folder on a node where its agents register (``~`` is the node's)."""

    @abstractmethod
    def explain(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        """An answer that failed in plain words, and the command that fixes it (None: not known)."""

    # ---------------------------------------------------------------------------- short verbs
    def ask(
        self,
        request: dict[str, Any],
        *,
        hosts: Sequence[Host] | None = None,
        timeout_s: float | None = None,
        payload: Callable[[IO[bytes]], None] | None = None,
        what: str = "code and data",
    ) -> dict[str, Answer]:
        """Send one request (and what ``payload`` appends to the file) to all hosts at once; never raises for a host.

        The file has no name: a request may hold secrets, and nothing of it is left when this process is killed.

        Args:
            what: the name of the payload, for who waits.
        """
        token, hosts = new_token(), self.cluster.hosts if hosts is None else hosts
        labels = [host.label for host in hosts]
        self._tokens |= dict.fromkeys(labels, token)
        with tempfile.TemporaryFile(prefix="paceline-") as stdin:
            stdin.write(message({**self._local, **request}, token))
            begin = stdin.tell()
            if payload is not None:
                payload(stdin)
                self.transfer = Transfer.begin(what, labels, stdin.tell() - begin)
            stdin.flush()
            outputs = self.exchange(stdin, hosts, timeout_s or self.short_s)
        return {label: answer_in(output, token) for label, output in outputs.items()}

    def demand(self, doing: str, answers: dict[str, Answer]) -> dict[str, dict[str, Any]]:
        """The values of all answers. Raises HostError that lists the hosts that failed (of many the first few) and the
        fix."""

        def explained(host: Host, answer: Answer) -> tuple[str, str | None]:
            why, hint = self.explain(host, answer)
            return why, claims.WHEN_BUSY if BUSY in (answer.told or "") else hint

        rows, hints = self.failures(answers, explained)
        if rows:
            head = f"{doing}: {len(rows)} of {self.cluster.nnodes} hosts can't take part"
            silent = [label for label, answer in answers.items() if answer.value is None]
            more = [f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else []
            so_on = [f"and so on for {len(hints) - _HINTS} more"] if len(hints) > _HINTS else []
            hint = "; then ".join([*hints[:_HINTS], *so_on])
            raise HostError("\n".join([head, *rows[:_ROWS], *more]), hint=hint or None, hosts=silent)
        return {label: answer.value or {} for label, answer in answers.items()}

    def failures(
        self, answers: dict[str, Answer], explained: Callable[[Host, Answer], tuple[str, str | None]]
    ) -> tuple[list[str], list[str]]:
        """A row for each host that did not do what it was asked, and what to do about them, each once."""
        rows, hints = list[str](), list[str]()
        for host in self.cluster.hosts:
            answer = answers.get(host.label)
            if answer is None or answer.error is None:
                continue
            why, hint = explained(host, answer)
            rows.append(f"  {host.label}: {why}")
            hints.extend([hint] if hint and hint not in hints else [])
        return rows, hints

    @property
    def _local(self) -> dict[str, bool]:
        """Tells the agent that no ssh connection stands behind its address."""
        return {"local": self.capabilities.is_this_computer}

    @property
    def workdir(self) -> str:
        return agent_requests.workdir(self.cluster)

    @property
    def short_s(self) -> float:
        """Time limit of a short command. Hosts that have answered answer quickly again, or the others would run on for
        long after one is lost."""
        first_s = self.cluster.connect_timeout_s
        return ANSWER_S + (first_s if self.slow_s is None else min(first_s, max(CONNECT_AGAIN_S, self.slow_s)))

    def probe(
        self, pack: PackSource | None, modules: Sequence[str] = (), warm: Mapping[str, Any] | None = None
    ) -> list[NodeFacts]:
        request = {**agent_requests.probe(self.cluster, pack, modules, self.registry(Path())), "warm": warm}
        asked, began = time.time(), time.monotonic()
        values = self.demand("probe", self.ask(request, timeout_s=self.short_s))
        answered_s = min(time.monotonic() - began, self.short_s)  # more is time in which this process was stopped
        self.slow_s = max(self.slow_s or 0.0, slowness_s(answered_s))
        when = {"asked": asked, "answered": time.time()}  # by this computer's clock, to compare the host's with
        return [self._facts(host, values[host.label], when) for host in self.cluster.hosts]

    def _facts(self, host: Host, value: dict[str, Any], when: dict[str, float]) -> NodeFacts:
        """The probe's answer with what the configuration says about this host on top."""
        told = node_facts(host.label, value)
        address, interface = networks.address_and_interface(host, told.address, told.extra["interfaces"])
        return replace(told, address=address, interface=interface, extra={**told.extra, **when})

    def reach(self, facts: list[NodeFacts]) -> None:
        """By one command to all hosts, which listen and connect at the same time."""
        if len(facts) == 1:
            return
        request = {
            "do": "reach",
            "nodes": reachability.nodes(facts),
            "hello": secrets.token_hex(8),
            "answer": secrets.token_hex(8),
            "slow_s": self.slow_s or 0.0,
        }
        answers = self.ask(request, timeout_s=self.short_s + _LISTENING_S)
        values = self.demand("checking that the hosts reach each other", answers)
        failures = reachability.unreached([values[host.label] for host in self.cluster.hosts])
        if failures:
            raise reachability.error(failures, facts)

    def environments(self, lock: LockFile) -> list[Environment]:
        """Each host's environment of a lock file, in their order, by the interpreters that the configuration names.

        Raises HostError.
        """
        request = {"do": "find_environment", "workdir": self.workdir, **lock.request}
        values = self.demand("looking for the environment", self.ask(request))
        return [Environment(host=host.label, **values[host.label]) for host in self.cluster.hosts]

    def start(self, plan: LaunchPlan, pack: PackSource | None, facts: list[NodeFacts], run_dir: Path) -> None:
        rides = self._provide(pack, facts) if pack is not None else None
        digest = pack.digest if pack else ""
        request = agent_requests.start(self.cluster, self._request(plan, run_dir), plan, run_dir, digest)
        answers = self.ask(
            request,
            timeout_s=self.short_s + 20.0 + weights_bytes(run_dir) * len(facts) / SLOWEST_BYTES_PER_S,
            payload=(lambda stdin: append_run(stdin, run_dir, rides)) if request["stage"] else None,
        )
        self.demand("start", answers)

    def notes(self) -> list[str]:
        told, self._notes = self._notes, []
        return told

    def _provide(self, pack: PackSource, facts: list[NodeFacts]) -> PackSource | None:
        """Send a large pack to the hosts that lack it; a small one is returned, to be sent with the run."""
        lacking = any(fact.pack_path is None for fact in facts)
        if lacking and rides_with_the_run(pack, len(facts)):
            return pack
        self.send_pack(pack, facts)
        return None

    def send_pack(self, pack: PackSource, facts: Sequence[NodeFacts]) -> None:
        """Send the data pack to all hosts that lack it, at once; each has it whole, with its digests, or not at all.

        Raises:
            HostError: a host could not be sent it, or has no room for it.
        """
        lacking = {fact.host for fact in facts if fact.pack_path is None}
        if not lacking:
            return
        answers = self.ask(
            {"do": "put_pack", "workdir": self.workdir, "pack_digest": pack.digest},
            hosts=[host for host in self.cluster.hosts if host.label in lacking],
            timeout_s=self.short_s + pack_bytes(pack.path) * len(lacking) / SLOWEST_BYTES_PER_S,
            payload=lambda stdin: append(stdin, pack.path, "."),
            what="the data pack",
        )
        self.demand("sending the data pack", answers)

    def _request(self, plan: LaunchPlan, run_dir: Path) -> dict[str, Any]:
        return agent_requests.of_run(self.cluster, plan, self.registry(run_dir), self.slow_s or 0.0)

    def follow(self, plan: LaunchPlan, emit: Callable[[Event], None], *, metrics_at: int) -> Streams:
        hosts = {host.label: host for host in self.cluster.hosts}
        request = {**self._request(plan, Path()), "do": "follow", **self._local}
        request |= {"metrics": not self.capabilities.shares_run_dir, "of_script": bool(plan.outputs.whole)}
        connections = [self.connection(hosts[node.host]) for node in plan.nodes]
        token, lock = new_token(), threading.Lock()

        @lru_cache(maxsize=1)
        def opened(offsets: tuple[tuple[str, int], ...]) -> bytes:
            return message({**request, **dict(offsets)}, token)

        def opening(offsets: dict[str, int]) -> bytes:
            """It holds the parts of all nodes, and nearly all streams begin at the same bytes: it is made once."""
            with lock:
                return opened(tuple(offsets.items()))

        lease_s = 0.0 if self.capabilities.is_this_computer else plan.lease_s  # here no network can break
        return Streams(connections, opening, emit, metrics_at, token, lease_s)

    def connection(self, host: Host) -> Connection:
        """To a live agent on one host; what comes after a broken one shares nothing with it."""

        def again() -> list[str]:
            self.go_alone()
            return self.stream_argv(host)

        argv, slow_s = self.stream_argv(host), self.slow_s or 0.0
        return Connection(host=host.label, argv=argv, again=again, slow_s=slow_s, silent_s=self.silent_s)

    def stop(self, run_key: str, run_dir: Path, *, bar: str = "") -> dict[str, str]:
        self.go_alone()
        which = attempts.prefix(run_key, run_dir)
        request = {"do": "stop", "attempts": which, "registry": self.registry(run_dir), "bar": bar}
        answers = self.ask(request, timeout_s=self.short_s + 8.0)
        hosts = {host.label: host for host in self.cluster.hosts}
        failed = {label: answer for label, answer in answers.items() if answer.error is not None}
        failures = {label: self.explain(hosts[label], answer)[0] for label, answer in failed.items()}
        left = {
            label: f"{NOT_ENDED}{', '.join(answer.value['left'])}"
            for label, answer in answers.items()
            if answer.value and answer.value.get("left")
        }
        self._silent = set(failures)
        return {**failures, **left}

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def collect(self, plan: LaunchPlan, run_dir: Path, *, final: bool) -> bool: ...

    def clean(self, plan: LaunchPlan) -> None:
        hosts = [host for host in self.cluster.hosts if host.label not in self._silent]
        if hosts:
            self.ask({**self._request(plan, Path()), "do": "clean"}, hosts=hosts, timeout_s=self.short_s)

    def clear(self, unwanted: Sequence[tuple[NodeFacts, Sequence[str]]]) -> dict[str, list[str]]:
        asked = {fact.host for fact, _ in unwanted}
        hosts = [host for host in self.cluster.hosts if host.label in asked]
        folders = {fact.identity: list(names) for fact, names in unwanted}
        request = {"do": "clear", "workdir": self.workdir, "registry": self.registry(Path()), "folders": folders}
        answers = self.ask(request, hosts=hosts, timeout_s=self.short_s) if hosts else {}
        done = {label: answer.value for label, answer in answers.items() if answer.value and answer.told is None}
        return {label: list(value["removed"]) for label, value in done.items()}


def slowness_s(answered_s: float) -> float:
    """How long further connections may take until they answer; 0 where the usual limits will do.

    Args:
        answered_s: after which all hosts had answered the probe.
    """
    return 1.5 * answered_s if answered_s > USUAL_S else 0.0
