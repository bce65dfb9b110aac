"""Folders that attempts left on this node, as their controller died or lost the host. They may hold checkpoints.

The probe reports them, and the controller decides which ones are removed (``why_kept`` of pipeline/cluster/starts.py).
``holds_outputs`` helps it: the next attempt, or another clone of the project, may fetch something from the folder.
A folder with ``holds_unfetched`` has outputs that could not be fetched at the end of its run. It stays for the user: it
is neither reported nor removed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re

from trainers.contract import run_folder
from trainers.contract.host_facts import LeftFolder

from ..node import identity
from ..requests import NodeEnd, NodeStart, ProbeRequest, RegistryEntry, RemoveFoldersRequest, StartRequest
from ..running.processes import find_processes
from ..running.registry import LONGEST_START_S, Registry, is_alive
from ..wire import read_json, read_record, say
from .folders import FOREIGN_S, holds_unfetched, idle_s, remove_half_unpacked, remove_tree, try_writing

HEARD_S = 60.0  # for so long after its last heartbeat a controller counts as following the attempt
MOST_ROWS = 200  # folders in an answer

Stamps = dict[str, list[int]]
"""Path in the run folder → [size in bytes, time of the last write in ns]: trainers/script/workdir.py notes them for the
files that it lays out, so files with other values were written by the script."""


def remove_leftovers(request: StartRequest, node: NodeStart) -> None:
    """Remove half-unpacked files of dead processes, and the folders of earlier attempts of this run."""
    runs = os.path.dirname(os.path.dirname(node.run_dir))
    remove_half_unpacked(os.path.dirname(runs))
    for folder in glob.glob(os.path.join(glob.escape(runs), "*", "node*")):
        run_id = os.path.basename(os.path.dirname(folder))
        if run_id.startswith(request.attempt_prefix) and run_id != request.run_id and not holds_unfetched(folder):
            remove_tree(folder)


def tidy_workdir(request: ProbeRequest, workdir: str) -> tuple[LeftFolder, ...]:
    """Test writing to ``workdir``, if files will be sent there, and return the folders that earlier attempts left."""
    if not request.tests_writing:  # the launcher shares the run folder with this node
        return ()
    try_writing(workdir)
    Registry(request.registry, request.access).forget_dead()
    return attempts_left(workdir, identity(request.access))


def attempts_left(workdir: str, own_identity: str) -> tuple[LeftFolder, ...]:
    folders = sorted(glob.glob(os.path.join(glob.escape(workdir), "runs", "*", "node*")))
    unused = [
        folder
        for folder in folders
        if is_run_name(run_name_of(folder)) and not is_in_use(folder, own_identity) and not holds_unfetched(folder)
    ]
    return tuple(
        LeftFolder(
            name=run_name_of(folder),
            idle_s=idle_s(folder),
            holds_outputs=holds_outputs(folder),
            bytes=size_of_new(folder, folder, {}),
        )
        for folder in unused[:MOST_ROWS]
    )


def run_name_of(folder: str) -> str:
    """Return ``RUN ID/node0``."""
    return "/".join(folder.split("/")[-2:])


def is_run_name(name: str) -> bool:
    """Return whether a name has the form of ``run_name_of``, and so can't lead out of the folder of runs."""
    return re.fullmatch(r"\w[\w.-]*/node\d+", name) is not None


def is_in_use(folder: str, own_identity: str) -> bool:
    """Return whether a supervisor or rank uses the folder, a start is under way there, or a controller follows it."""
    entry = read_record(RegistryEntry, os.path.join(folder, "agent", "agent.json"))
    if entry is None:  # a start may be under way, whose supervisor hasn't registered yet
        return idle_s(folder) < LONGEST_START_S
    if is_alive(entry):
        return True
    if entry.identity != own_identity:  # another host shares the folder, and its processes can't be seen here
        return idle_s(folder) < FOREIGN_S
    return bool(find_processes(entry.mark, entry.state_dir)) or idle_s(folder) < HEARD_S


def holds_outputs(folder: str) -> bool:
    """Return whether a controller may want to fetch something: this part ended well, or it saved files."""
    end = read_record(NodeEnd, os.path.join(folder, "agent", "exit.json"))
    if end is not None and end.code == 0:
        return True
    # a script gives its checkpoints any names, and may also save them in its working directory
    if any(names for _, _, names in os.walk(os.path.join(folder, run_folder.CHECKPOINTS))):
        return True
    # ABOVE: the folder around this directory. GIVEN: the file with the stamps of what was there before the script began
    return any(
        size_of_new(os.path.join(work, run_folder.ABOVE), folder, read_stamps(os.path.join(work, run_folder.GIVEN))) > 0
        for work in glob.glob(os.path.join(glob.escape(folder), "work", "node*"))
    )


def read_stamps(path: str) -> Stamps:
    stamps = read_json(path)
    return stamps if isinstance(stamps, dict) else {}


def size_of_new(top: str, run_dir: str, stamps: Stamps) -> int:
    """Return the bytes below ``top`` in files that have no stamp, or have changed since. Links don't count."""
    total = 0
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamp = [status.st_size, status.st_mtime_ns]
                if not os.path.islink(path) and stamps.get(os.path.relpath(path, run_dir)) != stamp:
                    total += status.st_size
    return total


def remove_folders(request: RemoveFoldersRequest) -> None:
    """Remove the requested folders of this node unless they are in use; and temporary folders of dead processes."""
    workdir, own_identity = os.path.expanduser(request.workdir), identity(request.access)
    removed = []
    for name in request.folders.get(own_identity, ()):
        folder = os.path.join(workdir, "runs", name)
        if is_run_name(name) and os.path.isdir(folder) and not is_in_use(folder, own_identity):
            remove_tree(folder)
            removed += [] if os.path.isdir(folder) else [name]
    remove_half_unpacked(workdir)
    Registry(request.registry, request.access).forget_dead()
    say(removed=removed)
