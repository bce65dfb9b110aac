"""Whether this node can connect to every other one over TCP, and is reachable there, as its ranks will need it.

All nodes do this at the same time and independently: each listens, and tries the others until they answer or its time
is up. A node that starts late refuses connections at first and is tried again.

One loop over non-blocking sockets, because importing asyncio would take more processor time than all of this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from ..node import own_node
from ..wire import Json, in_thread, say

CONNECT_S = 2.0  # the first SYN and one more after a second
LIMIT_S = 8.0  # until the others listen: the commands to all hosts start within this time
TRIES = 2  # timeouts until a node counts as unreachable: a busy host may have answered unnoticed
LATE_S = 0.3  # a timeout that is noticed later doesn't count: this process had no processor
RETRY_S = 0.1
RETRY_OF_ONE_S = 0.002  # few nodes retry sooner, because they start nearly at once
POLL_S = 0.02  # between two looks at the clock and at the name server's answer
AT_ONCE = 200  # connections of one node: many systems allow a process 1,024 open files
LINE_BYTES = 1024  # the longest greeting or answer
LARGE = b"." * 12_000  # more than the largest packet of any network in use, 9,000 bytes
LARGE_TO = 4  # nodes that get it from one node: the same switches and tunnels lead to the others
LARGE_S = 1.5  # a node that closes the connection sooner proves nothing
FOREIGN = "another program answers there"
LOST = "small packets pass, large ones are lost"
WHOLE = "whole"
UNRESOLVED = "can't resolve it: "
BACKLOG = 256


def reach(request: Json) -> None:
    """Answer with the ports that this node could not listen on, and the nodes that it could not reach."""
    me = [node["identity"] for node in request["nodes"]].index(own_node(request)["identity"])
    say(**check_reach(request["nodes"], me, request["hello"], request["answer"], request["slow_s"]))


def check_reach(nodes: list[Json], me: int, hello: str, answer: str, slow_s: float = 0.0) -> Json:
    """Listen on this node's ports, and connect to the ports of all others at once.

    Args:
        hello: the greeting of a node.
        answer: the reply that only nodes of this check know, followed by the node's number.
        slow_s: seconds that a login may take.
    """
    one = ReachCheck(nodes, me, hello, answer, LIMIT_S + slow_s)
    try:
        return one.run()
    finally:
        one.close()


class ReachCheck:
    """The check on one node: its listeners and its connections to the others."""

    def __init__(self, nodes: list[Json], me: int, hello: str, answer: str, limit_s: float) -> None:
        self.nodes, self.me, self.hello, self.answer, self.limit_s = nodes, me, hello, answer, limit_s
        self.others = [*range(me + 1, len(nodes)), *range(me)]  # each node starts with another one
        self.awaited = {
            (other, port) for other in self.others for port in nodes[me]["ports"]
        }  # connections that haven't arrived yet
        self.retry_s = min(RETRY_S, RETRY_OF_ONE_S * len(nodes))
        self.names = Resolver()
        self.selector = selectors.DefaultSelector()  # its data is what handles an event of the socket
        self.greeted: set[socket.socket] = set()  # connections that the other side will close
        self.active: list[Dial] = []

    def run(self) -> Json:
        taken = self.listen()
        targets = [(other, port) for other in self.others for port in self.nodes[other]["ports"]]
        waiting = [Dial(self, other, port, large=self.gets_large(other, port)) for other, port in reversed(targets)]
        failed: list[Json] = []
        while waiting or self.active:
            while waiting and len(self.active) < AT_ONCE:
                self.active.append(waiting.pop())
                self.active[-1].begin()
            self.step()
            over = [dial for dial in self.active if dial.over]
            self.active = [dial for dial in self.active if not dial.over]
            failed += [{"node": dial.node, "port": dial.port, "why": dial.why} for dial in over if dial.why]
        self.step_while(lambda: bool(self.awaited), CONNECT_S + 5 * RETRY_S)  # nodes that start late can still connect
        self.step_while(
            lambda: bool(self.greeted), CONNECT_S + 5 * RETRY_S
        )  # the other side closes first, so that the port is free at once
        own = self.names.why(self.nodes[self.me]["address"])  # torchrun looks it up here too
        failed += [{"node": self.me, "port": port, "why": own} for port in self.nodes[self.me]["ports"] if own]
        return {"taken": taken, "failed": failed}

    def gets_large(self, other: int, port: int) -> bool:
        return other in self.others[:LARGE_TO] and port == self.nodes[other]["ports"][0]

    def step_while(self, wanted: Callable[[], bool], longest_s: float) -> None:
        until = time.monotonic() + longest_s
        while wanted() and time.monotonic() < until:
            self.step()

    def step(self) -> None:
        """Handle events, or timeouts."""
        for key, _ in self.selector.select(POLL_S):
            if is_open(key.fileobj):  # an event before this one may have closed it
                key.data()
        for dial in self.active:
            dial.look()

    def listen(self) -> dict[int, str]:
        """Listen on this node's ports; return those that other programs hold, with the system's reasons."""
        taken: dict[int, str] = {}
        for port in self.nodes[self.me]["ports"]:
            try:
                listeners = open_listeners(self.nodes[self.me]["address"], port)
            except OSError as error:
                taken[port] = error.strerror or str(error)
                self.awaited -= {(other, port) for other in self.others}
                continue
            for listener in listeners:
                self.watch(listener, selectors.EVENT_READ, partial(self.accept, listener))
        return taken

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other side has closed it
            connection, _ = listener.accept()
            connection.setblocking(False)
            received = bytearray()
            self.watch(connection, selectors.EVENT_READ, lambda: self.serve(connection, received))

    def serve(self, connection: socket.socket, received: bytearray) -> None:
        """Answer one connection, which the other side closes; other greetings get no answer."""
        data = receive_now(connection)
        if data is None:
            return
        received += data
        if not data or len(received) > (len(LARGE) if connection in self.greeted else LINE_BYTES):
            self.leave(connection)
            return
        if connection in self.greeted:
            if len(received) == len(LARGE):
                with contextlib.suppress(OSError):
                    connection.send(f"{WHOLE}\n".encode())
            return
        if b"\n" not in received:
            return
        word, _, node = received.decode("ascii", "replace").strip().partition(" ")
        if word != self.hello or not node.isdecimal():
            self.leave(connection)
            return
        with contextlib.suppress(OSError):
            connection.send(f"{self.answer} {self.me}\n".encode())
            self.awaited.discard((int(node), int(connection.getsockname()[1])))
            self.greeted.add(connection)
            received.clear()

    def watch(self, one: socket.socket, events: int, handle: Callable[[], None]) -> None:
        self.selector.register(one, events, handle)

    def leave(self, one: socket.socket) -> None:
        self.greeted.discard(one)
        self.selector.unregister(one)
        one.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                self.leave(key.fileobj)
        self.selector.close()


class Dial:
    """The attempts to reach one port of another node; ``why`` it can't be reached, '' if it can.

    ``large``: also send more than one packet. If routers drop large packets and their error messages are lost,
    connections open but the first gradients never arrive.
    """

    def __init__(self, check: ReachCheck, node: int, port: int, *, large: bool) -> None:
        self.check, self.node, self.port, self.large = check, node, port, large
        self.address = check.nodes[node]["address"]
        self.why, self.silent, self.over = "", 0, False
        self.socket: socket.socket | None = None
        self.places: list[tuple[int, object]] = []  # family and address that are still to be tried
        self.connected = self.resolved = self.refused = False
        self.until = self.began = self.retry_at = self.sent_at = 0.0

    def begin(self) -> None:
        self.until = time.monotonic() + self.check.limit_s
        self.retry()

    def retry(self) -> None:
        self.began, self.retry_at, self.resolved, self.refused = time.monotonic(), 0.0, False, False
        self.look()

    def look(self) -> None:
        """Handle timeouts: try again, or give up."""
        now = time.monotonic()
        if self.over:
            return
        if self.retry_at:
            if now >= self.retry_at:
                self.retry()
        elif self.connected:
            if now > max(self.until, self.began + RETRY_S):
                self.failed(LOST if self.sent_at else FOREIGN, final=bool(self.sent_at))
        elif now - self.began >= CONNECT_S:
            self.silent += now - self.began < CONNECT_S + LATE_S
            self.failed(f"timed out after {TRIES * CONNECT_S:g} s", final=self.silent == TRIES)
        elif not self.resolved:
            self.look_up()

    def look_up(self) -> None:
        places = self.check.names.places(self.address)
        if places is None:
            return
        self.resolved = True
        if isinstance(places, Exception):
            self.failed(unresolved(places), final=True)
        else:
            self.places = list(places)
            self.connect()

    def connect(self) -> None:
        """Connect to the next address."""
        family, place = self.places.pop(0)
        try:
            self.socket = socket.socket(family, socket.SOCK_STREAM)
            self.socket.setblocking(False)
            code = self.socket.connect_ex((place[0], self.port, *place[2:]))  # type: ignore[index]  # [2:]: IPv6's scope
        except OSError as error:
            code = error.errno or errno.EIO
        if code in (0, errno.EINPROGRESS) and self.socket is not None:
            self.check.watch(self.socket, selectors.EVENT_WRITE, self.greet)
        else:
            self.unconnected(code)

    def unconnected(self, code: int) -> None:
        self.hang_up()
        self.refused |= code == errno.ECONNREFUSED  # it may listen soon, whatever its other addresses answer
        if self.places:
            self.connect()
        elif self.refused:
            self.failed("refused")
        else:
            self.failed(os.strerror(code), final=True)

    def greet(self) -> None:
        """Handle the end of connecting: send the greeting, or note the failure."""
        assert self.socket is not None
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.unconnected(code)
            return
        self.connected, received = True, bytearray()
        with contextlib.suppress(OSError):
            self.socket.send(f"{self.check.hello} {self.check.me}\n".encode())
        self.check.selector.modify(self.socket, selectors.EVENT_READ, lambda: self.recognise(received))

    def recognise(self, received: bytearray) -> None:
        """Check whether the expected node answers; else note what does."""
        assert self.socket is not None
        data = receive_now(self.socket)
        if data is None:
            return
        received += data
        if data and b"\n" not in received and len(received) <= LINE_BYTES:
            return
        if self.sent_at:
            late = time.monotonic() - self.sent_at >= LARGE_S
            self.ended(LOST if late and received != f"{WHOLE}\n".encode() else "")
            return
        word, _, number = received.decode("ascii", "replace").strip().partition(" ")
        if word != self.check.answer:
            self.failed(FOREIGN)
        elif number != str(self.node):
            self.failed(f"node {number} answers there")
        elif self.large:
            self.sent_at = time.monotonic()
            received.clear()
            with contextlib.suppress(OSError):  # the other side has closed it
                self.socket.send(LARGE)
        else:
            self.ended("")

    def ended(self, why: str) -> None:
        self.hang_up()
        self.why, self.over = why, True

    def failed(self, why: str, *, final: bool = False) -> None:
        """Note a failed attempt; try again while there is time, unless it is ``final``."""
        self.hang_up()
        self.why = why
        self.retry_at = time.monotonic() + self.check.retry_s
        self.over = final or self.retry_at >= self.until

    def hang_up(self) -> None:
        if self.socket is not None:
            if self.socket in self.check.selector.get_map():
                self.check.leave(self.socket)
            self.socket.close()
        self.socket, self.connected = None, False


def is_open(one: object) -> bool:
    """False if an earlier event of the same round has closed it."""
    return isinstance(one, socket.socket) and one.fileno() >= 0


def receive_now(one: socket.socket) -> bytes | None:
    """Return the received bytes; b'': the other side has closed; None: nothing yet."""
    try:
        return one.recv(len(LARGE))
    except BlockingIOError:
        return None
    except OSError:
        return b""


class Resolver:
    """Resolves names in threads, because a name server may not answer for long."""

    def __init__(self) -> None:
        self.known: dict[str, list[tuple[int, object]] | Exception | None] = {}

    def places(self, address: str) -> list[tuple[int, object]] | Exception | None:
        """Return families and addresses, or why there is none; None: not known yet."""
        if address not in self.known:
            self.known[address] = None
            try:
                self.known[address] = resolve(address.encode("ascii"), socket.AI_NUMERICHOST)
            except (OSError, UnicodeError):  # it is a name
                in_thread(self._look_up, address, on_error=lambda _: None)
        return self.known[address]

    def _look_up(self, address: str) -> None:
        try:
            self.known[address] = resolve(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
            self.known[address] = error

    def why(self, address: str) -> str:
        """Return why an address can't be resolved; empty if it can."""
        while (resolved := self.places(address)) is None:
            time.sleep(POLL_S)
        return unresolved(resolved) if isinstance(resolved, Exception) else ""


def resolve(address: str | bytes, flags: int = 0) -> list[tuple[int, object]]:
    answers = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=flags)
    return [(family, place) for family, _, _, _, place in answers]


def unresolved(error: Exception) -> str:
    """Return why an address can't be resolved; pipeline/cluster/networks.py adds the address."""
    return f"{UNRESOLVED}{getattr(error, 'strerror', None) or error}"


def open_listeners(address: str, port: int) -> list[socket.socket]:
    """Listen at the node's address. Raises OSError: the port is taken.

    Listens at all addresses if it is not one of its own interfaces (behind a NAT) or doesn't resolve, which connecting
    nodes will report.
    """
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
            listener.setblocking(False)
            listener.bind(place)
            listener.listen(BACKLOG)
            listeners.append(listener)
        stack.pop_all()
        return listeners
