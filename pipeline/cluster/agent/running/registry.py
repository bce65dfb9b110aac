"""The supervisors on this node: registered, stopped, and kept from starting late."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time

from ..node import identity, own_node
from ..wire import Json, read_json, say, write_json
from .processes import (
    POLL_S,
    TERM_GRACE_S,
    end_tree,
    find_processes,
    remove_container,
    send_all,
    start_time,
    works_in,
)

LONGEST_START_S = 3600.0


def entries(request: Json) -> list[tuple[str, Json]]:
    """Return the registered supervisors of this node (homes on NFS show other nodes' entries too)."""
    me = identity(request)
    registry = os.path.expanduser(request["registry"])
    paths = sorted(glob.glob(os.path.join(glob.escape(registry), "*.json")))
    pairs = ((path, read_json(path)) for path in paths)
    return [(path, entry) for path, entry in pairs if isinstance(entry, dict) and entry.get("identity") == me]


def own_entries(request: Json) -> list[tuple[str, Json]]:
    """Return the supervisors of one run folder's attempts, whose ids and marks have a common prefix."""
    begin = request["attempts"]
    registered = entries(request)
    return [item for item in registered if all(str(item[1].get(name)).startswith(begin) for name in ("run_id", "mark"))]


def tombstone_path(request: Json, run_id: str) -> str:
    return os.path.join(os.path.expanduser(request["registry"]), f"{run_id}.tombstone")


def end_entry(path: str, entry: Json) -> bool:
    """Stop one supervisor and everything it owns; remove its registration unless something may be left.

    Returns whether all its processes have ended.
    """
    if start_time(entry["pid"]) == entry["born"]:
        send_all({entry["pid"]}, signal.SIGTERM)
        deadline = time.monotonic() + TERM_GRACE_S + 3
        while start_time(entry["pid"]) == entry["born"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if start_time(entry["pid"]) == entry["born"]:
            send_all({entry["pid"]}, signal.SIGKILL)
    gone = end_tree(entry["mark"], 0.5, entry["state_dir"])
    if entry.get("container"):
        remove_container(entry["container"]["engine"], entry["container"]["name"])
    if gone and not doubtful(entry):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return gone


def doubtful(entry: Json) -> dict[int, str]:
    """Find processes in the folders where an attempt's script writes, once its agent is dead.

    A child that has left session, parent and environment may belong to it, and nothing proves it.
    """
    names = ("checkpoints", "outputs", "work")
    return works_in([os.path.join(entry["run_dir"], name) for name in names]) if entry.get("run_dir") else {}


def in_words(commands: dict[int, str]) -> str:
    return ", ".join(f"process {pid} ({command[:80]})" for pid, command in sorted(commands.items()))


def stop(request: Json) -> None:
    """End everything of one run folder on this node, registered or not; ``left`` are the surviving processes."""
    if request["bar"]:  # a start that is still on its way checks for this after it has registered
        os.makedirs(os.path.expanduser(request["registry"]), exist_ok=True)
        write_json(tombstone_path(request, request["bar"]), {"monotonic_s": time.monotonic()})
    left = [f"process {pid}" for pid in sorted(end_attempts(request))]
    in_doubt = [
        f"{in_words(commands)} in its folder" for _, entry in own_entries(request) if (commands := doubtful(entry))
    ]
    say(left=[*left, *in_doubt])


def end_attempts(request: Json) -> set[int]:
    """End every attempt of the run folder; return the processes that could not be ended."""
    for path, entry in own_entries(request):
        end_entry(path, entry)
    # attempts whose registration was removed, perhaps together with the run's folder
    alive = find_processes(request["attempts"])
    if alive:
        end_tree(request["attempts"], TERM_GRACE_S)
        alive = find_processes(request["attempts"])
    return alive


def forget_dead(request: Json) -> None:
    """Remove the registrations of dead supervisors whose folders are gone, and outdated tombstones."""
    for path, entry in entries(request):
        is_dead = start_time(entry["pid"]) != entry["born"] and not os.path.isdir(entry["state_dir"])
        if is_dead and not doubtful(entry):
            with contextlib.suppress(OSError):
                os.unlink(path)
    remove_outdated(request)


def remove_outdated(request: Json) -> None:
    """Remove tombstones of starts that would have come by now, or of a time before the host's last boot."""
    registry = os.path.expanduser(request["registry"])
    for tombstone in glob.glob(os.path.join(glob.escape(registry), "*.tombstone")):
        with contextlib.suppress(OSError):
            if outdated(tombstone):
                os.unlink(tombstone)


def outdated(tombstone: str) -> bool:
    value = read_json(tombstone)
    at = value.get("monotonic_s") if isinstance(value, dict) else None
    return not isinstance(at, float) or not 0 <= time.monotonic() - at <= LONGEST_START_S


def standing(request: Json) -> None:
    """Return whether this node's part of an attempt is ``alive``, or how it ended: ``code``, ``reason``, ``errors``.

    Code None: it runs, nothing of it is here, or its agent was killed.
    """
    node = own_node(request)
    state, me = node["state_dir"], node["identity"]
    ended, entry = (read_json(os.path.join(state, name)) for name in ("exit.json", "agent.json"))
    if isinstance(ended, dict):
        say(identity=me, alive=False, **{name: ended[name] for name in ("code", "reason", "errors")})
        return
    alive = isinstance(entry, dict) and start_time(entry["pid"]) == entry["born"]
    left = sorted(find_processes(entry["mark"], state)) if isinstance(entry, dict) and not alive else []
    lives_on = f"; what lives on of it is ended first: processes {', '.join(map(str, left))}" if left else ""
    say(identity=me, alive=alive, code=None, reason="" if alive else f"its agent is gone{lives_on}")
