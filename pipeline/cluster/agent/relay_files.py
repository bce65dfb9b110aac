"""Files of a folder from the node that has them to those that lack some: the bytes go as a data pack's do
(``relay``)."""

# Requests carry paths as text: os.path all the way.
# ruff: noqa: PTH103, PTH105, PTH106, PTH111, PTH118, PTH120, PTH207
from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator

from .relay import Node, UnservedError, serving, this_node, told_of
from .trees import PARTIAL
from .wire import Json, say

_RELAYED = "relayed-"


def relay_files(request: Json) -> None:
    """Each node has its own ``place``; the first one has all of the files. Those that come take the place of what lies
    there; answers with why no other node could give them, where that is so."""
    node = this_node(request)
    try:
        asyncio.run(told_of(node, part_of_files(node)))
        say(placed=True)
    except UnservedError as error:
        say(unserved=str(error))


async def part_of_files(node: Node) -> str:
    """Take the files unless this is the node that has them, and serve the others. Raises UnservedError, OSError."""
    place: str = os.path.expanduser(node.own["place"])
    async with serving(node):
        if not node.own["sources"]:
            node.content.open(place, complete=True)
        else:
            with beside(place) as temporary:
                node.content.open(temporary, complete=False)
                await node.take()
                node.content.check()
                for file in node.content.files:
                    target = os.path.join(place, file["name"])
                    os.makedirs(os.path.dirname(target), exist_ok=True)
                    os.replace(os.path.join(temporary, file["name"]), target)
                node.content.folder = place
    return place


@contextlib.contextmanager
def beside(place: str) -> Iterator[str]:
    """A folder on the same disk that counts as no part of ``place``; what an earlier one has left is removed."""
    partial = os.path.join(place, PARTIAL)
    os.makedirs(partial, exist_ok=True)
    for left in glob.glob(os.path.join(glob.escape(partial), f"{_RELAYED}*")):
        shutil.rmtree(left, ignore_errors=True)
    temporary = tempfile.mkdtemp(prefix=_RELAYED, dir=partial)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # rsync keeps something there
            os.rmdir(partial)
