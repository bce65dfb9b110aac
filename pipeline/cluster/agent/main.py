"""The node agent: answers one request of a launcher on a host. It needs Python 3.9 alone, and is never installed.

A launcher runs ``python3 -c BOOTSTRAP``, and sends sources, request and perhaps a tar to its stdin, so that no value
reaches a remote shell. Answers are lines ``@paceline TOKEN {json}``; other output, of a login shell, is ignored.
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
