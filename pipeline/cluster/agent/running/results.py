"""The results of this node: files of the run folder, sent to the controller as a tar."""

from __future__ import annotations

import glob
import os
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator

from ..node import own_node
from ..wire import Json, read_json, say
from .folders import size_of_new

MOST_NAMES, LONGEST_NAME = 100, 400  # in an answer
LEADS_OUT = "a link that leads out of the run folder"
NO_FILES = (LEADS_OUT, "a pipe", "a socket", "a device", "it was removed meanwhile")  # with nothing to keep


def collect(request: Json) -> None:
    """Send the named files of the run folder as a tar after one answer line.

    With ``until_s``, files written later are left out, because they may be incomplete; with ``settled_s``, files of the
    last seconds. Files that ``given`` (a file of the run folder) lists are left out unless altered. The working
    directories of scripts (``work``) aren't sent if larger than ``limit_bytes``: they stay here, and the answer says
    so. Links to files are sent as files, because the controller accepts nothing else. A second answer line, after the
    tar, names the files that could not be sent and why; at the end of an attempt they stay here.
    """
    run_dir, until_s = own_node(request)["run_dir"], request.get("until_s")
    if request.get("settled_s"):
        until_s = time.time() - request["settled_s"]
    given = read_json(os.path.join(run_dir, request["given"])) if request.get("given") else None
    stamps = given if isinstance(given, dict) else {}

    def is_wanted(name: str, state: os.stat_result) -> bool:
        if name.startswith("work/") and os.path.islink(os.path.join(run_dir, name)):
            return False  # such as data that a script has linked into its working directory
        if until_s is not None and state.st_mtime > until_s:
            return False
        return bool(stamps.get(name) != [state.st_size, state.st_mtime_ns])

    patterns, answer = [*request["patterns"]], {}
    work = [
        path for pattern in request.get("work") or [] for path in glob.glob(os.path.join(glob.escape(run_dir), pattern))
    ]
    size = sum(size_of_new(path, run_dir, stamps) for path in work)
    if request.get("limit_bytes") is not None and size > request["limit_bytes"]:
        mark_to_stay(work)
        answer = {"left_bytes": size}
    else:
        patterns += request.get("work") or []
    say(tar=True, **answer)
    unsent: dict[str, str] = {}
    with tarfile.open(
        fileobj=sys.stdout.buffer, mode="w|", dereference=True
    ) as archive:  # also sends the content of hard links
        for pattern in patterns:
            for matched in sorted(glob.glob(os.path.join(glob.escape(run_dir), pattern))):
                for name, kind in below(run_dir, os.path.relpath(matched, run_dir), unsent):
                    send(archive, run_dir, name, kind, is_wanted, unsent)
    sys.stdout.buffer.flush()
    if until_s is None and any(why not in NO_FILES for why in unsent.values()):
        mark_to_stay(work)
    say(unsent={name[:LONGEST_NAME]: unsent[name] for name in sorted(unsent)[:MOST_NAMES]}, unsent_count=len(unsent))


def mark_to_stay(work: list[str]) -> None:
    """Put a marker beside each working directory, so that it is kept on this host (``folders.holds_unfetched``)."""
    for path in work:
        open(f"{os.path.dirname(path)}-left", "a").close()


def send(
    archive: tarfile.TarFile,
    run_dir: str,
    name: str,
    kind: str,
    is_wanted: Callable[[str, os.stat_result], bool],
    unsent: dict[str, str],
) -> None:
    """Add a folder or a file to the tar; note files that can't be opened.

    Raises OSError: the connection is closed, or the file was cut.
    """
    path = os.path.join(run_dir, name)
    if kind == "folder":
        archive.add(path, arcname=name, recursive=False)
        return
    try:  # it may have become a pipe meanwhile, which must not block
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        unsent[name] = "it was removed meanwhile"
        return
    except OSError as error:
        unsent[name] = str(error.strerror)
        return
    with file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            unsent[name] = kind_of(state.st_mode)
        elif is_wanted(name, state):
            item = archive.gettarinfo(arcname=name, fileobj=file)
            archive.addfile(item, file)


def below(run_dir: str, name: str, unsent: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and kind (``file``, ``folder``) of a file, or of a folder and its content.

    Links to folders and to nothing are skipped. Anything else, unreadable, or outside of the run folder is noted.
    """
    path = os.path.join(run_dir, name)
    try:
        is_link, mode = os.path.islink(path), os.stat(path).st_mode
        if stat.S_ISREG(mode):
            if is_link and not name.startswith("work/") and leads_out(path, run_dir):
                unsent[name] = LEADS_OUT
            else:
                yield name, "file"
        elif not stat.S_ISDIR(mode):
            unsent[name] = kind_of(mode)
        elif not is_link:
            inside = sorted(os.listdir(path))
            yield name, "folder"
            for one in inside:
                if one != "__pycache__":
                    yield from below(run_dir, os.path.join(name, one), unsent)
        elif leads_out(path, run_dir) and not name.startswith("work/"):
            unsent[name] = LEADS_OUT
    except FileNotFoundError:
        if not os.path.islink(path):
            unsent[name] = "it was removed meanwhile"
    except OSError as error:
        unsent[name] = str(error.strerror)


def leads_out(path: str, run_dir: str) -> bool:
    """Whether a link leads out of the run folder."""
    return not os.path.realpath(path).startswith(os.path.join(os.path.realpath(run_dir), ""))


def kind_of(mode: int) -> str:
    """Return what stands in place of a file; trainers/script/outputs.py uses the same words."""
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
