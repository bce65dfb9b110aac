"""Whether this node can connect to every other one over TCP, and is reachable there: all nodes try at the same time.

A node that starts late is tried again. Connections have threads: importing asyncio would take longer than all of this.
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

CONNECT_S = 2.0  # the first SYN and one more after a second
LIMIT_S = 8.0  # until the others listen: the commands to all hosts start within this time
TRIES = 2  # timeouts until a node counts as unreachable: a busy host may have answered unnoticed
LATE_S = 0.3  # a timeout that is noticed later doesn't count: this process had no processor
RETRY_S = 0.1
RETRY_OF_ONE_S = 0.002  # few nodes retry sooner, because they start nearly at once
AT_ONCE = 200  # connections of one node: many systems allow a process 1,024 open files
LINE_BYTES = 1024  # the longest greeting or answer
LARGE = b"." * 12_000  # more than the largest packet of any network in use, 9,000 bytes
LARGE_TO = 4  # nodes that get it from one node: the same switches and tunnels lead to the others
LARGE_S = 1.5  # a node that closes the connection sooner proves nothing
FOREIGN = "another program answers there"
WHOLE = "whole"
BACKLOG = 256


def reach(request: ReachRequest) -> None:
    """Answer with the ports that this node could not listen on, and the nodes that it could not reach."""
    me = own_number([node.identity for node in request.nodes], request.access)
    say(**ReachCheck(request.nodes, me, request.hello, request.answer, LIMIT_S + request.slow_s).run())


class ReachCheck:
    def __init__(self, nodes: Sequence[ListeningNode], me: int, hello: str, answer: str, limit_s: float) -> None:
        self.nodes, self.me, self.hello, self.answer, self.limit_s = nodes, me, hello, answer, limit_s
        self.others = [*range(me + 1, len(nodes)), *range(me)]  # each node starts with another one
        self.retry_s = min(RETRY_S, RETRY_OF_ONE_S * len(nodes))
        self.changed = threading.Condition()  # of the two that follow
        self.awaited = {(other, port) for other in self.others for port in nodes[me].ports}  # not arrived yet
        self.greeted = 0  # connections that the other side will close
        self.failed: list[Json] = []
        self.errors: list[str] = []  # of threads

    def run(self) -> Json:
        listeners, taken = self.listen()
        targets = [(other, port) for other in self.others for port in self.nodes[other].ports]
        left = iter(targets)
        # a thread for each port, because one that refuses is tried until ``limit_s``
        dialling = [in_thread(self.dial_all, left, on_error=self.errors.append) for _ in targets[:AT_ONCE]]
        for thread in dialling:
            thread.join()
        # nodes that start late can still connect; then the other side closes first, so that the port is free at once
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
        """Answer one connection, which the other side closes; other greetings get no answer."""
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
                if len(read_until(connection, lambda data: len(data) >= len(LARGE))) == len(LARGE):
                    connection.sendall(f"{WHOLE}\n".encode())
                    read_until(connection, bool)
            with self.changed:
                self.greeted -= 1
                self.changed.notify()

    # -------------------------------------------------------------------------------------- connections to the others
    def dial_all(self, targets: Iterator[tuple[int, int]]) -> None:  # shared by the threads
        for node, port in targets:
            if why := self.dial(node, port):
                self.failed.append({"node": node, "port": port, "why": why})

    def dial(self, node: int, port: int) -> str:
        """Try one port of another node until it answers or its time is up; return why it can't be reached, or ''."""
        until, silent = time.monotonic() + self.limit_s, 0
        while True:
            began = time.monotonic()
            why, is_final = self.attempt(node, port, until)
            now = time.monotonic()
            if why is None:
                why = f"timed out after {TRIES * CONNECT_S:g} s"
                silent += now - began < CONNECT_S + LATE_S
                is_final = silent == TRIES
            if not why or is_final or now + self.retry_s >= until:
                return why
            time.sleep(self.retry_s)

    def attempt(self, node: int, port: int, until: float) -> tuple[str | None, bool]:
        """Return why one attempt failed ('': it didn't; None: no answer came), and whether others would fail, too."""
        try:
            places = resolve(self.nodes[node].address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
            return unresolved(error), True
        began, refused, why = time.monotonic(), False, ""
        for family, place in places:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                try:
                    one.settimeout(max(0.001, began + CONNECT_S - time.monotonic()))
                    one.connect((place[0], port, *place[2:]))  # [2:]: IPv6's scope
                except OSError as error:
                    if error.errno is None:  # the timeout of this socket
                        return None, False
                    why = os.strerror(error.errno)
                    refused |= error.errno == errno.ECONNREFUSED  # it may listen soon, whatever its other addresses say
                else:
                    return self.greet(one, node, port, max(until, began + RETRY_S))
        return ("refused", False) if refused else (why, True)

    def greet(self, one: socket.socket, node: int, port: int, until: float) -> tuple[str, bool]:
        """Check that the right node answers, and gets more than one packet, as gradients do."""
        with contextlib.suppress(OSError):  # the other side has closed it
            one.sendall(f"{self.hello} {self.me}\n".encode())
        word, _, number = read_line(one, until).partition(" ")
        if word != self.answer:
            return FOREIGN, False
        if number != str(node):
            return f"node {number} answers there", False
        if node not in self.others[:LARGE_TO] or port != self.nodes[node].ports[0]:
            return "", True
        sent_at = time.monotonic()
        with contextlib.suppress(OSError):
            one.sendall(LARGE)
        is_whole = read_line(one, until) == WHOLE
        return "" if is_whole or time.monotonic() - sent_at < LARGE_S else LARGE_LOST, True


def read_until(one: socket.socket, is_enough: Callable[[bytes], bool], until: float | None = None) -> bytes:
    """Return what has come once that is enough, or when the other side closes, or at ``until`` (None: never)."""
    data = b""
    with contextlib.suppress(OSError):  # also a timeout
        while not is_enough(data):
            one.settimeout(None if until is None else max(0.001, until - time.monotonic()))
            more = one.recv(len(LARGE))
            if not more:
                break
            data += more
    return data


def read_line(one: socket.socket, until: float | None = None) -> str:
    data = read_until(one, lambda data: b"\n" in data or len(data) > LINE_BYTES, until)
    return data.decode("ascii", "replace").strip()


def resolve(address: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Return families and addresses. Raises OSError, UnicodeError."""
    answers = socket.getaddrinfo(encoded_name(address), 0, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in answers]


def unresolved(error: Exception) -> str:
    """Return why an address can't be resolved; pipeline/cluster/networks.py adds the address."""
    return f"{UNRESOLVED}{getattr(error, 'strerror', None) or error}"


def open_listeners(address: str, port: int) -> list[socket.socket]:
    """Listen at the node's address, or at all if it isn't one of its own (NAT). Raises OSError: the port is taken."""
    try:
        return bind_listeners(address, port)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return bind_listeners(None, port)


def encoded_name(name: str) -> str | bytes:
    """Encode a name for ``getaddrinfo``, which would import slow modules for a text."""
    return name.encode("ascii") if name.isascii() else name


def bind_listeners(address: str | None, port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as stack:
        addresses = socket.getaddrinfo(
            encoded_name(address) if address else None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listeners = []
        for family, kind, number, _, place in addresses:
            listener = stack.enter_context(socket.socket(family, kind, number))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # or it would take the port of the IPv4 address, too
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(place)
            listener.listen(BACKLOG)
            listeners.append(listener)
        stack.pop_all()
        return listeners
