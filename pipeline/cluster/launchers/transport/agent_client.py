"""Requests to the agents on all hosts of a cluster at once: their answers, their failures, the progress of files."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from pipeline.cluster.agent.requests import Request
from pipeline.cluster.agent.wire import BUSY
from pipeline.cluster.launchers.base import Transport
from pipeline.cluster.launchers.settings import WHEN_BUSY_HINT
from pipeline.cluster.launchers.transport.answers import Answer, parse_answer, received_bytes
from pipeline.cluster.launchers.transport.payload import message, new_token
from pipeline.core.errors import HostError
from pipeline.core.specs import Host
from pipeline.core.tables import counted

_ANSWER_S = 8.0  # what a short command takes once it is connected
_CONNECT_AGAIN_S = 5.0  # to a host that has answered before
_ROWS, _HINTS = 20, 3  # most lines of an error, whose beginning must stay on the screen

Explain = Callable[[Host, Answer], tuple[str, str | None]]
"""Returns why a host's answer failed, and the command that fixes it (None: not known)."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Files that follow a request: their name for the user who waits, and what appends them as a tar."""

    name: str
    append: Callable[[IO[bytes]], None]


class AgentClient:
    """Sends requests to the agents of a cluster, which a transport starts on its hosts."""

    def __init__(self, transport: Transport) -> None:
        self.cluster, self.transport = transport.cluster, transport
        self._transfer: Transfer | None = None  # the newest payload
        self._tokens: dict[str, str] = {}  # host label → that of the newest request

    @property
    def slow_s(self) -> float:
        """How long further connections may take until they answer; 0: the usual limits are enough."""
        return self.transport.slow_s or 0.0

    @property
    def short_s(self) -> float:
        """Time limit of a short command: less for hosts that have answered before, so a lost one is noticed soon."""
        first_s = self.cluster.settings.connect_timeout_s
        slow_s = self.transport.slow_s
        return _ANSWER_S + (first_s if slow_s is None else min(first_s, max(_CONNECT_AGAIN_S, slow_s)))

    def ask(
        self,
        request: Request,
        *,
        hosts: Sequence[Host] | None = None,
        timeout_s: float | None = None,
        payload: Payload | None = None,
    ) -> dict[str, Answer]:
        """Send one request to all hosts (or some) at once; never raises for a host.

        The request goes into a file without a name: it may hold secrets, and nothing of it stays if this process is
        killed.

        Args:
            timeout_s: None: that of a short command.

        Returns:
            Host label → its answer.
        """
        token, hosts = new_token(), self.cluster.hosts if hosts is None else hosts
        labels = [host.label for host in hosts]
        self._tokens |= dict.fromkeys(labels, token)
        with tempfile.TemporaryFile(prefix="paceline-") as stdin:
            stdin.write(message(request._replace(access=self.transport.access), token))
            begin = stdin.tell()
            if payload is not None:
                payload.append(stdin)
                self._transfer = Transfer(payload.name, labels, stdin.tell() - begin)
            stdin.flush()
            outputs = self.transport.exchange(stdin, hosts, timeout_s or self.short_s)
        return {
            label: Answer(value=parse_answer(output.stdout, token), output=output) for label, output in outputs.items()
        }

    def demand(
        self,
        purpose: str,
        request: Request,
        *,
        hosts: Sequence[Host] | None = None,
        timeout_s: float | None = None,
        payload: Payload | None = None,
    ) -> dict[str, Answer]:
        """Send a request that every host must be able to follow; arguments and result as in ``ask``.

        Raises HostError that lists the hosts that failed (the first of many) and the fix; ``purpose`` begins it.
        """
        answers = self.ask(request, hosts=hosts, timeout_s=timeout_s, payload=payload)
        rows, hints = self.failures(answers, self._explained)
        if rows:
            head = f"{purpose}: {len(rows)} of {self.cluster.nnodes} hosts can't take part"
            silent = [label for label, answer in answers.items() if answer.value is None]
            more = [f"  and {len(rows) - _ROWS} more"] if len(rows) > _ROWS else []
            so_on = [f"and so on for {len(hints) - _HINTS} more"] if len(hints) > _HINTS else []
            hint = "; then ".join([*hints[:_HINTS], *so_on])
            raise HostError("\n".join([head, *rows[:_ROWS], *more]), hint=hint or None, hosts=silent)
        return answers

    def _explained(self, host: Host, answer: Answer) -> tuple[str, str | None]:
        why, hint = self.transport.explain(host, answer)
        return why, WHEN_BUSY_HINT if BUSY in (answer.reported_error or "") else hint

    def failures(self, answers: Mapping[str, Answer], explain: Explain) -> tuple[list[str], list[str]]:
        """Return a row for each host that failed, and the fixes, each once."""
        rows, hints = list[str](), list[str]()
        for host in self.cluster.hosts:
            answer = answers.get(host.label)
            if answer is None or answer.error is None:
                continue
            why, hint = explain(host, answer)
            rows.append(f"  {host.label}: {why}")
            hints.extend([hint] if hint and hint not in hints else [])
        return rows, hints

    def reported_counts(self, labels: Sequence[str]) -> dict[str, int]:
        """Return host label → the newest count that its agent has reported, for another thread.

        That are the bytes of the payload that have arrived, or the distributions that are installed.
        """
        counts = {}
        for label in labels:
            with contextlib.suppress(OSError, KeyError):  # not there yet, or no longer
                counts[label] = received_bytes(self.transport.outputs[label].read_bytes(), self._tokens[label])
        return counts

    def transfer_progress(self) -> str:
        """Return how far the newest payload is, for another thread; '' before any of it has arrived."""
        arrived = self.reported_counts(self._transfer.hosts) if self._transfer is not None else {}
        return self._transfer.text(arrived, time.monotonic()) if self._transfer and any(arrived.values()) else ""


_NAMED = 4  # hosts in a line


@dataclass(frozen=True)
class Transfer:
    """A payload on its way to hosts.

    ``what``: its name; ``hosts``: labels; ``total_bytes``: for each host; ``began``: monotonic seconds.
    """

    what: str
    hosts: Sequence[str]
    total_bytes: int
    began: float = field(default_factory=time.monotonic)

    def text(self, arrived: Mapping[str, int], now: float) -> str:
        """Return the progress and mean rate of each host; of many hosts those that are furthest behind.

        Args:
            arrived: host → bytes that it has reported.
            now: monotonic seconds.
        """
        order = sorted(self.hosts, key=lambda host: arrived.get(host, 0)) if len(self.hosts) > _NAMED else self.hosts
        rows = [self._part(host, arrived.get(host, 0), now) for host in order[:_NAMED]]
        if len(self.hosts) > _NAMED:
            done = sum(arrived.get(host, 0) >= self.total_bytes for host in self.hosts)
            rows = [f"{done} of {counted(len(self.hosts), 'host')} have it; furthest behind {rows[0]}", *rows[1:]]
        return f"sending {self.what}: {', '.join(rows)}"

    def _part(self, host: str, count_bytes: int, now: float) -> str:
        rate = count_bytes / max(now - self.began, 1e-3)
        return f"{host} {count_bytes / 1e6:,.1f} of {self.total_bytes / 1e6:,.1f} MB ({rate / 1e6:,.1f} MB/s)"
