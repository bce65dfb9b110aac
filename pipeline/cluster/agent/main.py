"""The node agent: what any launcher can run on a host, of the standard library alone (Python 3.9 or newer).

It is never installed. A launcher sends the sources themselves, then the request, then an
optional tar, into the standard input of ``python3 -c BOOTSTRAP``: so no value ever reaches a remote shell
and controller and node cannot differ in version. Answers are lines ``@paceline TOKEN {json}`` with the token of the
request, which the controller made for it; anything else on stdout is a login shell's chatter.

``start`` leaves a supervisor behind that owns torchrun. It merges the ranks' output into one log, keeps a
lease, writes ``exit.json`` when everything of this node has ended, and kills exactly the processes that
carry its mark: ``PACELINE_NODE=<run id>:<node rank>`` in their environment, which torchrun's workers
inherit (so a SIGKILLed torchrun's orphans are found too), and whoever shares a session with one of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tarfile
import zlib
from importlib import import_module

from . import wire
from .reasons import reason
from .wire import say

COMMANDS = {
    "probe": "probe",
    "examine": "checks",
    "shared": "checks",
    "reach": "reach",
    "start": "supervisor",
    "job": "job",
    "follow": "follow",
    "hold": "claims",
    "stop": "registry",
    "status": "registry",
    "collect": "staging",
    "clean": "staging",
    "clear": "left",
    "put_pack": "staging",
    "relay_pack": "relay",
    "find_environment": "environments",
    "make_environment": "environments",
    "compare_trees": "trees",
    "make_places": "trees",
    "mesh_offer": "mesh",
    "mesh_accept": "mesh",
    "mesh_try": "logins",
    "mesh_undo": "mesh",
}
"""Command → the module with the function of that name: what a command doesn't use isn't compiled for it."""


def main() -> int:
    """Read one request from stdin and answer it. Exit code 0, or 1 with ``{"error": …}`` as the answer."""
    size = int(sys.stdin.buffer.readline())
    request = json.loads(zlib.decompress(sys.stdin.buffer.read(size)))
    wire.token = request.pop("token")
    try:
        module = COMMANDS[request["do"]]
        getattr(import_module(f".{module}", __package__), request["do"])(request)
    except (SystemExit, OSError, tarfile.TarError) as error:
        with contextlib.suppress(OSError):
            say(error=reason(error))
        return 1
    return 0
