"""What goes into the standard input of every remote command: the agent's modules, then one request."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cluster import agent

BOOTSTRAP = (
    "import sys;sys.path=[p for p in sys.path if p];i=sys.stdin.buffer;"
    "exec(compile(i.read(int(i.readline())),'paceline-agent','exec'))"
)
"""The constant program of every remote command: it reads the agent's source, then the request, from stdin.
The working directory leaves sys.path first, or a stray ``json.py`` in someone's home would be imported. Interpreters
run it with ``-E``: PYTHON… variables of a shell don't reach the ranks, so the probe must not see by them either."""

_LOADER = "loader"


@cache
def agent_source() -> bytes:
    """The loader's text, and behind it the call that gives it all other modules of the agent."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in Path(agent.__file__).parent.glob("*.py")}
    loader = texts.pop(_LOADER)
    return f"{loader}\n\nrun({dict(sorted(texts.items()))!r})\n".encode()


def message(request: dict[str, Any]) -> bytes:
    """What goes into the stdin of BOOTSTRAP: length, source, one line of JSON. A tar may follow."""
    source = agent_source()
    return b"%d\n%s%s\n" % (len(source), source, json.dumps(request).encode())
