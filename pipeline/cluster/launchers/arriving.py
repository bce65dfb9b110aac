"""How much of what is being sent has arrived at each host, in words for who waits. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.tables import counted

_NAMED = 4  # hosts in a line


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """``what`` is under way to ``hosts`` (labels), ``total_bytes`` to each of them, since ``began`` (monotonic
    seconds)."""

    what: str
    hosts: tuple[str, ...]
    total_bytes: int
    began: float

    @classmethod
    def begin(cls, what: str, hosts: Sequence[str], total_bytes: int) -> Transfer:
        return cls(what=what, hosts=tuple(hosts), total_bytes=total_bytes, began=time.monotonic())

    def text(self, arrived: Mapping[str, int], now: float) -> str:
        """Each host's part with its mean rate; of many hosts those that are furthest behind.

        Args:
            arrived: host → bytes that it has told to have.
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
