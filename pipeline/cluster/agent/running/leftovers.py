"""Leftovers of ended attempts on this node: reported by the probe, removed when the controller says so."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil

from trainers.contract import run_folder

from ..node import identity
from ..wire import Json, read_json, say
from .processes import find_processes, start_time
from .registry import LONGEST_START_S, forget_dead
from .staging import FOREIGN_S, holds_unfetched, idle_s, remove_half_unpacked, size_of_new, try_writing

HEARD_S = 60.0  # a controller that follows an attempt beats every second, also after its end
MOST_ROWS = 200


def tidy_workdir(request: Json, workdir: str) -> list[Json]:
    """For launchers that send files: test whether files can be written, and report ``left``."""
    if not request.get("writes"):
        return []
    try_writing(workdir)
    forget_dead(request)
    return attempts_left(workdir, identity(request))


def attempts_left(workdir: str, me: str) -> list[Json]:
    """Return a row for each unused folder of an attempt.

    ``idle_s``: since the last write or the controller's last heartbeat. ``holds_outputs``: a controller may want to
    fetch something, because there is a checkpoint, or this node's part has ended well.
    """
    folders = sorted(glob.glob(os.path.join(glob.escape(workdir), "runs", "*", "node*")))
    unused = [f for f in folders if is_run_name(run_name_of(f)) and not is_in_use(f, me) and not holds_unfetched(f)]
    return [
        {
            "name": run_name_of(folder),
            "idle_s": idle_s(folder),
            "holds_outputs": holds_outputs(folder),
            "bytes": size_bytes(folder),
        }
        for folder in unused[:MOST_ROWS]
    ]


def run_name_of(folder: str) -> str:
    """Return ``RUN ID/node0``."""
    return "/".join(folder.split("/")[-2:])


def is_run_name(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/node\d+", name) is not None


def is_in_use(folder: str, me: str) -> bool:
    """Whether its agent or a rank lives, it may be starting, or a controller was heard a moment ago.

    For a host that shares this home only the age is known.
    """
    entry = read_json(os.path.join(folder, "agent", "agent.json"))
    if not isinstance(entry, dict):
        return idle_s(folder) < LONGEST_START_S
    if start_time(entry["pid"]) == entry["born"]:
        return True
    if entry["identity"] != me:
        return idle_s(folder) < FOREIGN_S
    return bool(find_processes(entry["mark"], entry["state_dir"])) or idle_s(folder) < HEARD_S


def holds_outputs(folder: str) -> bool:
    ended = read_json(os.path.join(folder, "agent", "exit.json"))
    if isinstance(ended, dict) and ended.get("code") == 0:
        return True
    # whatever its name and depth: a script calls its checkpoints as it likes, and saves them where it stands
    if any(names for _, _, names in os.walk(os.path.join(folder, run_folder.CHECKPOINTS))):
        return True
    return any(map(wrote_there, glob.glob(os.path.join(glob.escape(folder), "work", "node*"))))


def wrote_there(place: str) -> bool:
    """Whether a script has written into its working directory."""
    given = read_json(os.path.join(place, run_folder.GIVEN))
    run_dir = os.path.dirname(os.path.dirname(place))
    return size_of_new(os.path.join(place, run_folder.ABOVE), run_dir, given if isinstance(given, dict) else {}) > 0


def size_bytes(folder: str) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def clear(request: Json) -> None:
    """Remove the named folders of this node unless they are in use, and what no process owns any more."""
    workdir, me = os.path.expanduser(request["workdir"]), identity(request)
    removed = []
    for name in request["folders"].get(me, []):
        folder = os.path.join(workdir, "runs", name)
        if is_run_name(name) and os.path.isdir(folder) and not is_in_use(folder, me):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # it isn't empty
                os.rmdir(os.path.dirname(folder))
            removed += [] if os.path.isdir(folder) else [name]
    remove_half_unpacked(workdir)
    forget_dead(request)
    say(removed=removed)
