"""The standard input of every remote command: the agent's modules, then one request."""

from __future__ import annotations

import json
import marshal
import secrets
import sys
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType
from typing import Any

import trainers
from pipeline.cluster import agent
from pipeline.cluster.agent.loader import CONTRACT, PACKAGE, RANKS, path_of
from trainers import contract

_REPOSITORY = Path(trainers.__file__).parents[1]
TOO_OLD = "is too old for the node agent"
NO_PROGRAM = "paceline: no program came on standard input"
TAKEN_FOR_COMMANDS = "paceline: a shell took its standard input for commands"

BOOTSTRAP = (
    "import sys;"
    f"sys.version_info<(3,9)and sys.exit('%s: Python %s {TOO_OLD}'%(sys.executable,sys.version.split()[0]));"
    "sys.path=[p for p in sys.path if p];i=sys.stdin.buffer;"
    "n=next((l for l in iter(i.readline,b'')if l.strip().isdigit()),b'');"
    f"n or sys.exit('{NO_PROGRAM}');"
    "import zlib;t,_,modules=zlib.decompress(i.read(int(n))).partition(b'\\0');exec(compile(t,'paceline-agent','exec'))"
)
"""The constant program of every remote command: it reads the agent's source, then the request, from stdin.

Any Python since 2.7 can compile it, so that one which is too old can say so. It removes the working directory from
sys.path first, or a stray ``json.py`` in a home would be imported. Interpreters run it with ``-E``, because a shell's
PYTHON… variables don't reach the ranks and so must not change the probe."""

# Runs the first interpreter that exists; uses no other program, as PATH may be wrong. "~/" is the host's home.
_FIND_PYTHON = (
    'b=$1; shift; w=; for p; do case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'q=$(command -v "$p" 2>/dev/null); [ -f "$q" ] && [ -x "$q" ] && exec "$q" -E -c "$b"; '
    'case $p in */*) if [ -d "$p" ]; then w="$w; $p is a folder"; '
    'elif [ -e "$p" ]; then w="$w; $p is not executable"; fi;; esac; done; '
    'echo "paceline: no interpreter $*$w; PATH=$PATH" >&2; exit 127'
)

_PREAMBLE = b"\n" * 16 + f"echo {TAKEN_FOR_COMMANDS}; exit 97\n".encode()
"""Text that BOOTSTRAP skips. The empty lines answer a login script that reads (``read``); the command ends a shell that
a login script has started in its own place (``exec zsh``)."""


def agent_argv(python: str | None) -> list[str]:
    """Return the command of an agent on another host. Default interpreter: the controller's, else python3."""
    candidates = [python] if python else [sys.executable, "python3"]
    return ["/bin/sh", "-c", _FIND_PYTHON, "sh", BOOTSTRAP, *candidates]


@cache
def packed_agent() -> bytes:
    """Return the compressed agent: the loader's text, a zero byte, and the modules that it loads."""
    texts = module_texts()
    code = {name: marshal.dumps(_code(name)) for name in texts}
    texts_apart = zlib.compress(marshal.dumps(dict(texts), 2))  # packed on their own, as most hosts don't need them
    modules = marshal.dumps((MAGIC_NUMBER, set(texts), texts_apart, code), 2)
    return zlib.compress(b"%s\n\nrun(modules)\n\0%s" % (texts[f"{PACKAGE}.loader"].encode(), modules))


@cache
def module_texts() -> Mapping[str, str]:
    """Return full name on a host → text, for all modules that may travel there."""
    folders = {PACKAGE: Path(agent.__file__).parent, CONTRACT: Path(contract.__file__).parent}
    names = {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path.read_text(
            encoding="utf-8"
        )
        for package, folder in folders.items()
        for path in folder.rglob("*.py")
    }
    others = {"trainers": Path(trainers.__file__), RANKS: Path(trainers.__file__).with_name("ranks.py")}
    return {**names, **{name: path.read_text(encoding="utf-8") for name, path in others.items()}}


def _code(name: str) -> CodeType:
    """Return a module's compiled code (usually cached by Python), with its file name in the repository."""
    full_name = name.replace(PACKAGE, agent.__name__)
    code = SourceFileLoader(full_name, str(_REPOSITORY / path_of(name))).get_code(full_name)
    assert code is not None  # a file with source has some
    return _of_file(code, path_of(name))


def _of_file(code: CodeType, path: str) -> CodeType:
    inner = tuple(_of_file(one, path) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=path, co_consts=inner)


def new_token() -> str:
    """Return the mark for the answers to one request, which only a reader of the request can know."""
    return secrets.token_hex(8)


def message(request: dict[str, Any], token: str) -> bytes:
    """Return the stdin of BOOTSTRAP: length and modules, length and request; a tar may follow.

    Both are compressed, as a request holds the parts of all nodes, which hardly differ.
    """
    packed = zlib.compress(json.dumps({**request, "token": token}).encode())
    return opening() + b"%d\n%s" % (len(packed), packed)


@cache
def opening() -> bytes:
    """Return the part of a message before its request: the preamble, then the agent with its length in front."""
    packed = packed_agent()
    return b"%s%d\n%s" % (_PREAMBLE, len(packed), packed)
