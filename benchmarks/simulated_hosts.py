"""Plays all hosts of a cluster in one process, for start.py: each connection of simulated_ssh.c is a coroutine.

    python benchmarks/simulated_hosts.py SOCKET

A host answers what the node agent would: facts like this computer's under its own name, every other host is reached,
a start that begins at once, a beat each second, and an end when it is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from functools import lru_cache
from typing import Any

from pipeline.cluster.launchers.transport.payload import BOOTSTRAP, message

LOGIN_S = 0.2  # until ssh has let somebody in
Json = dict[str, Any]


@lru_cache(maxsize=8)
def read_once(data: bytes) -> Json:
    """A request, which all hosts of a command get alike: a host of its own reads one, this process would read the parts
    of all nodes as often as there are nodes."""
    value: Json = json.loads(zlib.decompress(data))
    return value


class PlayedHosts:
    def __init__(self) -> None:
        self.facts: Json = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            host = (await reader.readline()).decode().strip()
            await asyncio.sleep(LOGIN_S)
            request = await self.request(reader, with_source=True)
            while request is not None:
                await self.answer(host, request, reader, writer)
                request = await self.request(reader) if request.get("more") else None
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader, *, with_source: bool = False) -> Json | None:
        """The next one; None: the command was no agent's, or the controller has hung up.

        ``with_source``: it follows the agent's source.
        """
        while line := await reader.readline():
            if line.strip().isdigit():
                data = await reader.readexactly(int(line))
                if not with_source:
                    return read_once(data)
                with_source = False
        return None

    async def answer(
        self, host: str, request: Json, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        def say(**fields: Any) -> None:
            writer.write(f"\n@paceline {request['token']} {json.dumps(fields)}\n".encode())

        number = int(host.removeprefix("host"))
        if request["do"] == "probe":
            say(**self.probed(number, request))
        elif request["do"] == "reach":
            say(taken={}, failed=[])
        elif request["do"] == "start":
            while await reader.read(1 << 16):
                pass
            say(pid=number, torchrun=number, unix_time=time.time())
        elif request["do"] == "follow":
            await self.follow(number, reader, say)
        else:
            say(left=[], cleaned=True)
        await writer.drain()

    def probed(self, number: int, request: Json) -> Json:
        """This computer's answer as another one would give it."""
        if not self.facts:
            asked = message({**request, "local": True, "writes": False}, "f00d")
            done = subprocess.run([sys.executable, "-E", "-c", BOOTSTRAP], input=asked, capture_output=True, check=True)
            self.facts = json.loads(done.stdout.partition(b"@paceline f00d ")[2])
        address = f"10.{number // 65536}.{number // 256 % 256}.{number % 256 + 1}"
        text = json.dumps(self.facts).replace(self.facts["hostname"], f"host{number}")
        return {
            **json.loads(text),
            "hostname": f"host{number}",
            "identity": f"host{number} {address}:22 uid 0",
            "address": address,
            "interface": "eth0",
            "machine": f"machine {number}",
            "ssh_address": address,
            "interfaces": {address: "eth0", "127.0.0.1": "lo"},
            "times": {"host_began": time.time(), "host_ended": time.time()},
        }

    async def follow(self, number: int, reader: asyncio.StreamReader, say: Any) -> None:
        told = asyncio.ensure_future(reader.readline())
        while True:
            done, _ = await asyncio.wait({told}, timeout=1.0)
            if done:
                if told.result().strip() in (b"stop", b""):
                    break
                told = asyncio.ensure_future(reader.readline())
            row = {"rank": number, "pid": 1, "step": 0, "phase": 0, "moves": 0, "for_s": 0.0, "collectives": 0}
            say(beat=time.time(), ranks=[{**row, "own_s": 0.0}], saved=0)
        say(exit={"code": 0, "reason": "stopped", "errors": [], "tail": []}, now=time.time())


async def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server = await asyncio.start_unix_server(PlayedHosts().serve, sys.argv[1], backlog=4096, limit=1 << 20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    asyncio.run(main())
