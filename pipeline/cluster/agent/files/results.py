"""Answer a ``CollectRequest``: send files of this node's run folder to the controller, as a tar."""

from __future__ import annotations

import glob
import os
import stat
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from ..node import own_node
from ..requests import CollectRequest, TarHead, TarTrailer
from ..wire import say
from .leftovers import Stamps, read_stamps, size_of_new

MOST_NAMES, LONGEST_NAME = 100, 400  # in an answer
# reasons why a file can't be sent; those of NO_FILES leave nothing that the user could lose
LEADS_OUT = "a link that leads out of the run folder"
REMOVED = "it was removed meanwhile"
NO_FILES = (LEADS_OUT, "a pipe", "a socket", "a device", REMOVED)
_WORK = "work/"  # working directories of scripts, in a run folder


def collect(request: CollectRequest) -> None:
    """Send files of the run folder as a tar between two answer lines, ``TarHead`` and ``TarTrailer``."""
    run_dir = own_node(request.nodes, request.access).run_dir
    until_s = request.until_s if request.settled_s is None else time.time() - request.settled_s
    stamps = read_stamps(os.path.join(run_dir, request.stamps_file)) if request.stamps_file else {}
    # a script may have filled its working directory with gigabytes that nobody needs elsewhere
    work = [folder for pattern in request.work_patterns for folder in matching(run_dir, pattern)]
    work_bytes = sum(size_of_new(folder, run_dir, stamps) for folder in work)
    is_too_large = request.limit_bytes is not None and work_bytes > request.limit_bytes
    if is_too_large:
        mark_to_stay(work)
    say(tar=TarHead(too_large_bytes=work_bytes if is_too_large else None))
    archive = RunArchive(run_dir, until_s, stamps)
    archive.send([*request.patterns, *(() if is_too_large else request.work_patterns)], sys.stdout.buffer)
    unsent = archive.unsent
    # at the end of a run (without ``until_s``) what could not be read stays here for the user
    if until_s is None and any(why not in NO_FILES for why in unsent.values()):
        mark_to_stay(work)
    named = {name[:LONGEST_NAME]: unsent[name] for name in sorted(unsent)[:MOST_NAMES]}
    say(trailer=TarTrailer(unsent=named, unsent_count=len(unsent)))


def matching(run_dir: str, pattern: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(run_dir), pattern)))


def mark_to_stay(work: list[str]) -> None:
    """Mark working directories, so that they aren't removed with the run's folder (``folders.holds_unfetched``)."""
    for folder in work:
        open(f"{os.path.dirname(folder)}-left", "a").close()


class RunArchive:
    """A tar of new files of the run folder: not written after ``until_s``, and not unchanged since they got a stamp."""

    def __init__(self, run_dir: str, until_s: float | None, stamps: Stamps) -> None:
        self.run_dir, self.until_s, self.stamps = run_dir, until_s, stamps
        self.unsent: dict[str, str] = {}  # file that could not be sent → why

    def send(self, patterns: Sequence[str], stream: BinaryIO) -> None:
        """Write the tar. Raises OSError: the connection is closed, or a file became shorter meanwhile."""
        # dereference: soft and hard links are sent as files with the whole content
        with tarfile.open(fileobj=stream, mode="w|", dereference=True) as tar:
            for pattern in patterns:
                for path in matching(self.run_dir, pattern):
                    for name, is_folder in self._below(os.path.relpath(path, self.run_dir)):
                        if is_folder:
                            tar.add(os.path.join(self.run_dir, name), arcname=name, recursive=False)
                        else:
                            self._add_file(tar, name)
        stream.flush()

    def _add_file(self, tar: tarfile.TarFile, name: str) -> None:
        try:  # O_NONBLOCK: it may have become a pipe meanwhile
            file = os.fdopen(os.open(os.path.join(self.run_dir, name), os.O_RDONLY | os.O_NONBLOCK), "rb")
        except FileNotFoundError:
            self.unsent[name] = REMOVED
            return
        except OSError as error:
            self.unsent[name] = str(error.strerror)
            return
        with file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                self.unsent[name] = kind_of(status.st_mode)
            elif self._is_wanted(name, status):
                tar.addfile(tar.gettarinfo(arcname=name, fileobj=file), file)

    def _is_wanted(self, name: str, status: os.stat_result) -> bool:
        if name.startswith(_WORK) and os.path.islink(os.path.join(self.run_dir, name)):
            return False  # such as data that a script has linked into its working directory
        if self.until_s is not None and status.st_mtime > self.until_s:
            return False
        return self.stamps.get(name) != [status.st_size, status.st_mtime_ns]

    def _below(self, name: str) -> Iterator[tuple[str, bool]]:
        """Yield (name, is a folder) for ``name`` and all below, except below links; note what can't be sent."""
        path = os.path.join(self.run_dir, name)
        try:
            is_link, mode = os.path.islink(path), os.stat(path).st_mode
            top = os.path.join(os.path.realpath(self.run_dir), "")
            leads_out = is_link and not name.startswith(_WORK) and not os.path.realpath(path).startswith(top)
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                self.unsent[name] = kind_of(mode)
            elif leads_out:
                self.unsent[name] = LEADS_OUT
            elif stat.S_ISREG(mode):
                yield name, False
            elif not is_link:
                inside = sorted(os.listdir(path))
                yield name, True
                for entry in inside:
                    if entry != "__pycache__":
                        yield from self._below(os.path.join(name, entry))
        except FileNotFoundError:
            if not os.path.islink(path):  # a link whose target is missing holds nothing
                self.unsent[name] = REMOVED
        except OSError as error:
            self.unsent[name] = str(error.strerror)


def kind_of(mode: int) -> str:
    """Return what a special file is, in the words of trainers/script/outputs.py."""
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
