"""A data pack from the node that has it to those that lack it, over TCP: the controller sends one copy in all.

All nodes are asked at once, each on its own. Each listens, and connects to its sources: the node above it in a tree,
and the first one, should that fail. What a node has it passes on while the rest is still coming. Who connects proves
that it knows the secret of this request, which came over ssh and never crosses the network itself. The pack is put in
place when its files have the digests that the controller told, over ssh too; so nobody on the way can have changed it.
"""

# Requests carry paths as text: os.path all the way. asyncio's TimeoutError is another one before Python 3.11.
# ruff: noqa: PTH118, PTH123, UP041
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import IO, Any

from . import reach
from .addresses import listening
from .node import own_node
from .staging import holds_pack, pack_folder, staged
from .wire import Json, say

BLOCK_BYTES = 1 << 18
STALL_S = 10.0  # without a byte, then another source is asked
HANDSHAKE_S = 5.0
TELL_S = 1.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class UnservedError(Exception):
    """No source could give this node the pack; the text says why."""


class Content:
    """The files of a pack as one row of bytes, of which the first ``have`` are here."""

    def __init__(self, files: list[Json]) -> None:
        self.files = files
        self.total = sum(file["bytes"] for file in files)
        self.have = 0
        self.handles: list[IO[Any]] = []
        self.digests = [hashlib.sha256() for _ in files]
        self.failed = False
        self.news = asyncio.Event()

    def open(self, folder: str, *, complete: bool) -> None:
        """The files in ``folder``: all there, or to be written. Raises OSError."""
        mode = "rb" if complete else "w+b"
        for file in self.files:
            self.handles.append(open(os.path.join(folder, file["name"]), mode, buffering=0))  # noqa: SIM115  (close)
        self.have = self.total if complete else 0

    def close(self) -> None:
        for handle in self.handles:
            handle.close()

    def tell(self, *, failed: bool = False) -> None:
        """Wake who waits for more bytes; ``failed``: there will be none."""
        self.failed = self.failed or failed
        self.news.set()
        self.news = asyncio.Event()

    def place(self, at: int) -> tuple[int, int]:
        """Index of the file that holds byte ``at`` of the row, and where in it."""
        for index, file in enumerate(self.files):
            if at < file["bytes"]:
                return index, at
            at -= file["bytes"]
        raise ValueError("beyond the end")

    def read(self, at: int) -> bytes:
        """Some bytes from ``at`` on, at least one; only of those that are here."""
        index, offset = self.place(at)
        return os.pread(self.handles[index].fileno(), min(BLOCK_BYTES, self.have - at), offset)

    def append(self, data: bytes) -> None:
        """Raises OSError; ValueError where it is more than the files hold."""
        rest = memoryview(data)
        while rest:
            index, offset = self.place(self.have)
            part = rest[: self.files[index]["bytes"] - offset]
            self.handles[index].write(part)
            self.digests[index].update(part)
            self.have += len(part)
            rest = rest[len(part) :]
        self.tell()

    def check(self) -> None:
        """Raises UnservedError: a file isn't what the controller has."""
        for index, file in enumerate(self.files):
            if self.digests[index].hexdigest() != file["sha256"]:
                raise UnservedError(f"{file['name']} came damaged")


@dataclass
class Node:
    """One node's part: it takes from ``sources`` (indices, the first that can), and gives to those that have it among
    theirs. ``limit_s`` is how far apart the nodes may begin."""

    me: int
    nodes: list[Json]
    secret: str
    content: Content
    limit_s: float
    connected: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def proof(self, challenge: bytes, node: int) -> bytes:
        return hmac.new(self.secret.encode(), b"%s %d" % (challenge.strip(), node), "sha256").hexdigest().encode()

    # ------------------------------------------------------------------------------- giving
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: who can't prove itself gets nothing."""
        client = None
        try:
            notice_dead_peers(writer)
            client = await asyncio.wait_for(self.admit(reader, writer), HANDSHAKE_S)
            if client is not None:
                self.connected.add(client)
                await self.pass_on(reader, writer)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()
            if client is not None:
                self.connected.discard(client)
                self.gone.add(client)
                self.content.tell()

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Who it is; None for one that doesn't know the secret."""
        challenge = secrets.token_hex(16).encode()
        writer.write(challenge + b"\n")
        await writer.drain()
        node, _, proof = (await reader.readline()).strip().partition(b" ")
        known = node.isdigit() and hmac.compare_digest(proof, self.proof(challenge, int(node)))
        return int(node) if known else None

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whatever is asked for, until the other side closes; it may never ask, where another source gives it all."""
        while asked := await reader.readline():
            at = int(asked)
            while at < self.content.total:
                while at >= self.content.have:
                    if self.content.failed:
                        return
                    await self.content.news.wait()
                data = self.content.read(at)
                writer.write(data)
                await asyncio.wait_for(writer.drain(), STALL_S)
                at += len(data)

    async def until_all_are_served(self) -> None:
        """Until every node that might ask has come and gone, or hasn't come in time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limit_s
        expected = {number for number, node in enumerate(self.nodes) if self.me in node["sources"]}
        while expected - self.gone and (self.connected or loop.time() < until):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.content.news.wait(), reach.RETRY_S)

    # ------------------------------------------------------------------------------- taking
    async def take(self) -> None:
        """What is missing yet, from the first source that gives it; another one goes on where it broke off. All of them
        hear that this node has come and gone.

        Raises UnservedError, OSError.
        """
        sources = self.nodes[self.me]["sources"]
        attempts = [asyncio.ensure_future(self.connect(self.nodes[source])) for source in sources]
        whys = []
        try:
            for index, source in enumerate(sources):
                try:
                    await self.receive(*await attempts[index])
                    break
                except UnservedError as error:
                    whys.append(f"node {source}: {error}")
            if self.content.have < self.content.total:
                raise UnservedError("; ".join(whys))
            await asyncio.wait(attempts)
        finally:
            for attempt in attempts:
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError, UnservedError):
                    (await attempt)[1].close()

    async def connect(self, node: Json) -> Streams:
        """To one that listens, or will in a moment. Raises UnservedError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limit_s
        while True:
            try:
                there = asyncio.open_connection(node["address"], node["port"], limit=BLOCK_BYTES)
                reader, writer = await asyncio.wait_for(there, reach.CONNECT_S)
                challenge = await asyncio.wait_for(reader.readline(), HANDSHAKE_S)
                writer.write(b"%d %s\n" % (self.me, self.proof(challenge, self.me)))
            except asyncio.TimeoutError:
                raise UnservedError(f"timed out after {reach.CONNECT_S:g} s") from None
            except ConnectionRefusedError:
                if loop.time() >= until:
                    raise UnservedError("refused") from None
            except (OSError, ValueError) as error:
                raise UnservedError(getattr(error, "strerror", None) or str(error)) from error
            else:
                return reader, writer
            await asyncio.sleep(reach.RETRY_S)

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """What is missing yet. Raises UnservedError: the source gave less. OSError: it could not be written."""
        writer.write(b"%d\n" % self.content.have)
        while left := self.content.total - self.content.have:
            try:
                data = await asyncio.wait_for(reader.read(min(BLOCK_BYTES, left)), STALL_S)
            except asyncio.TimeoutError:
                raise UnservedError(f"nothing came for {STALL_S:g} s") from None
            except OSError as error:
                raise UnservedError(error.strerror or str(error)) from error
            if not data:
                raise UnservedError("it closed the connection")
            self.content.append(data)


def notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """A connection to a host that is gone ends after seconds, where the system can do that."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": int(1000 * STALL_S)}
    for name, value in wanted.items():
        with contextlib.suppress(AttributeError, OSError):  # not Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def relay_pack(request: Json) -> None:
    """Answers with where the pack lies, or with why no other node could give it."""
    me = [node["identity"] for node in request["nodes"]].index(own_node(request)["identity"])
    try:
        say(pack_path=asyncio.run(told_of(request, me)))
    except UnservedError as error:
        say(unserved=str(error))


async def told_of(request: Json, me: int) -> str:
    """This node's part, while the controller is told each second how much of the pack is here. Raises as ``part``."""
    content = Content(request["files"])
    limit_s = reach.LIMIT_S + request["slow_s"]
    work = asyncio.ensure_future(part(request, Node(me, request["nodes"], request["secret"], content, limit_s)))
    while not work.done():
        await asyncio.wait({work}, timeout=TELL_S)
        say(received=content.have)
    return work.result()


async def part(request: Json, node: Node) -> str:
    """Take the pack where it isn't here, and serve the others. Where it lies then. Raises UnservedError, OSError."""
    mine, servers = node.nodes[node.me], list[asyncio.AbstractServer]()
    folder = mine["pack_path"] or pack_folder(request)
    with contextlib.suppress(OSError):  # the port was taken meanwhile: the others have another source
        for listener in listening(mine["address"], mine["port"]):
            servers.append(await asyncio.start_server(node.serve, sock=listener))
    try:
        if holds_pack(folder, request["pack_digest"]):
            node.content.open(folder, complete=True)
            if mine["sources"]:  # they wait for this node
                await node.take()
        else:
            with staged(folder) as temporary:
                node.content.open(temporary, complete=False)
                await node.take()
                node.content.check()
        await node.until_all_are_served()
    except BaseException:
        node.content.tell(failed=True)
        await asyncio.sleep(0)  # who waits here is told
        raise
    finally:
        for server in servers:
            server.close()
        node.content.close()
    return folder
