"""What is sent to a host: the constant remote command, and its standard input.

The standard input consists of the agent's modules, one request, and for some requests a tar of files. So nothing needs
to be installed on the host, and no value of a request is seen by a remote shell.
"""

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

Any Python since 2.7 can compile it, so that a Python which is too old can report that. It first removes the working
directory from sys.path, or a file ``json.py`` in a home would be imported. Interpreters run it with ``-E``: PYTHON…
variables of a shell don't reach the ranks and so must not change what the probe finds."""

# A shell script that runs the first interpreter that exists. It uses no other program, as PATH may be wrong; "~/" is
# the host's home. If it finds none, it reads stdin to its end: else mpirun's daemon breaks, and this error is lost.
_FIND_PYTHON = (
    'b=$1; shift; w=; for p; do case $p in "~/"*) p=$HOME/${p#??};; esac; '
    'q=$(command -v "$p" 2>/dev/null); [ -f "$q" ] && [ -x "$q" ] && exec "$q" -E -c "$b"; '
    'case $p in */*) if [ -d "$p" ]; then w="$w; $p is a folder"; '
    'elif [ -e "$p" ]; then w="$w; $p is not executable"; fi;; esac; done; '
    'echo "paceline: no interpreter $*$w; PATH=$PATH" >&2; while read -r b; do :; done; exit 127'
)

_PREAMBLE = b"\n" * 16 + f"echo {TAKEN_FOR_COMMANDS}; exit 97\n".encode()
"""Text before the agent, which BOOTSTRAP skips. If a login script reads input (``read``), it gets the empty lines. If
it has replaced itself by a shell (``exec zsh``), that shell executes the command, which reports this and ends it."""


def agent_argv(python: str | None) -> list[str]:
    """Return the command that starts an agent on another host. ``python`` None: the controller's path, else python3."""
    candidates = [python] if python else [sys.executable, "python3"]
    return ["/bin/sh", "-c", _FIND_PYTHON, "sh", BOOTSTRAP, *candidates]


def module_texts() -> dict[str, str]:
    """Return module name → source text, for all modules that may travel to a host."""
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
    """Return a random text for one request and its answers; only who has read the request can know it."""
    return secrets.token_hex(8)


def message(request: Request, token: str) -> bytes:
    """Return the stdin of BOOTSTRAP: length and modules, then length and request, both compressed; a tar may follow."""
    packed = zlib.compress(encode(request, token))
    return opening() + b"%d\n%s" % (len(packed), packed)


@cache
def opening() -> bytes:
    """Return the beginning of every message: the preamble, the length of the compressed agent, and the agent.

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
    """Append the run as a node needs it: code, config, and the files from which an attempt resumes."""
    with tarfile.open(fileobj=stdin, mode="w|", dereference=True) as archive:
        for path, name in _files_to_send(run_dir):
            archive.add(path, arcname=name, filter=lambda member: None if "__pycache__" in member.name else member)


def _script_files(run_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path here, name on the host) of what earlier attempts of a script left.

    Every node gets all checkpoints and working directories. What one node alone needs comes into ``carried/NODE_RANK``,
    from where trainers/script/workdir.py takes it.
    """
    for name in ("checkpoints", "work", run_folder.METRICS):
        yield run_dir / name, name
    yield run_dir / run_folder.OUTPUTS, f"{run_folder.CARRIED}/0/outputs"
    for node in sorted(run_dir.glob(f"{run_folder.NODES}/*")):
        yield node, f"{run_folder.CARRIED}/{node.name}"


def _files_to_send(run_dir: Path) -> Iterable[tuple[Path, str]]:
    """Yield (path here, name on the host) of all files and folders that a node needs for an attempt."""
    for name in ("code", run_folder.CONFIG, run_folder.ATTEMPT_IDS):
        yield run_dir / name, name
    if (run_dir / run_folder.INITIAL_WEIGHTS).exists():
        yield run_dir / run_folder.INITIAL_WEIGHTS, run_folder.INITIAL_WEIGHTS
    if programs.of_run(run_dir).starts_torchrun:
        yield from ((path, name) for path, name in _script_files(run_dir) if path.exists())
        return
    newest = sorted((run_dir / run_folder.CHECKPOINTS).glob("step-*.pt"))[-1:]
    for checkpoint in newest:
        for path in (checkpoint, checkpoint.with_suffix(".json"), run_dir / run_folder.METRICS):
            yield path, str(path.relative_to(run_dir))
