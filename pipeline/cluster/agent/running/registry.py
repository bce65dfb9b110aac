"""The supervisors on this node: registered, stopped, and kept from starting late.

A supervisor is the agent process that owns a start's torchrun; the processes that it starts carry ``run_id:node_rank``.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time

from ..node import identity, own_node
from ..requests import Access, NodeEnd, RegistryEntry, Standing, StandingRequest, StopRequest
from ..wire import read_json, read_record, say, write_json
from .processes import POLL_S, TERM_GRACE_S, end_tree, find_processes, remove_container, send_all, start_time, works_in

LONGEST_START_S = 3600.0
OTHERS_STAY_S = 86_400.0
TOMBSTONE = "tombstone"


def is_alive(entry: RegistryEntry) -> bool:
    return start_time(entry.pid) == entry.born


class Registry:
    """The registered supervisors of this node, in a folder that other nodes may share (homes on NFS)."""

    def __init__(self, folder: str, access: Access) -> None:
        self.folder, self.identity = os.path.expanduser(folder), identity(access)

    def entry_path(self, run_id: str, node_rank: int) -> str:
        return os.path.join(self.folder, f"{run_id}.{node_rank}.json")

    def tombstone_path(self, run_id: str) -> str:
        """Return the file whose existence refuses a start that may still be on its way."""
        return os.path.join(self.folder, f"{run_id}.{TOMBSTONE}")

    def entries(self, attempt_prefix: str = "") -> dict[str, RegistryEntry]:
        """Return path → entry of this node's supervisors, whose run ids begin with ``attempt_prefix``."""
        paths = sorted(glob.glob(os.path.join(glob.escape(self.folder), "*.json")))
        pairs = [(path, entry) for path in paths if (entry := read_record(RegistryEntry, path)) is not None]
        own = {path: entry for path, entry in pairs if entry.identity == self.identity}
        return {
            path: entry
            for path, entry in own.items()
            if entry.run_id.startswith(attempt_prefix) and entry.mark.startswith(attempt_prefix)
        }

    def end_attempts(self, attempt_prefix: str) -> set[int]:
        for path, entry in self.entries(attempt_prefix).items():
            end_entry(path, entry)
        # attempts whose registration was removed, perhaps together with the run's folder
        alive = find_processes(attempt_prefix)
        if alive:
            end_tree(attempt_prefix, TERM_GRACE_S)
            alive = find_processes(attempt_prefix)
        return alive

    def refuse_start(self, run_id: str) -> None:
        """Make a start fail that is still on its way: it checks for the tombstone after it has registered."""
        os.makedirs(self.folder, exist_ok=True)
        write_json(self.tombstone_path(run_id), {"identity": self.identity, "monotonic_s": time.monotonic()})

    def forget_dead(self) -> None:
        """Remove the registrations of dead supervisors whose folders are gone, and outdated tombstones."""
        for path, entry in self.entries().items():
            if not is_alive(entry) and not os.path.isdir(entry.state_dir) and not doubtful(entry):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self.remove_outdated()

    def remove_outdated(self) -> None:
        """Remove tombstones of starts that would have come by now; other nodes' ones after a day."""
        for tombstone in glob.glob(os.path.join(glob.escape(self.folder), f"*.{TOMBSTONE}")):
            with contextlib.suppress(OSError):
                if outdated(tombstone, self.identity):
                    os.unlink(tombstone)


def outdated(tombstone: str, identity: str) -> bool:
    """Whether a tombstone is of no use any more; ``identity``: of this node."""
    value = read_json(tombstone)
    if isinstance(value, dict) and value.get("identity") != identity:
        return time.time() - os.path.getmtime(tombstone) > OTHERS_STAY_S
    at = value.get("monotonic_s") if isinstance(value, dict) else None
    return not isinstance(at, float) or not 0 <= time.monotonic() - at <= LONGEST_START_S


def end_entry(path: str, entry: RegistryEntry) -> None:
    """Stop one supervisor and everything it owns; remove its registration unless something may be left."""
    if is_alive(entry):
        send_all({entry.pid}, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S + 3
        while is_alive(entry) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if is_alive(entry):
            send_all({entry.pid}, signal.SIGKILL)
    gone = end_tree(entry.mark, 0.5, entry.state_dir)
    if entry.container is not None:
        remove_container(entry.container.engine, entry.container.name)
    if gone and not doubtful(entry):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def doubtful(entry: RegistryEntry) -> dict[int, str]:
    """Find processes (id → command) that write in a dead supervisor's folders and may be its own: nothing proves it."""
    names = ("checkpoints", "outputs", "work")
    return works_in([os.path.join(entry.run_dir, name) for name in names]) if entry.run_dir else {}


def in_words(commands: dict[int, str]) -> str:
    return ", ".join(f"process {pid} ({command[:80]})" for pid, command in sorted(commands.items()))


def stop(request: StopRequest) -> None:
    """End everything of one run folder on this node, registered or not; answer with the surviving processes."""
    registry = Registry(request.registry, request.access)
    if request.refused_run_id:
        registry.refuse_start(request.refused_run_id)
    survivors = [f"process {pid}" for pid in sorted(registry.end_attempts(request.attempt_prefix))]
    in_doubt = [
        f"{in_words(commands)} in its folder"
        for entry in registry.entries(request.attempt_prefix).values()
        if (commands := doubtful(entry))
    ]
    say(survivors=[*survivors, *in_doubt])


def standing(request: StandingRequest) -> None:
    """Answer whether this node's part of a start still runs, or how it ended."""
    node = own_node(request.nodes, request.access)
    end = read_record(NodeEnd, os.path.join(node.state_dir, "exit.json"))
    entry = read_record(RegistryEntry, os.path.join(node.state_dir, "agent.json"))
    if end is not None:
        answer = Standing(node.identity, alive=False, code=end.code, reason=end.reason, errors=end.errors)
    elif entry is not None and is_alive(entry):
        answer = Standing(node.identity, alive=True)
    else:
        survivors = sorted(find_processes(entry.mark, node.state_dir)) if entry is not None else []
        ended_first = f"; what lives on of it is ended first: processes {', '.join(map(str, survivors))}"
        reason = f"its agent is gone{ended_first if survivors else ''}"
        answer = Standing(node.identity, alive=False, reason=reason)
    say(**answer._asdict())
