"""`paceline mcp`: a server of the Model Context Protocol over stdin and stdout, so that an agent needs no shell.

Each tool is a verb in a process of its own, and answers with its JSON (docs/json.md).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pipeline.cli.invocation import is_override
from pipeline.cli.output import Failure, envelope, read_envelope
from pipeline.cli.session import Session
from pipeline.cli.verbs import VERBS
from pipeline.core.errors import PacelineError, UsageError
from pipeline.core.processes import process
from pipeline.core.specs import LAST

_NAME = re.compile(r"[\w.][\w./-]*")  # a key, a sweep's name, a file; nothing that could be an option
_ABOUT = (
    "Paceline trains PyTorch models; each run has a key, and a finished one is never repeated. Overrides are Hydra's "
    "words: experiment=quickstart, optimizer.lr=0.1. Every tool answers with one object: schema, ok, data, error "
    "(code, message, hint). After a failed run call triage."
)


def mcp(_: Session) -> None:
    """Serve until stdin ends. Raises UsageError: the extra isn't installed."""
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        raise UsageError("doit mcp needs the package mcp (2.0 or newer)", hint="pip install 'mcp>=2'") from error
    server = MCPServer("paceline", instructions=_ABOUT, log_level="WARNING")
    for tool in (runs, show, compare, train, triage):
        server.tool()(tool)
    server.run()


async def runs(overrides: list[str] | None = None, state: str | None = None) -> dict[str, Any]:
    """List the runs of this project, oldest first, with accuracy, time and why a failed one failed.

    Args:
        overrides: only runs with these values, such as ["model=resnet18", "seed=1"].
        state: only runs in this state: FINISHED, FAILED, KILLED or RUNNING.
    """
    return await _answer("runs", overrides or (), state=state)


async def show(key: str = LAST) -> dict[str, Any]:
    """Show one run: state, progress, metrics, hosts and folder.

    Args:
        key: the run's key, the beginning of it, or "last".
    """
    return await _answer("status", keys=[key])


async def compare(what: list[str]) -> dict[str, Any]:
    """Compare runs: their figures by configuration, and which differences are larger than the spread over seeds.

    Args:
        what: keys of runs, or overrides that choose them, such as ["experiment=quickstart"].
    """
    overrides = [word for word in what if is_override(word)]
    return await _answer("compare", overrides, keys=[word for word in what if word not in overrides])


async def train(overrides: list[str], budget: str | None = None, detach: bool = False) -> dict[str, Any]:
    """Train a run to its end. A finished one is answered at once, an interrupted one goes on from its checkpoint.

    Args:
        overrides: what to train, such as ["experiment=quickstart", "optimizer.lr=0.1"].
        budget: end it in order after so long (90s, 30m, 1h30m); the same call goes on.
        detach: return once it has started; show tells how far it is.
    """
    return await _answer("train", overrides, budget=budget, detach="1" if detach else None)


async def triage(key: str = LAST) -> dict[str, Any]:
    """Tell what failed of a run, on which host and rank first, with the evidence and the next command.

    Args:
        key: the run's key, the beginning of it, or "last".
    """
    return await _answer("triage", keys=[key])


async def _answer(
    verb: str, overrides: Sequence[str] = (), *, keys: Sequence[str] = (), **options: str | None
) -> dict[str, Any]:
    """Return the answer of `doit VERB KEY … OVERRIDE … OPTION=VALUE …`, or the error about a wrong word."""
    try:
        for word in overrides:  # an agent must not be able to type an option or another command
            if not is_override(word):
                raise UsageError(f"{word!r} is no override; overrides look like optimizer.lr=0.1")
        for word in keys:
            if word in VERBS or not _NAME.fullmatch(word):
                raise UsageError(f"{word!r} is no run's key; runs lists them")
        typed_options = [f"{name}={value}" for name, value in options.items() if value is not None]
        words = [verb, *keys, *overrides, *typed_options, "json=1"]
        return await _run([sys.executable, "-m", "pipeline.cli.main", *words])
    except PacelineError as error:
        return envelope(verb, None, Failure.of(error))


async def _run(argv: Sequence[str]) -> dict[str, Any]:
    """Run a command and return its answer; end it if the client cancels the call. Raises PacelineError: no answer."""
    import anyio  # with the package mcp

    child = await anyio.open_process(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None,  # lines for users: a client keeps a server's stderr as its log
        env=process.child_environment(),
        start_new_session=True,
    )
    assert child.stdout is not None
    stdout = b""
    try:
        async for chunk in child.stdout:
            stdout += chunk
        await child.wait()
    except BaseException:  # the client has cancelled the call
        with anyio.CancelScope(shield=True):
            child.send_signal(signal.SIGINT)
            await child.wait()
        raise
    return read_envelope(stdout, child.returncode)
