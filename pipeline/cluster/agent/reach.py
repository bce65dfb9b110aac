"""Whether this node can connect to every other over TCP, and is the one that answers there, as its ranks will need it.

All nodes do this at the same time, each on its own: it listens, and tries the others until they answer or its time is
up. Nothing tells a node when the others begin, so one whose answer is late is refused at first and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .node import own_node
from .wire import Json, say

CONNECT_S = 2.0  # the first SYN and one more after a second
LIMIT_S = 8.0  # for the others to listen: as far as the commands to all hosts may be apart
TRIES = 2  # that time out: on a host that is busy an answer may have come, and nobody had a moment to look
LATE_S = 0.3  # a time limit that is noticed later says that this process had no processor: it doesn't count
RETRY_S = 0.1
BACKLOG = 256
AT_ONCE = 200  # connections of one node: a process often may have no more than 1,024 open files
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Check:
    """What one node hears of the others. ``hello`` is what a node says, ``answer`` what only a node of this check knows
    to say to it; then its number follows."""

    me: int
    hello: str
    answer: str
    awaited: set[tuple[int, int]]  # (node, own port) that has not been connected yet
    limit_s: float
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; whoever says something else gets nothing."""
        with contextlib.suppress(OSError, ValueError):
            word, node = (await reader.readline()).decode("ascii", "replace").split()
            if word == self.hello:
                writer.write(f"{self.answer} {self.me}\n".encode())
                await writer.drain()
                self.awaited.discard((int(node), int(writer.get_extra_info("sockname")[1])))
                if not self.awaited:
                    self.complete.set()
                await reader.read()  # the other closes first, so the port is free again at once
        writer.close()

    async def tried(self, slots: asyncio.Semaphore, node: int, address: str, port: int) -> Json:
        async with slots:
            return {"node": node, "port": port, "why": await self.connect(node, address, port)}

    async def connect(self, node: int, address: str, port: int) -> str:
        """Why the node can't be reached at this port; empty: it can."""
        why, silent = "", 0
        until = asyncio.get_running_loop().time() + self.limit_s
        while (began := asyncio.get_running_loop().time()) < until:
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
            except (asyncio.TimeoutError, TimeoutError):  # noqa: UP041  (they differ before Python 3.11)
                why = f"timed out after {TRIES * CONNECT_S:g} s"
                silent += asyncio.get_running_loop().time() - began < CONNECT_S + LATE_S
                if silent == TRIES:
                    return why
            except ConnectionRefusedError:
                why = "refused"
            except (socket.gaierror, UnicodeError) as error:
                return unresolved(error)
            except OSError as error:
                return error.strerror or str(error)
            else:
                why = await self.recognise(node, reader, writer, until)
                if not why:
                    return ""
            await asyncio.sleep(RETRY_S)
        return why

    async def recognise(
        self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, until: float
    ) -> str:
        """Whether it is the node that answers; else what does."""
        said = b""
        with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):
            writer.write(f"{self.hello} {self.me}\n".encode())
            left_s = until - asyncio.get_running_loop().time()
            said = await asyncio.wait_for(reader.readline(), max(left_s, RETRY_S))
        writer.close()
        word, _, number = said.decode("ascii", "replace").strip().partition(" ")
        if word != self.answer:
            return "another program answers there"
        return "" if number == str(node) else f"node {number} answers there"


def reach(request: Json) -> None:
    """Answers with what this node could not listen on, and what it could not reach."""
    me = [node["identity"] for node in request["nodes"]].index(own_node(request)["identity"])
    say(**asyncio.run(check(request["nodes"], me, request["hello"], request["answer"], request["slow_s"])))


async def check(nodes: list[Json], me: int, hello: str, answer: str, slow_s: float = 0.0) -> Json:
    """Listen at the own ports and connect to those of all others, at once. ``slow_s`` is what a login may take."""
    others = [
        *range(me + 1, len(nodes)),
        *range(me),
    ]  # each begins with another one, or all would ask the first at once
    awaited = {(other, port) for other in others for port in nodes[me]["ports"]}
    one = Check(me, hello, answer, awaited, LIMIT_S + slow_s)
    servers, taken = [], {}
    for port in nodes[me]["ports"]:
        try:
            servers.append(await listen(one.serve, nodes[me]["address"], port))
        except OSError as error:
            taken[port] = error.strerror or str(error)
            one.awaited -= {(other, port) for other in others}
    targets = [(other, nodes[other]["address"], port) for other in others for port in nodes[other]["ports"]]
    slots = asyncio.Semaphore(AT_ONCE)
    tried = await asyncio.gather(*(one.tried(slots, *target) for target in targets))
    if one.awaited:  # a node that is late may still be refused by nobody
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(one.complete.wait(), CONNECT_S + 5 * RETRY_S)
    for server in servers:
        server.close()
    own = await lookup(nodes[me]["address"])  # torchrun looks it up here too
    tried += [{"node": me, "port": port, "why": own} for port in nodes[me]["ports"]]
    return {"taken": taken, "failed": [result for result in tried if result["why"]]}


async def lookup(address: str) -> str:
    """Why this node can't look up an address; empty: it can."""
    try:
        await asyncio.get_running_loop().getaddrinfo(address, None)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        return unresolved(error)
    return ""


def unresolved(error: Exception) -> str:
    """The controller puts the address between (``pipeline/cluster/reachability.py``)."""
    return f"can't resolve it: {getattr(error, 'strerror', None) or error}"


async def listen(serve: Serve, address: str, port: int) -> asyncio.AbstractServer:
    """At the node's address; at all of them where it is none of its own interfaces (behind a NAT), or is none at all,
    which those who connect will tell. Raises OSError: another program has the port."""
    try:
        return await asyncio.start_server(serve, address, port, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise
        return await asyncio.start_server(serve, None, port, backlog=BACKLOG)
