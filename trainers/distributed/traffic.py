"""Count the bytes that the hosts of a run send and receive, from their network ports, for the metrics.

The training never reads these numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.distributed.process_group import RankContext

_WORD_BYTES = 4  # InfiniBand's port counters count words of four octets (IBTA, PortCounters)
_INFINIBAND_LINK = "32"  # ARPHRD_INFINIBAND: the port's counter includes the traffic of such an interface


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders with Linux's counters: interfaces of this process's network namespace, and RDMA ports."""

    interfaces: Path = Path("/proc/net/dev")
    devices: Path = Path("/sys/class")


class Traffic:
    """Bytes that all hosts together have sent and received since the last call; empty for a single host."""

    def __init__(
        self, context: RankContext, environment: Mapping[str, str] = os.environ, places: Places | None = None
    ) -> None:
        self._context, self._places = context, places or Places()
        self._names = environment.get("GLOO_SOCKET_IFNAME", "").split(",")
        self._seen = self._counted()

    def since_last_look(self) -> dict[str, float]:
        """Return the bytes of all hosts for metrics.jsonl; empty if a host has no counter. Every rank must call it."""
        ranks = self._context.ranks
        if ranks.nnodes == 1:
            return {}
        before, self._seen = self._seen, self._counted()
        mine = torch.zeros(3, dtype=torch.float64, device=self._context.device)
        if ranks.local_rank == 0 and before and self._seen:
            sent, received = (max(0, now - then) for now, then in zip(self._seen, before, strict=True))
            mine = torch.tensor([sent, received, 1], dtype=torch.float64, device=self._context.device)
        all_sent, all_received, hosts = self._context.read(self._context.sum(mine))
        if hosts < ranks.nnodes:
            return {}
        return {"network/sent_bytes": all_sent, "network/received_bytes": all_received}

    def _counted(self) -> tuple[int, int] | None:
        """Return the host's total bytes sent and received, over its RDMA ports and the interfaces of the run."""
        ports = [_port(folder) for folder in self._places.devices.glob("infiniband/*/ports/*/counters")]
        links = []
        with suppress(OSError):
            table = self._places.interfaces.read_text(encoding="ascii")
            links = [_link(table, name) for name in self._names if not (ports and self._is_infiniband(name))]
        counts = [pair for pair in (*ports, *links) if pair is not None]
        return (sum(sent for sent, _ in counts), sum(received for _, received in counts)) if counts else None

    def _is_infiniband(self, name: str) -> bool:
        kind = self._places.devices / "net" / name / "type"
        return kind.is_file() and kind.read_text(encoding="ascii").strip() == _INFINIBAND_LINK


def _port(counters: Path) -> tuple[int, int] | None:
    """Return the bytes sent and received by an RDMA port."""
    with suppress(OSError, ValueError):
        sent, received = (int((counters / f"port_{way}_data").read_text(encoding="ascii")) for way in ("xmit", "rcv"))
        return _WORD_BYTES * sent, _WORD_BYTES * received
    return None


def _link(table: str, name: str) -> tuple[int, int] | None:
    """Return bytes sent and received by an interface in /proc/net/dev: 8 receive columns, then 8 transmit columns."""
    match = re.search(rf"^\s*{re.escape(name)}:\s*(\d+)(?:\s+\d+){{7}}\s+(\d+)", table, re.MULTILINE)
    return (int(match[2]), int(match[1])) if match and name else None
