"""Files from the node that has them to those that lack them, over TCP: the controller sends one copy in all.

All nodes are asked at once, each on its own. Each listens, and connects to its sources: the node above it in a tree,
and the first one, should that fail. What a node has it passes on while the rest is still coming. Who connects proves
that it knows the secret of this request, which came over ssh and never crosses the network itself. What came is put in
place when all files have the digests that the controller told, over ssh too; so nobody on the way can have changed it.
"""

# Requests carry paths as text: os.path all the way. asyncio's TimeoutError is another one before Python 3.11.
# ruff: noqa: PTH101, PTH103, PTH118, PTH120, PTH123, UP041
from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import hmac
import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine
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
    """No source could give this node the files; the text says why."""


class Content:
    """Files below ``folder`` as one row of bytes, of which the first ``have`` are here. Two of them are open at most:
    there may be many."""

    def __init__(self, files: list[Json]) -> None:
        self.files = files
        self.ends = list(itertools.accumulate(file["bytes"] for file in files))
        self.total = self.ends[-1] if files else 0
        self.have = 0
        self.folder = ""
        self.failed = False
        self.news = asyncio.Event()
        self.damaged: list[str] = []
        self._digest = hashlib.sha256()
        self._written: IO[bytes] | None = None
        self._given: tuple[int, IO[bytes]] | None = None

    def open(self, folder: str, *, complete: bool) -> None:
        """The files in ``folder``: all there, or to be written. Raises OSError."""
        self.folder, self.have = folder, self.total if complete else 0
        for file in self.files if not complete else ():
            if not file["bytes"]:
                self._begin(file)

    def close(self) -> None:
        for handle in (self._written, self._given and self._given[1]):
            if handle is not None:
                handle.close()
        self._written = self._given = None

    def tell(self, *, failed: bool = False) -> None:
        """Wake who waits for more bytes; ``failed``: there will be none."""
        self.failed = self.failed or failed
        self.news.set()
        self.news = asyncio.Event()

    def place(self, at: int) -> tuple[int, int]:
        """Index of the file that holds byte ``at`` of the row, and where in it. Raises ValueError: beyond the end."""
        if at >= self.total:
            raise ValueError("beyond the end")
        index = bisect.bisect_right(self.ends, at)
        return index, at - (self.ends[index] - self.files[index]["bytes"])

    def read(self, at: int) -> bytes:
        """Some bytes from ``at`` on, at least one; only of those that are here. Raises OSError; ValueError where the
        file has become shorter."""
        index, offset = self.place(at)
        if self._given is None or self._given[0] != index:
            if self._given is not None:
                self._given[1].close()
                self._given = None
            self._given = index, open(self._path(index), "rb", buffering=0)  # noqa: SIM115  (close)
        wanted = min(BLOCK_BYTES, self.have - at, self.files[index]["bytes"] - offset)
        data = os.pread(self._given[1].fileno(), wanted, offset)
        if not data:
            raise ValueError(f"{self.files[index]['name']} has become shorter")
        return data

    def append(self, data: bytes) -> None:
        """Raises OSError; ValueError where it is more than the files hold."""
        rest = memoryview(data)
        while rest:
            index, offset = self.place(self.have)
            file = self.files[index]
            if offset == 0:
                self._begin(file)
            assert self._written is not None  # begun at its first byte
            part = rest[: file["bytes"] - offset]
            self._written.write(part)
            self._digest.update(part)
            self.have += len(part)
            rest = rest[len(part) :]
            if self.have == self.ends[index] and self._digest.hexdigest() != file["sha256"]:
                self.damaged.append(file["name"])
        self.tell()

    def check(self) -> None:
        """Raises UnservedError: a file isn't what the controller has."""
        if self.damaged:
            raise UnservedError(f"{self.damaged[0]} came damaged")

    def _path(self, index: int) -> str:
        return os.path.join(self.folder, self.files[index]["name"])

    def _begin(self, file: Json) -> None:
        path = os.path.join(self.folder, file["name"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if self._written is not None:
            self._written.close()
        self._written, self._digest = open(path, "wb", buffering=0), hashlib.sha256()  # noqa: SIM115  (close)
        if file.get("executable"):
            os.chmod(path, 0o755)


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

    @property
    def own(self) -> Json:
        """Where it listens, from whom it takes, where its files belong."""
        found: Json = self.nodes[self.me]
        return found

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
    node = this_node(request)
    try:
        say(pack_path=asyncio.run(told_of(node, part(request, node))))
    except UnservedError as error:
        say(unserved=str(error))


def this_node(request: Json) -> Node:
    me = [node["identity"] for node in request["nodes"]].index(own_node(request)["identity"])
    limit_s = reach.LIMIT_S + request["slow_s"]
    return Node(me, request["nodes"], request["secret"], Content(request["files"]), limit_s)


async def told_of(node: Node, its_part: Coroutine[Any, Any, str]) -> str:
    """This node's part, while the controller is told each second how much is here. Raises as the part does."""
    work = asyncio.ensure_future(its_part)
    while not work.done():
        await asyncio.wait({work}, timeout=TELL_S)
        say(received=node.content.have)
    return work.result()


async def part(request: Json, node: Node) -> str:
    """Take the pack where it isn't here, and serve the others. Where it lies then. Raises UnservedError, OSError."""
    folder: str = node.own["pack_path"] or pack_folder(request)
    async with serving(node):
        if holds_pack(folder, request["pack_digest"]):
            node.content.open(folder, complete=True)
            if node.own["sources"]:  # they wait for this node
                await node.take()
        else:
            with staged(folder) as temporary:
                node.content.open(temporary, complete=False)
                for name in request["empty"]:
                    os.makedirs(os.path.join(temporary, name))
                await node.take()
                node.content.check()
            node.content.folder = folder
    return folder


@contextlib.asynccontextmanager
async def serving(node: Node) -> AsyncIterator[None]:
    """Serve what the block brings, and after it until all are served; who waits is told where it fails."""
    servers = list[asyncio.AbstractServer]()
    with contextlib.suppress(OSError):  # the port was taken meanwhile: the others have another source
        for listener in listening(node.own["address"], node.own["port"]):
            servers.append(await asyncio.start_server(node.serve, sock=listener))
    try:
        yield
        await node.until_all_are_served()
    except BaseException:
        node.content.tell(failed=True)
        await asyncio.sleep(0)  # who waits here is told
        raise
    finally:
        for server in servers:
            server.close()
        node.content.close()
