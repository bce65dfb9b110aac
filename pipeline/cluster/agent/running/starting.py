"""The start of an attempt on a node, from ending earlier attempts to a supervisor that stays."""

from __future__ import annotations

import json
import os
import sys

from ..node import own_node
from ..reasons import THERE
from ..wire import Json, say, touch
from .claims import Claim, claim_for_run
from .processes import Orphans
from .registry import doubtful, end_attempts, in_words, own_entries, remove_outdated
from .staging import remove_left, remove_ours, settle_pack, unpack
from .supervisor import Supervisor


def start(request: Json) -> None:
    """Stage the run, end leftovers of the same key, leave a supervisor behind; answers when torchrun is up."""
    node = own_node(request)
    remove_outdated(request)
    before = own_entries(request)
    left = end_attempts(request)
    if left:
        raise SystemExit(f"an earlier attempt of this run cannot be ended: processes {sorted(left)}")
    refuse_doubtful(request)
    claim = claim_for_run(node.get("claim"))  # held by the processes that are forked from this one
    for _, entry in before:
        remove_ours(entry["remove"])
    if request["stage"]:
        remove_left(request, node)
        unpack(sys.stdin.buffer, node["run_dir"])
    if request["pack_digest"]:  # a diagnosis may need no data
        settle_pack(node["run_dir"], node["data_dir"], request["pack_digest"])
    lay_out(node)
    read_fd, answer_fd = os.pipe()
    # forked twice: the supervisor leads no session, so it never gets a terminal, and init waits for its end
    if os.fork() == 0:
        os.close(read_fd)
        os.setsid()
        if os.fork() == 0:
            supervise_forever(request, node, answer_fd, claim)
        os._exit(0)
    os.close(answer_fd)
    os.wait()
    with os.fdopen(read_fd, "r", encoding="utf-8") as pipe:
        answer = pipe.read()
    say(**(json.loads(answer) if answer else {"error": "the supervisor died at once"}))


def refuse_doubtful(request: Json) -> None:
    """Raise SystemExit while a doubtful process lives, which might write into the folder of the new attempt."""
    for _, entry in own_entries(request):
        if commands := doubtful(entry):
            pids = " ".join(map(str, commands))
            raise SystemExit(
                f"an earlier attempt of this run was killed, and {in_words(commands)} may be what it left: without the "
                f"mark of the run, in its folder {entry['run_dir']}; nothing starts beside that{THERE}kill {pids}"
            )


def lay_out(node: Json) -> None:
    """Create the folder of the agent's own files, with the stamp that ``clean`` checks, and begin the lease."""
    os.makedirs(node["state_dir"], mode=0o700, exist_ok=True)  # private, because it holds the ranks' unmasked output
    for folder in node["remove"]:
        open(os.path.join(folder, ".paceline"), "w").close()
    touch(os.path.join(node["state_dir"], "lease"))


def supervise_forever(request: Json, node: Json, answer_fd: int, claim: Claim | None) -> None:
    """Run the daemon to its end; never returns into the caller's stack."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        log = os.open(os.path.join(node["state_dir"], "agent.log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.chdir("/")
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        Orphans.adopt()
        Supervisor(request, node).run(answer_fd)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        if claim is not None:
            claim.release()
        os._exit(code)
