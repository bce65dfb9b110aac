"""What an address stands for, and sockets that listen at it."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from .wire import in_thread

BACKLOG = 256
LOOK_S = 0.02
UNRESOLVED = "can't resolve it: "


class Names:
    """What addresses stand for. A name is looked up in a thread: a name server may not answer for long."""

    def __init__(self) -> None:
        self.known: dict[str, list[tuple[int, object]] | Exception | None] = {}

    def places(self, address: str) -> list[tuple[int, object]] | Exception | None:
        """Families and addresses, or why there is none; None: not known yet."""
        if address not in self.known:
            self.known[address] = None
            try:
                self.known[address] = places(address.encode("ascii"), socket.AI_NUMERICHOST)
            except (OSError, UnicodeError):  # it is a name
                in_thread(self._look_up, address, on_error=lambda _: None)
        return self.known[address]

    def _look_up(self, address: str) -> None:
        try:
            self.known[address] = places(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
            self.known[address] = error

    def why(self, address: str) -> str:
        """Why this node can't look an address up; empty: it can."""
        while (found := self.places(address)) is None:
            time.sleep(LOOK_S)
        return unresolved(found) if isinstance(found, Exception) else ""


def places(address: str | bytes, flags: int = 0) -> list[tuple[int, object]]:
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in found]


def unresolved(error: Exception) -> str:
    """Why an address can't be looked up. The controller puts the address between (pipeline/cluster/networks.py)."""
    return f"{UNRESOLVED}{getattr(error, 'strerror', None) or error}"


def listening(address: str, port: int) -> list[socket.socket]:
    """At the node's address; at all of them where it is none of its own interfaces (behind a NAT), or is none at all,
    which those who connect will tell. Raises OSError: another program has the port."""
    try:
        return bound(address, port)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return bound(None, port)


def plain(name: str) -> str | bytes:
    """For ``getaddrinfo``: of a text it makes a name of the Internet's first, with modules that take long to import."""
    return name.encode("ascii") if name.isascii() else name


def bound(address: str | None, port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        found = socket.getaddrinfo(
            plain(address) if address else None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listeners = []
        for family, kind, number, _, place in found:
            listener = stack.enter_context(socket.socket(family, kind, number))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setblocking(False)
            listener.bind(place)
            listener.listen(BACKLOG)
            listeners.append(listener)
        stack.pop_all()
        return listeners
