"""The entry of the node agent: reads one request from stdin, and calls the function that answers it.

A launcher runs ``python3 -c BOOTSTRAP`` on the host. Sources, request and perhaps a tar follow on stdin, so that no
value has to be quoted for a remote shell. Answers are lines ``@paceline TOKEN {json}`` on stdout. Other lines there,
such as the greeting of a login shell, are ignored.
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
    """Answer a request, with an error line if that fails. Return the exit code of this process."""
    module, _, function = HANDLERS[type(request)].partition(":")
    try:
        getattr(import_module(f".{module}", __package__), function)(request)
    except (SystemExit, OSError, RuntimeError) as error:
        # "can't start new thread" is a RuntimeError that the user can fix; all others are defects, shown with traceback
        if isinstance(error, RuntimeError) and not is_process_limit(error):
            raise
        with contextlib.suppress(OSError):  # the controller is gone
            say(error=reason(error))
        return 1
    return 0
