"""What goes into the standard input of every remote command: the agent's modules, then one request."""

from __future__ import annotations

import json
import secrets
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cluster import agent

TOO_OLD = "is too old for the node agent"
NO_PROGRAM = "paceline: no program came on standard input"
TAKEN_FOR_COMMANDS = "paceline: a shell took its standard input for commands"

BOOTSTRAP = (
    "import sys;"
    f"sys.version_info<(3,9)and sys.exit('%s: Python %s {TOO_OLD}'%(sys.executable,sys.version.split()[0]));"
    "sys.path=[p for p in sys.path if p];i=sys.stdin.buffer;"
    "n=next((l for l in iter(i.readline,b'')if l.strip().isdigit()),b'');"
    f"n or sys.exit('{NO_PROGRAM}');"
    "import zlib;exec(compile(zlib.decompress(i.read(int(n))),'paceline-agent','exec'))"
)
"""The constant program of every remote command: it reads the agent's source, then the request, from stdin. Any Python
since 2.7 can compile it, so that one which is too old can say so.
The working directory leaves sys.path first, or a stray ``json.py`` in someone's home would be imported. Interpreters
run it with ``-E``: PYTHON… variables of a shell don't reach the ranks, so the probe must not see by them either."""

# runs the first interpreter that is there, with nothing that a wrong PATH could hide; "~/" is the host's home
_FIND_PYTHON = (
    'b=$1; shift; w=; for p; do case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'q=$(command -v "$p" 2>/dev/null); [ -f "$q" ] && [ -x "$q" ] && exec "$q" -E -c "$b"; '
    'case $p in */*) if [ -d "$p" ]; then w="$w; $p is a folder"; '
    'elif [ -e "$p" ]; then w="$w; $p is not executable"; fi;; esac; done; '
    'echo "paceline: no interpreter $*$w; PATH=$PATH" >&2; exit 127'
)

_PREAMBLE = b"\n" * 16 + f"echo {TAKEN_FOR_COMMANDS}; exit 97\n".encode()
"""What BOOTSTRAP skips. The empty lines are for a login script that reads answers to its questions (``read``), the
command is for a shell that a login script has started in its own place (``exec zsh``): it ends there."""

_LOADER = "loader"


def agent_argv(python: str | None) -> list[str]:
    """The command of an agent on another host. Without a configured interpreter: the controller's, else python3."""
    candidates = [python] if python else [sys.executable, "python3"]
    return ["/bin/sh", "-c", _FIND_PYTHON, "sh", BOOTSTRAP, *candidates]


@cache
def agent_source() -> bytes:
    """The loader's text, and behind it the call that gives it all other modules of the agent; compressed, as every
    command sends it to every host."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in Path(agent.__file__).parent.glob("*.py")}
    loader = texts.pop(_LOADER)
    return zlib.compress(f"{loader}\n\nrun({dict(sorted(texts.items()))!r})\n".encode(), 9)


def new_token() -> str:
    """What the answers to one request carry; nobody who doesn't read the request can know it."""
    return secrets.token_hex(8)


def message(request: dict[str, Any], token: str) -> bytes:
    """What goes into the stdin of BOOTSTRAP: length and source, length and request, both compressed: a request holds
    the parts of all nodes, which hardly differ. A tar may follow."""
    asked = zlib.compress(json.dumps({**request, "token": token}).encode())
    return b"%s%d\n%s" % (opening(), len(asked), asked)


@cache
def opening() -> bytes:
    """How every message begins; an agent that stays gets only what follows."""
    source = agent_source()
    return b"%s%d\n%s" % (_PREAMBLE, len(source), source)
