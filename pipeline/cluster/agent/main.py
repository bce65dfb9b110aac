"""The node agent: runs on a host for any launcher, with the standard library alone (Python 3.9 or newer).

It is never installed. A launcher sends the sources, then the request, then an optional tar, to the standard input of
``python3 -c BOOTSTRAP``. So no value reaches a remote shell, and controller and node have the same version. Answers are
lines ``@paceline TOKEN {json}`` with the request's token; other output is a login shell's and is ignored.

``start`` leaves a supervisor behind, which owns torchrun. It merges the ranks' output into one log, keeps a lease,
writes ``exit.json`` when everything on this node has ended, and kills exactly the processes with its mark
(``PACELINE_NODE=<run id>:<node rank>`` in their environment, which torchrun's workers inherit, so orphans are found
too) and those that share a session with one of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from importlib import import_module
from types import ModuleType

from . import wire
from .wire import Json, is_process_limit, reason, say

COMMANDS = {
    "probe": "host.probe",
    "reach": "host.reach",
    "start": "running.supervisor",
    "job": "running.job",
    "follow": "running.follow",
    "stop": "running.registry",
    "standing": "running.registry",
    "collect": "running.results",
    "clean": "running.folders",
    "remove_folders": "running.folders",
    "put_pack": "running.folders",
    "put_wheels": "running.folders",
    "find_environment": "host.environments",
    "make_environment": "host.environments",
}
"""Command → the module with the function of that name, imported on use."""


def main() -> int:
    """Answer the request on stdin. Exit code 0, or 1 with ``{"error": …}`` as the answer."""
    size = sys.stdin.buffer.readline()
    request: Json = json.loads(zlib.decompress(sys.stdin.buffer.read(int(size))))
    wire.token = request.pop("token")
    return answer(request)


def module_for(request: Json) -> ModuleType:
    return import_module(f".{COMMANDS[request['do']]}", __package__)


def answer(request: Json) -> int:
    """Run the request in this process; return the exit code."""
    try:
        getattr(module_for(request), request["do"])(request)
    except (SystemExit, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_process_limit(error):
            raise
        with contextlib.suppress(OSError):
            say(error=reason(error))
        return 1
    return 0
