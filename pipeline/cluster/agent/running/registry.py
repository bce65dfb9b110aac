"""The registry of this node's supervisors: one file for each, by which any later command finds and ends it.

A supervisor is the agent process that owns a start's torchrun. All processes below the supervisor have the mark
``run_id:node_rank`` in their environment, so they are found even if the supervisor was killed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time

from ..node import identity, own_node
from ..requests import Access, NodeEnd, RegistryEntry, Standing, StandingRequest, StopRequest
from ..wire import read_record, say, touch
from .processes import POLL_S, TERM_GRACE_S, end_tree, find_processes, remove_container, send_all, start_time, works_in

LONGEST_START_S = 3600.0  # a folder of a start that has no supervisor yet counts as in use for this time
TOMBSTONE_S = 86_400.0  # a tombstone is kept for this time; then the refused start can't be on its way any more


def is_alive(entry: RegistryEntry) -> bool:
    """Return whether the supervisor's process lives; another process may have got its number meanwhile."""
    return start_time(entry.pid) == entry.born


class Registry:
    """The registered supervisors of this node, in a folder that other nodes may share (homes on NFS)."""

    def __init__(self, folder: str, access: Access) -> None:
        self.folder, self.identity = os.path.expanduser(folder), identity(access)

    def entry_path(self, run_id: str, node_rank: int) -> str:
        return os.path.join(self.folder, f"{run_id}.{node_rank}.json")

    def tombstone_path(self, run_id: str) -> str:
        """Return the path of a file that refuses a start: its command gave up while the request was on its way."""
        return os.path.join(self.folder, f"{run_id}.tombstone")

    def entries(self, attempt_prefix: str = "") -> dict[str, RegistryEntry]:
        """Return path → entry of this node's supervisors, whose run ids begin with ``attempt_prefix``."""
        paths = sorted(glob.glob(os.path.join(glob.escape(self.folder), "*.json")))
        # The mark begins with the run id, but a damaged or forged file may combine the mark of another run with it, and
        # ``end_entry`` would end all processes of that run. So both are compared with the prefix.
        pairs = [(path, entry) for path in paths if (entry := read_record(RegistryEntry, path)) is not None]
        return {
            path: entry
            for path, entry in pairs
            if entry.identity == self.identity
            and entry.run_id.startswith(attempt_prefix)
            and entry.mark.startswith(attempt_prefix)
        }

    def end_attempts(self, attempt_prefix: str) -> set[int]:
        """End all attempts whose ids begin so, registered or not; return the processes that live on."""
        for path, entry in self.entries(attempt_prefix).items():
            end_entry(path, entry)
        if not find_processes(attempt_prefix):
            return set()
        # some have no registration any more: it was removed, perhaps together with the run's folder
        end_tree(attempt_prefix, TERM_GRACE_S)
        return find_processes(attempt_prefix)

    def refuse_start(self, run_id: str) -> None:
        """Write a tombstone. Each start first registers and then looks for its tombstone, so it can't slip through."""
        os.makedirs(self.folder, exist_ok=True)
        touch(self.tombstone_path(run_id))

    def forget_dead(self) -> None:
        """Remove the entries of dead supervisors whose folders are gone, and old tombstones."""
        for path, entry in self.entries().items():
            if not is_alive(entry) and not os.path.isdir(entry.state_dir) and not possible_remains(entry):
                with contextlib.suppress(OSError):
                    os.unlink(path)
        for tombstone in glob.glob(os.path.join(glob.escape(self.folder), "*.tombstone")):
            with contextlib.suppress(OSError):
                if time.time() - os.path.getmtime(tombstone) > TOMBSTONE_S:
                    os.unlink(tombstone)


def end_entry(path: str, entry: RegistryEntry) -> None:
    """Stop one supervisor and everything it owns; remove its registration unless something may be left."""
    if is_alive(entry):
        # on TERM the supervisor ends its ranks itself, with TERM and then KILL, and writes exit.json
        send_all({entry.pid}, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S + 3
        while is_alive(entry) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if is_alive(entry):
            send_all({entry.pid}, signal.SIGKILL)
    # with the folder also processes that have lost the mark, but have a file open for writing there
    is_gone = end_tree(entry.mark, 0.5, entry.state_dir)
    if entry.container is not None:
        remove_container(entry.container.engine, entry.container.name)
    if is_gone and not possible_remains(entry):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def possible_remains(entry: RegistryEntry) -> dict[int, str]:
    """Return process id → command of processes without the mark that work in a dead supervisor's folders."""
    # they may be detached children of the ranks; nothing proves that, so messages name them, and nothing ends them
    names = ("checkpoints", "outputs", "work")
    return works_in([os.path.join(entry.run_dir, name) for name in names]) if entry.run_dir else {}


def in_words(commands: dict[int, str], longest: int = 80) -> str:
    """Return ``process 17 (COMMAND), …``, with at most ``longest`` characters of each command."""
    return ", ".join(f"process {pid} ({command[:longest]})" for pid, command in sorted(commands.items()))


def stop(request: StopRequest) -> None:
    """End everything of one run folder on this node, registered or not; answer with the surviving processes."""
    registry = Registry(request.registry, request.access)
    if request.refused_run_id:
        registry.refuse_start(request.refused_run_id)
    survivors = [f"process {pid}" for pid in sorted(registry.end_attempts(request.attempt_prefix))]
    for entry in registry.entries(request.attempt_prefix).values():
        if commands := possible_remains(entry):
            survivors.append(f"{in_words(commands)} in its folder")
    say(survivors=survivors)


def standing(request: StandingRequest) -> None:
    """Answer whether this node's part of a start still runs, or how it ended."""
    node = own_node(request.nodes, request.access)
    end = read_record(NodeEnd, os.path.join(node.state_dir, "exit.json"))
    entry = read_record(RegistryEntry, os.path.join(node.state_dir, "agent.json"))
    if end is not None:
        answer = Standing(node.identity, alive=False, code=end.code, reason=end.reason, errors=end.errors)
    elif entry is not None and is_alive(entry):
        answer = Standing(node.identity, alive=True)
    else:  # the supervisor was killed, with or without its ranks, or the node was restarted
        # the mark may be lost: with the folder, processes that have a file open for writing there are found, too
        survivors = sorted(find_processes(entry.mark, node.state_dir)) if entry is not None else []
        ended_first = f"; what lives on of it is ended first: processes {', '.join(map(str, survivors))}"
        reason = f"its agent is gone{ended_first if survivors else ''}"
        answer = Standing(node.identity, alive=False, reason=reason)
    say(**answer._asdict())
