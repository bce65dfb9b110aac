"""Whether this node can connect to every other one over TCP, and is reachable there, as its ranks will need it.

All nodes do this at the same time and independently: each listens, and tries the others until they answer or its time
is up. A node that starts late refuses connections at first and is tried again.

Every connection is a generator over non-blocking sockets, because importing asyncio would take more processor time than
all of this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Generator

from ..node import own_node
from ..wire import LARGE_LOST, UNRESOLVED, Json, in_thread, say

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
WHOLE = "whole"
BACKLOG = 256
NEVER = float("inf")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")
    Steps = Generator[tuple[socket.socket | None, int, float], bool, T]
    """Yields a socket, the event that is waited for, and until when; is sent whether it has come."""


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
    with contextlib.closing(Loop()) as loop:
        return ReachCheck(loop, nodes, me, hello, answer, LIMIT_S + slow_s).run()


class Loop:
    """Runs generators of ``Steps``."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()  # its data is the generator that waits for the socket
        self.waits: dict[Steps[None], socket.socket | None] = {}
        self.until: dict[Steps[None], float] = {}  # of those that don't wait for ever

    def begin(self, steps: Steps[None]) -> None:
        self._resume(steps, None)

    def _resume(self, steps: Steps[None], is_ready: bool | None) -> None:
        self.until.pop(steps, None)
        if (one := self.waits.pop(steps, None)) is not None:
            self.selector.unregister(one)  # before the generator may close it
        with contextlib.suppress(StopIteration):
            one, event, until = next(steps) if is_ready is None else steps.send(is_ready)
            self.waits[steps] = one
            if until < NEVER:
                self.until[steps] = until
            if one is not None:
                self.selector.register(one, event, steps)

    def step(self) -> None:
        """Resume what has its event, or has waited long enough."""
        for key, _ in self.selector.select(POLL_S):
            self._resume(key.data, True)
        now = time.monotonic()
        for steps in [steps for steps, until in self.until.items() if until <= now]:
            self._resume(steps, False)

    def run_while(self, wanted: Callable[[], bool], longest_s: float = NEVER) -> None:
        until = time.monotonic() + longest_s
        while wanted() and time.monotonic() < until:
            self.step()

    def close(self) -> None:
        for steps in [*self.waits]:
            steps.close()
        self.selector.close()


class ReachCheck:
    """The check on one node: its listeners and its connections to the others."""

    def __init__(self, loop: Loop, nodes: list[Json], me: int, hello: str, answer: str, limit_s: float) -> None:
        self.loop, self.nodes, self.me, self.hello, self.answer, self.limit_s = loop, nodes, me, hello, answer, limit_s
        self.others = [*range(me + 1, len(nodes)), *range(me)]  # each node starts with another one
        # connections that haven't arrived yet
        self.awaited = {(other, port) for other in self.others for port in nodes[me]["ports"]}
        self.retry_s = min(RETRY_S, RETRY_OF_ONE_S * len(nodes))
        self.known: dict[str, list[tuple[int, object]] | Exception | None] = {}  # of each address
        self.greeted = 0  # connections that the other side will close
        self.dialling = 0
        self.failed: list[Json] = []

    def run(self) -> Json:
        taken = self.listen()
        for other in self.others:
            for port in self.nodes[other]["ports"]:
                self.loop.run_while(lambda: self.dialling >= AT_ONCE)
                self.loop.begin(self.dial(other, port))
        self.loop.run_while(lambda: self.dialling > 0)
        # nodes that start late can still connect; then the other side closes first, so that the port is free at once
        for wanted in (lambda: bool(self.awaited), lambda: self.greeted > 0):
            self.loop.run_while(wanted, CONNECT_S + 5 * RETRY_S)
        self.loop.run_while(lambda: self.places(self.nodes[self.me]["address"]) is None)  # torchrun looks it up, too
        own = self.places(self.nodes[self.me]["address"])
        if isinstance(own, Exception):
            self.failed += [
                {"node": self.me, "port": one, "why": unresolved(own)} for one in self.nodes[self.me]["ports"]
            ]
        return {"taken": taken, "failed": self.failed}

    def places(self, address: str) -> list[tuple[int, object]] | Exception | None:
        """Return families and addresses, or why there is none; None: not known yet.

        Names are resolved in threads, because a name server may not answer for long.
        """
        if address not in self.known:
            self.known[address] = None
            try:
                self.known[address] = resolve(address.encode("ascii"), socket.AI_NUMERICHOST)
            except (OSError, UnicodeError):  # it is a name
                in_thread(self.look_up, address, on_error=lambda _: None)
        return self.known[address]

    def look_up(self, address: str) -> None:
        try:
            self.known[address] = resolve(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
            self.known[address] = error

    # ------------------------------------------------------------------------------------ connections of the others
    def listen(self) -> dict[int, str]:
        """Listen on this node's ports; return those that other programs hold, with the system's reasons."""
        taken: dict[int, str] = {}
        for port in self.nodes[self.me]["ports"]:
            try:
                for listener in open_listeners(self.nodes[self.me]["address"], port):
                    self.loop.begin(self.accept(listener))
            except OSError as error:
                taken[port] = error.strerror or str(error)
                self.awaited -= {(other, port) for other in self.others}
        return taken

    def accept(self, listener: socket.socket) -> Steps[None]:
        with listener:
            while True:
                yield listener, selectors.EVENT_READ, NEVER
                with contextlib.suppress(OSError):  # the other side has closed it
                    self.loop.begin(self.serve(listener.accept()[0]))

    def serve(self, connection: socket.socket) -> Steps[None]:
        """Answer one connection, which the other side closes; other greetings get no answer."""
        with connection:
            connection.setblocking(False)
            word, _, node = (yield from read_line(connection, NEVER)).partition(" ")
            if word != self.hello or not node.isdecimal():
                return
            with contextlib.suppress(OSError):
                connection.send(f"{self.answer} {self.me}\n".encode())
                self.awaited.discard((int(node), int(connection.getsockname()[1])))
            self.greeted += 1
            try:
                more = yield from read_until(connection, NEVER, lambda data: len(data) >= len(LARGE))
                if len(more) == len(LARGE):
                    with contextlib.suppress(OSError):
                        connection.send(f"{WHOLE}\n".encode())
                    yield from read_until(connection, NEVER, bool)
            finally:
                self.greeted -= 1

    # -------------------------------------------------------------------------------------- connections to the others
    def dial(self, node: int, port: int) -> Steps[None]:
        """Try one port of another node until it answers or its time is up; note why it can't be reached."""
        self.dialling += 1
        until, silent = time.monotonic() + self.limit_s, 0
        while True:
            began = time.monotonic()
            why, is_final = yield from self.attempt(node, port, until)
            now = time.monotonic()
            if why is None:
                why = f"timed out after {TRIES * CONNECT_S:g} s"
                silent += now - began < CONNECT_S + LATE_S
                is_final = silent == TRIES
            if not why or is_final or now + self.retry_s >= until:
                break
            yield None, 0, now + self.retry_s
        self.dialling -= 1
        self.failed += [{"node": node, "port": port, "why": why}] if why else []

    def attempt(self, node: int, port: int, until: float) -> Steps[tuple[str | None, bool]]:
        """Return why one attempt failed ('': it didn't; None: no answer came), and whether others would fail, too."""
        late, refused, code = time.monotonic() + CONNECT_S, False, 0
        while (places := self.places(self.nodes[node]["address"])) is None:
            if time.monotonic() >= late:
                return None, False
            yield None, 0, 0.0
        if isinstance(places, Exception):
            return unresolved(places), True
        for family, place in places:
            with contextlib.ExitStack() as stack:
                try:
                    one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    one.setblocking(False)
                    code = one.connect_ex((place[0], port, *place[2:]))  # type: ignore[index]  # [2:]: IPv6's scope
                    if code == errno.EINPROGRESS:
                        if not (yield one, selectors.EVENT_WRITE, late):
                            return None, False
                        code = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                except OSError as error:
                    code = error.errno or errno.EIO
                if not code:
                    return (yield from self.greet(one, node, port, max(until, late - CONNECT_S + RETRY_S)))
                refused |= code == errno.ECONNREFUSED  # it may listen soon, whatever its other addresses answer
        return ("refused", False) if refused else (os.strerror(code), True)

    def greet(self, one: socket.socket, node: int, port: int, until: float) -> Steps[tuple[str, bool]]:
        """Check that the expected node answers, and that it gets more than one packet.

        If routers drop large packets and their error messages are lost, connections open but the first gradients never
        arrive.
        """
        with contextlib.suppress(OSError):
            one.send(f"{self.hello} {self.me}\n".encode())
        word, _, number = (yield from read_line(one, until)).partition(" ")
        if word != self.answer:
            return FOREIGN, False
        if number != str(node):
            return f"node {number} answers there", False
        if node not in self.others[:LARGE_TO] or port != self.nodes[node]["ports"][0]:
            return "", True
        sent_at = time.monotonic()
        with contextlib.suppress(OSError):  # the other side has closed it
            one.send(LARGE)
        is_whole = (yield from read_line(one, until)) == WHOLE
        return "" if is_whole or time.monotonic() - sent_at < LARGE_S else LARGE_LOST, True


def read_until(one: socket.socket, until: float, is_enough: Callable[[bytes], bool]) -> Steps[bytes]:
    """Return what has come once that is enough, or when the other side closes, or at ``until``."""
    data = b""
    while not is_enough(data) and (yield one, selectors.EVENT_READ, until):
        try:
            more = one.recv(len(LARGE))
        except BlockingIOError:
            continue
        except OSError:
            more = b""
        if not more:
            break
        data += more
    return data


def read_line(one: socket.socket, until: float) -> Steps[str]:
    data = yield from read_until(one, until, lambda data: b"\n" in data or len(data) > LINE_BYTES)
    return data.decode("ascii", "replace").strip()


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
