"""Answer a ``ReachRequest``: check that this node and every other one can connect to each other over TCP.

All nodes listen and try at the same time, because each gets its request by a login of its own. So a node that refuses a
connection is tried again: it may start late. Each connection has a thread, as an import of asyncio would take longer
than the whole check.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..node import own_number
from ..requests import ListeningNode, ReachRequest
from ..wire import LARGE_LOST, UNRESOLVED, Json, in_thread, say

CONNECT_S = 2.0  # of one attempt: time for the first SYN, and for one more after a second
LIMIT_S = 8.0  # until all others listen: the commands to all hosts start within this time
TRIES = 2  # attempts without an answer until a node counts as unreachable
LATE_S = 0.3  # an attempt that took so much longer doesn't count: this process had no processor, and missed the answer
RETRY_S = 0.1
RETRY_OF_ONE_S = 0.002  # times the number of nodes: few nodes start nearly at once, so they retry sooner
AT_ONCE = 200  # connections of one node: many systems allow a process 1,024 open files
LINE_BYTES = 1024  # the longest greeting or answer
LARGE = b"." * 12_000  # more than the largest packet of any network in use, 9,000 bytes
LARGE_TO = 4  # nodes to which one node sends LARGE: the same switches and tunnels lead to all others
LARGE_S = 1.5  # if a node closes the connection sooner, that doesn't prove that LARGE was lost
FOREIGN = "another program answers there"
WHOLE = "whole"  # the answer to LARGE
BACKLOG = 256


def reach(request: ReachRequest) -> None:
    """Answer with the ports that this node could not listen on, and the nodes that it could not reach."""
    me = own_number([node.identity for node in request.nodes], request.access)
    say(**ReachCheck(request.nodes, me, request.hello, request.answer, LIMIT_S + request.slow_s).run())


class ReachCheck:
    """This node's part of the check. ``me``: its index in ``nodes``.

    A connection: greeting ``HELLO INDEX``, answer ``ANSWER INDEX``, perhaps LARGE and WHOLE. The side that opened the
    connection closes it first, because the port of the side that closes first stays in use for a minute (TIME_WAIT).
    """

    def __init__(self, nodes: Sequence[ListeningNode], me: int, hello: str, answer: str, limit_s: float) -> None:
        self.nodes, self.me, self.hello, self.answer, self.limit_s = nodes, me, hello, answer, limit_s
        self.others = [*range(me + 1, len(nodes)), *range(me)]  # so that not all begin with the same node
        self.retry_s = min(RETRY_S, RETRY_OF_ONE_S * len(nodes))
        self.changed = threading.Condition()  # guards the two that follow
        self.awaited = {(other, port) for other in self.others for port in nodes[me].ports}  # connections to come
        self.greeted = 0  # connections that the other side will close
        self.failed: list[Json] = []
        self.errors: list[str] = []  # of threads

    def run(self) -> Json:
        """Return ``taken`` (port → why this node couldn't listen) and ``failed`` ({node, port, why}, …)."""
        listeners, taken = self.listen()
        targets = [(other, port) for other in self.others for port in self.nodes[other].ports]
        remaining_targets = iter(targets)  # shared by all threads
        # a thread for each port, because one that refuses is tried until ``limit_s``
        threads = [in_thread(self.dial_all, remaining_targets, on_error=self.errors.append) for _ in targets[:AT_ONCE]]
        for thread in threads:
            thread.join()
        # nodes that start late can still connect here, and then close their connections
        with self.changed:
            for is_over in (lambda: not self.awaited, lambda: self.greeted == 0):
                self.changed.wait_for(is_over, CONNECT_S + 5 * RETRY_S)
        try:
            resolve(self.nodes[self.me].address)  # torchrun looks it up, too
        except (OSError, UnicodeError) as error:
            ports = self.nodes[self.me].ports
            self.failed += [{"node": self.me, "port": port, "why": unresolved(error)} for port in ports]
        for listener in listeners:
            with listener, contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread that accepts
        if self.errors:
            raise SystemExit(self.errors[0])
        return {"taken": taken, "failed": self.failed}

    # ------------------------------------------------------------------------------------ connections of the others
    def listen(self) -> tuple[list[socket.socket], dict[int, str]]:
        """Listen at all ports of this node. Return the sockets, and port → why it is taken."""
        listeners: list[socket.socket] = []
        taken: dict[int, str] = {}
        for port in self.nodes[self.me].ports:
            try:
                listeners += open_listeners(self.nodes[self.me].address, port)
            except OSError as error:
                taken[port] = error.strerror or str(error)
                self.awaited -= {(other, port) for other in self.others}
        for listener in listeners:
            in_thread(self.accept, listener, on_error=self.errors.append)
        return listeners, taken

    def accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:  # until it is closed
            with contextlib.suppress(OSError):  # also: the other side has closed the connection
                in_thread(self.serve, listener.accept()[0], on_error=self.errors.append)

    def serve(self, connection: socket.socket) -> None:
        """Answer one connection. Programs that send another greeting get no answer."""
        with connection:
            word, _, node = read_line(connection).partition(" ")
            if word != self.hello or not node.isdecimal():
                return
            with self.changed:
                self.greeted += 1
            with contextlib.suppress(OSError):
                connection.sendall(f"{self.answer} {self.me}\n".encode())
                with self.changed:
                    self.awaited.discard((int(node), int(connection.getsockname()[1])))
                    self.changed.notify()
                # most nodes close the connection here, and some send LARGE
                if len(read_until(connection, lambda data: len(data) >= len(LARGE))) == len(LARGE):
                    connection.sendall(f"{WHOLE}\n".encode())
                    read_until(connection, bool)  # until the other side closes
            with self.changed:
                self.greeted -= 1
                self.changed.notify()

    # -------------------------------------------------------------------------------------- connections to the others
    def dial_all(self, targets: Iterator[tuple[int, int]]) -> None:
        """Try one (node, port) after another, and note the failures."""
        for node, port in targets:
            if why := self.dial(node, port):
                self.failed.append({"node": node, "port": port, "why": why})

    def dial(self, node: int, port: int) -> str:
        """Try one port of another node until it answers or its time is up; return why it can't be reached, or ''."""
        until, timeouts = time.monotonic() + self.limit_s, 0
        while True:
            began = time.monotonic()
            why, is_final = self.attempt(node, port, until)
            now = time.monotonic()
            if why is None:
                why = f"timed out after {TRIES * CONNECT_S:g} s"
                timeouts += now - began < CONNECT_S + LATE_S
                is_final = timeouts == TRIES
            if not why or is_final or now + self.retry_s >= until:
                return why
            time.sleep(self.retry_s)

    def attempt(self, node: int, port: int, until: float) -> tuple[str | None, bool]:
        """Return (why one attempt failed, whether any other attempt would fail, too). '': success; None: no answer."""
        try:
            addresses = resolve(self.nodes[node].address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
            return unresolved(error), True
        began, refused, why = time.monotonic(), False, ""
        for family, address in addresses:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                try:
                    connection.settimeout(max(0.001, began + CONNECT_S - time.monotonic()))
                    connection.connect((address[0], port, *address[2:]))  # [2:]: IPv6's scope
                except OSError as error:
                    if error.errno is None:  # the timeout of this socket
                        return None, False
                    why = os.strerror(error.errno)
                    refused |= error.errno == errno.ECONNREFUSED  # it may listen soon, whatever its other addresses say
                else:
                    return self.greet(connection, node, port, max(until, began + RETRY_S))
        return ("refused", False) if refused else (why, True)

    def greet(self, connection: socket.socket, node: int, port: int, until: float) -> tuple[str, bool]:
        """Check that the right node answers, and that large packets reach it, as gradients have to."""
        with contextlib.suppress(OSError):  # the other side has closed it
            connection.sendall(f"{self.hello} {self.me}\n".encode())
        word, _, number = read_line(connection, until).partition(" ")
        if word != self.answer:
            return FOREIGN, False
        if number != str(node):
            return f"node {number} answers there", False
        if node not in self.others[:LARGE_TO] or port != self.nodes[node].ports[0]:
            return "", True
        # where an MTU is wrong, connecting works, but a full packet vanishes without an error
        sent_at = time.monotonic()
        with contextlib.suppress(OSError):
            connection.sendall(LARGE)
        is_whole = read_line(connection, until) == WHOLE
        return "" if is_whole or time.monotonic() - sent_at < LARGE_S else LARGE_LOST, True


def read_until(connection: socket.socket, is_enough: Callable[[bytes], bool], until: float | None = None) -> bytes:
    """Return the data received until they are enough, the other side closes, or it is ``until`` (None: no limit)."""
    data = b""
    with contextlib.suppress(OSError):  # also a timeout
        while not is_enough(data):
            connection.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            more = connection.recv(len(LARGE))
            if not more:
                break
            data += more
    return data


def read_line(connection: socket.socket, until: float | None = None) -> str:
    data = read_until(connection, lambda data: b"\n" in data or len(data) > LINE_BYTES, until)
    return data.decode("ascii", "replace").strip()


def resolve(address: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) of each address that a name has. Raises OSError, UnicodeError."""
    answers = socket.getaddrinfo(encoded_name(address), 0, type=socket.SOCK_STREAM)
    return [(family, socket_address) for family, _, _, _, socket_address in answers]


def unresolved(error: Exception) -> str:
    """Return why an address can't be resolved; pipeline/cluster/networks.py adds the address."""
    return f"{UNRESOLVED}{getattr(error, 'strerror', None) or error}"


def open_listeners(address: str, port: int) -> list[socket.socket]:
    """Listen at the node's address, or at all addresses if it has no such one (NAT). Raises OSError: taken port."""
    try:
        return bind_listeners(address, port)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return bind_listeners(None, port)


def encoded_name(name: str) -> str | bytes:
    """Encode a name for ``getaddrinfo``, which for a text imports the slow module for international names."""
    return name.encode("ascii") if name.isascii() else name


def bind_listeners(address: str | None, port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        addresses = socket.getaddrinfo(
            encoded_name(address) if address else None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listeners = []
        for family, kind, protocol, _, socket_address in addresses:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # or it would take the port of the IPv4 address, too
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(socket_address)
            listener.listen(BACKLOG)
            listeners.append(listener)
        stack.pop_all()
        return listeners
