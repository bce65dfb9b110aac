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
import sys
import zlib
from importlib import import_module
from typing import Any

from . import wire
from .requests import HANDLERS, decode
from .wire import is_process_limit, reason, say


def main() -> int:
    """Answer the request on stdin. Exit code 0, or 1 with ``{"error": …}`` as the answer."""
    size = sys.stdin.buffer.readline()
    request, wire.token = decode(zlib.decompress(sys.stdin.buffer.read(int(size))))
    return answer(request)


def answer(request: Any) -> int:
    module, _, function = HANDLERS[type(request)].partition(":")
    try:
        getattr(import_module(f".{module}", __package__), function)(request)
    except (SystemExit, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_process_limit(error):
            raise
        with contextlib.suppress(OSError):
            say(error=reason(error))
        return 1
    return 0
