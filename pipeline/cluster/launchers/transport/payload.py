"""The standard input of every remote command: the agent's modules, one request, and files for some requests."""

from __future__ import annotations

import json
import secrets
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import IO

import trainers
from pipeline.cluster import agent
from pipeline.cluster.agent.loader import CONTRACT, PACKAGE, RANKS
from pipeline.cluster.agent.requests import Request, encode
from pipeline.core import program as programs
from trainers import contract
from trainers.contract import run_folder

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
# At the end stdin is read to its end: mpirun's daemon breaks if nobody takes what it has, and its message is lost.
_FIND_PYTHON = (
    'b=$1; shift; w=; for p; do case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'q=$(command -v "$p" 2>/dev/null); [ -f "$q" ] && [ -x "$q" ] && exec "$q" -E -c "$b"; '
    'case $p in */*) if [ -d "$p" ]; then w="$w; $p is a folder"; '
    'elif [ -e "$p" ]; then w="$w; $p is not executable"; fi;; esac; done; '
    'echo "paceline: no interpreter $*$w; PATH=$PATH" >&2; while read -r b; do :; done; exit 127'
)

_PREAMBLE = b"\n" * 16 + f"echo {TAKEN_FOR_COMMANDS}; exit 97\n".encode()
"""Text that BOOTSTRAP skips. The empty lines answer a login script that reads (``read``); the command ends a shell that
a login script has started in its own place (``exec zsh``)."""


def agent_argv(python: str | None) -> list[str]:
    """Return the command of an agent on another host. Default interpreter: the controller's, else python3."""
    candidates = [python] if python else [sys.executable, "python3"]
    return ["/bin/sh", "-c", _FIND_PYTHON, "sh", BOOTSTRAP, *candidates]


def module_texts() -> dict[str, str]:
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


def new_token() -> str:
    """Return the mark for the answers to one request, which only a reader of the request can know."""
    return secrets.token_hex(8)


def message(request: Request, token: str) -> bytes:
    """Return the stdin of BOOTSTRAP: length and modules, length and request; a tar may follow.

    Both are compressed, as a request holds the parts of all nodes, which hardly differ.
    """
    packed = zlib.compress(encode(request, token))
    return opening() + b"%d\n%s" % (len(packed), packed)


@cache
def opening() -> bytes:
    """Return the part of a message before its request: the preamble, then the compressed agent, its length in front.

    The agent is the loader's text, a zero byte, and the texts of its modules as JSON.
    """
    texts = module_texts()
    loader, modules = texts[f"{PACKAGE}.loader"].encode(), json.dumps(texts).encode()
    packed = zlib.compress(b"%s\n\nrun(modules)\n\0%s" % (loader, modules), 9)
    return b"%s%d\n%s" % (_PREAMBLE, len(packed), packed)


# ------------------------------------------------------------------------------------ files, and their progress
def append(stdin: IO[bytes], source: Path, name: str) -> None:
    """Append a tar of ``source`` under another name."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        archive.add(source, arcname=name)


def append_run(stdin: IO[bytes], run_dir: Path) -> None:
    """Append the run as a node needs it: code, config, and what an attempt resumes from."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        for path, name in _staged(run_dir):
            archive.add(path, arcname=name, filter=lambda member: None if "__pycache__" in member.name else member)


def _of_script(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield what earlier attempts of a script left, with its name on the host.

    Checkpoints and working directories go to every node, and each process reads its part. What one node alone gets lies
    in ``carried/NODE_RANK``, from where trainers/script/workdir.py takes it.
    """
    for name in ("checkpoints", "work", run_folder.METRICS):
        yield run_dir / name, name
    yield run_dir / run_folder.OUTPUTS, f"{run_folder.CARRIED}/0/outputs"
    for node in sorted(run_dir.glob(f"{run_folder.NODES}/*")):
        yield node, f"{run_folder.CARRIED}/{node.name}"


def _staged(run_dir: Path) -> Iterable[tuple[Path, str]]:
    for name in ("code", run_folder.CONFIG, run_folder.ATTEMPT_IDS):
        yield run_dir / name, name
    if (run_dir / run_folder.INITIAL_WEIGHTS).exists():
        yield run_dir / run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS
    if programs.of_run(run_dir).starts_torchrun:
        yield from ((path, name) for path, name in _of_script(run_dir) if path.exists())
        return
    checkpoints = sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"))[-1:]
    for checkpoint in checkpoints:
        for path in (checkpoint, checkpoint.with_suffix(".json"), run_dir / run_folder.METRICS):
            yield path, str(path.relative_to(run_dir))
