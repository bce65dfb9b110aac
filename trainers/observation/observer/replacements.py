"""Replacements for functions that read without an audit event, or whose event lacks something: they tell the watch."""

# This module runs at the start of each process, when os.path is loaded and pathlib isn't.
# ruff: noqa: PTH115, PTH117, PTH118, PTH120, SIM105
from __future__ import annotations

import os
import sys
from _thread import get_ident

from .watch import MOST_CACHED, Watch, absolute, as_text, original_open, original_stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_MOST_READS = 1000  # reads of one variable whose reader is determined, which takes 8 µs each
_CODE_OF_ENVIRON = (
    *(os.__file__, "<frozen os>"),
    *(os.path.dirname(os.__file__) + "/_collections_abc.py", "<frozen _collections_abc>"),
)


def replace_stat(watch: Watch) -> None:
    """Note checks for files by ``os.stat``: missing files, and existing files of the checkout.

    ``os.path.exists`` calls ``os.stat``, opens nothing and raises no audit event, but its result may change what the
    program computes.
    """
    seen: set[Any] = set()

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        try:
            status = original_stat(path, *args, **options)
        except FileNotFoundError:
            note(path, options, watch.stat_failed)
            raise
        if type(path) is not int and path not in seen:
            note(path, options, watch.stat_succeeded)
        return status

    def note(path: Any, options: dict[str, Any], noted_by: Callable[[str], None]) -> None:
        try:
            if path in seen or options.get("dir_fd") is not None or get_ident() in watch.unobserved_threads:
                return
            if len(seen) > MOST_CACHED:
                seen.clear()
            seen.add(path)
            noted_by(absolute(path))
        except Exception:
            seen.clear()

    _replace("stat", stat)


def replace_open(watch: Watch) -> None:
    """Note ``os.open(name, dir_fd=…)``, whose audit event lacks the folder."""

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None or os.path.isabs(path):
            return original_open(path, flags, mode, dir_fd=dir_fd)
        try:
            with watch.unobserved:
                full_path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), as_text(path))
            watch.file_opened(full_path, flags)
        except Exception:
            pass
        with watch.unobserved:
            return original_open(path, flags, mode, dir_fd=dir_fd)

    _replace("open", opened)


def _replace(name: str, function: Any) -> None:
    """Replace a function of ``os``."""
    original = getattr(os, name)
    function.__module__, function.__name__, function.__qualname__ = "os", name, name
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if original in able:
            able.add(function)
    setattr(os, name, function)


def replace_environ(watch: Watch) -> None:
    """Note the variables that are read by name, and the code that reads them; a copy of all variables reads none."""
    environ: Any = type(os.environ)
    original_getitem, original_iter = environ.__getitem__, environ.__iter__
    # dict(os.environ) asks for all names and then reads each in turn: reads in this order are those of a copy
    left_to_copy: list[str] = []
    seen: set[tuple[Any, str]] = set()
    reads: dict[Any, int] = {}

    def read(self: Any, name: Any) -> Any:
        if left_to_copy and left_to_copy[-1] == name:
            left_to_copy.pop()
            return original_getitem(self, name)
        reads[name] = count = reads.get(name, 0) + 1
        if count > _MOST_READS:
            return original_getitem(self, name)
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _CODE_OF_ENVIRON:  # get, os.getenv
            frame = frame.f_back
        source = "" if frame is None else frame.f_code.co_filename
        if (name, source) not in seen:
            del left_to_copy[:]
            seen.add((name, source))
            try:
                watch.variable_read(name, source)
            except Exception:
                seen.clear()
        return original_getitem(self, name)

    def names(self: Any) -> Iterator[Any]:
        variables = [*original_iter(self)]
        left_to_copy[:] = variables[::-1]
        return iter(variables)

    environ.__getitem__, environ.__iter__ = read, names


def replace_torch_writer(watch: Watch) -> None:
    """Note the files that ``torch.save`` writes in C++ by path, which raises no audit event."""
    writer: Any = getattr(sys.modules["torch.serialization"], "_open_zipfile_writer_file", None)
    if writer is None or hasattr(writer, "paceline"):
        return
    original_init = writer.__init__

    def init(self: Any, name: Any, *args: Any, **options: Any) -> None:
        try:
            watch.file_written(absolute(name))
        except Exception:
            pass
        original_init(self, name, *args, **options)

    writer.__init__, writer.paceline = init, True
