"""Whether torchrun of this node has come to where all nodes meet, by the kernel's table of connections.

torchrun itself says nothing while it waits for the others, and a SYN that a firewall drops is no error for minutes.
"""

# Requests carry paths as text, and much of this is /proc: os.path all the way.
# ruff: noqa: PTH123
from __future__ import annotations

import contextlib
import socket
import sys
import time

LOOK_S = 0.5
UNANSWERED_S = 3.0  # until it is said, then
AGAIN_S = 30.0  # from one time to the next
ESTABLISHED, SYN_SENT, LISTEN = "01", "02", "0A"


class Meeting:
    """Looks until this node has come. ``place`` is address and port of the first node; None: nodes don't meet."""

    def __init__(self, place: list[str | int] | None, *, first: bool) -> None:
        self.place, self.first = place, first
        self.looked = time.monotonic()  # torchrun takes a second at least until it comes
        self.said = 0.0
        self.trying: float | None = None  # since when a SYN has had no answer

    def news(self) -> list[str]:
        """Lines for the log of the node; mostly none."""
        now = time.monotonic()
        if self.place is None or now - self.looked < LOOK_S:
            return []
        self.looked = now
        where, found = "{}:{}".format(*self.place), self.states()
        if (LISTEN if self.first else ESTABLISHED) in found:
            self.place = None
            return [f"paceline: torchrun is at {where}, where the hosts meet"]
        if SYN_SENT not in found:
            self.trying = None
            return []
        self.trying = self.trying or now
        if now - self.trying < UNANSWERED_S or now - self.said < AGAIN_S:
            return []
        self.said = now
        return [f"paceline: no answer from {where}, where the hosts meet, for {now - self.trying:.0f} s"]

    def states(self) -> set[str]:
        """Of this host's connections to the place; on the first node of the sockets at that port."""
        assert self.place is not None
        address, port = hexadecimal(str(self.place[0])), f":{int(self.place[1]):04X}"
        found = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
                for line in lines:
                    _, local, remote, state, *_ = line.split()
                    if self.first and local.endswith(port):
                        found.add(state)
                    if not self.first and remote.endswith(f"{address}{port}"):
                        found.add(state)
        return found


def hexadecimal(address: str) -> str:
    """As the table shows it, in words of the processor's byte order; an IPv4 address also ends the IPv6 one that maps
    it. Empty for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            data = socket.inet_pton(family, address)
            words = (data[start : start + 4] for start in range(0, len(data), 4))
            return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return ""
