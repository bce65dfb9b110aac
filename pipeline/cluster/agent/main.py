"""The node agent: one standard-library-only file that any launcher can run on a host (Python 3.9 or newer).

It is never installed. A launcher sends the source itself, then one line of JSON (the request), then an
optional tar, into the standard input of ``python3 -c BOOTSTRAP``: so no value ever reaches a remote shell
and controller and node cannot differ in version. Answers are lines ``@paceline {json}``; anything else on
stdout is a login shell's chatter.

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

from .follow import follow
from .probe import probe
from .reasons import reason
from .registry import status, stop
from .staging import clean, collect, put_pack
from .supervisor import start
from .wire import say

COMMANDS = {
    "probe": probe,
    "start": start,
    "follow": follow,
    "stop": stop,
    "status": status,
    "collect": collect,
    "clean": clean,
    "put_pack": put_pack,
}


def main() -> int:
    """Read one request from stdin and answer it. Exit code 0, or 1 with ``{"error": …}`` as the answer."""
    request = json.loads(sys.stdin.buffer.readline())
    sys.stdout.write("\n")  # a login script may have printed something without an end of line
    try:
        COMMANDS[request["do"]](request)
    except (SystemExit, OSError, tarfile.TarError) as error:
        with contextlib.suppress(OSError):
            say(error=reason(error))
        return 1
    return 0
