"""Answer a ``StartRequest``: make the node ready for an attempt, and leave a supervisor there.

The agent process that answers ends at once. The supervisor (``supervisor.py``) is a detached child of it.
"""

from __future__ import annotations

import contextlib
import os
import sys

from ..files.folders import link_pack, remove_ours, unpack
from ..files.leftovers import remove_leftovers
from ..node import own_node
from ..requests import NodeStart, StartRequest
from ..wire import FIX_THERE, say, touch
from .claims import Claim, claim_for_run
from .processes import Orphans
from .registry import Registry, in_words, possible_remains
from .supervisor import Supervisor

_STARTED = "started"


def start(request: StartRequest) -> None:
    """Start an attempt on this node; answer once torchrun was started. Raises SystemExit: why it can't start."""
    node = own_node(request.nodes, request.access)
    # two attempts at once would write the same files: end earlier ones
    registry = Registry(request.registry, request.access)
    earlier = registry.entries(request.attempt_prefix)
    end_earlier(registry, request.attempt_prefix)
    refuse_remains(registry, request.attempt_prefix)
    claim = claim_for_run(node.claim)  # a lock, which the supervisor inherits as a fork of this process
    for entry in earlier.values():
        remove_ours(entry.remove)
    registry.forget_dead()
    if request.sends_files:
        remove_leftovers(request, node)
        unpack(sys.stdin.buffer, node.run_dir)
    if request.pack_digest:  # a diagnosis may need no data
        link_pack(node.run_dir, node.data_dir)
    lay_out(node)
    if error := fork_supervisor(request, node, claim):
        raise SystemExit(error)
    say(started=True)


def end_earlier(registry: Registry, attempt_prefix: str) -> None:
    """End all earlier attempts of the run folder. Raises SystemExit: some processes can't be ended."""
    if survivors := registry.end_attempts(attempt_prefix):
        raise SystemExit(f"an earlier attempt of this run cannot be ended: processes {sorted(survivors)}")


def refuse_remains(registry: Registry, attempt_prefix: str) -> None:
    """Raise SystemExit if a process lives that may be an earlier attempt's: it could write to the new one's files."""
    for entry in registry.entries(attempt_prefix).values():
        if commands := possible_remains(entry):
            pids = " ".join(map(str, commands))
            raise SystemExit(
                f"an earlier attempt of this run was killed, and {in_words(commands)} may be what it left: without the "
                f"mark of the run, in its folder {entry.run_dir}; nothing starts beside that{FIX_THERE}kill {pids}"
            )


def lay_out(node: NodeStart) -> None:
    """Create the agent's own folder and the lease, and mark the folders that may be removed later."""
    os.makedirs(node.state_dir, mode=0o700, exist_ok=True)  # private, because it holds the ranks' unmasked output
    for folder in node.own_folders:
        open(os.path.join(folder, ".paceline"), "w").close()
    touch(os.path.join(node.state_dir, "lease"))


def fork_supervisor(request: StartRequest, node: NodeStart, claim: Claim | None) -> str:
    """Start the supervisor in a process of its own; return why it could not start torchrun, or ''."""
    # fork twice, as daemons do: the second child leads no session and so never gets a terminal
    read_fd, answer_fd = os.pipe()
    if os.fork() == 0:
        os.close(read_fd)
        os.setsid()
        if os.fork() == 0:
            supervise(request, node, answer_fd, claim)
        os._exit(0)
    os.close(answer_fd)
    os.wait()
    with os.fdopen(read_fd, encoding="utf-8") as pipe:
        answer = pipe.read()  # until the supervisor closes its end, or dies
    return "" if answer == _STARTED else answer or "the supervisor died at once"


def supervise(request: StartRequest, node: NodeStart, answer_fd: int, claim: Claim | None) -> None:
    """Be the supervisor until the start has ended; never returns. Tell ``answer_fd`` whether torchrun was started."""
    code = 1
    try:
        # ssh ends only when nobody holds its pipes any more
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(os.path.join(node.state_dir, "agent.log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.chdir("/")
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if node.container is None:  # with a container, the engine's own processes would be adopted too
            Orphans.adopt()
        supervisor = Supervisor(request, node)
        error = supervisor.begin()
        with contextlib.suppress(OSError):
            os.write(answer_fd, (error or _STARTED).encode())
        os.close(answer_fd)
        if not error:
            supervisor.run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        if claim is not None:
            claim.release()
        os._exit(code)
