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
ESTABLISHED, SYN_SENT, CLOSE_WAIT, LISTEN = "01", "02", "08", "0A"


class Meeting:
    """Looks until this node has come. ``place`` is address and port of the first node; None: nodes don't meet."""

    def __init__(self, place: list[str | int] | None, *, first: bool) -> None:
        self.place, self.first = place, first
        self.met: list[str | int] | None = None  # the place, once this node has come
        self.left_at: float | None = None  # since when the first node has left it
        self.looked = time.monotonic()  # torchrun takes a second at least until it comes
        self.said = 0.0
        self.trying: float | None = None  # since when a SYN has had no answer

    def news(self) -> list[str]:
        """Lines for the log of the node; mostly none."""
        now = time.monotonic()
        if self.place is None or now - self.looked < LOOK_S:
            return []
        self.looked = now
        where, found = "{}:{}".format(*self.place), self.states(self.place)
        if (LISTEN if self.first else ESTABLISHED) in found:
            self.met, self.place = self.place, None
            return [f"paceline: torchrun is at {where}, where the hosts meet"]
        if SYN_SENT not in found:
            self.trying = None
            return []
        self.trying = self.trying or now
        if now - self.trying < UNANSWERED_S or now - self.said < AGAIN_S:
            return []
        self.said = now
        return [f"paceline: no answer from {where}, where the hosts meet, for {now - self.trying:.0f} s"]

    def left_s(self) -> float:
        """For how long torchrun of the first node has closed its connections to this node; 0: it has not.

        A host that was frozen finds that when it goes on. Its ranks may wait for the others all the same: gloo doesn't
        see every connection that was closed meanwhile.
        """
        if self.first or self.met is None:
            return 0.0
        found = self.states(self.met)
        if CLOSE_WAIT not in found or ESTABLISHED in found:
            self.left_at = None
            return 0.0
        now = time.monotonic()
        self.left_at = self.left_at or now
        return now - self.left_at

    def states(self, place: list[str | int]) -> set[str]:
        """Of this host's connections to the place; on the first node of the sockets at that port."""
        address, port = hexadecimal(str(place[0])), f":{int(place[1]):04X}"
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
