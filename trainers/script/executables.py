"""Whether a host can start an executable file, told before torchrun tries: its words for it are a traceback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_LONGEST = 256  # bytes of a first line that Linux reads
_PROGRAMS = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # how those of Linux and macOS begin


def why_not(path: Path, folders: str) -> str:
    """Why it can't be started here, '' where nothing speaks against it.

    Args:
        folders: those of PATH, in which ``env`` looks for what a first line names.

    Raises:
        OSError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_LONGEST)
    except PermissionError:  # it may be started and not be read
        return ""
    if head.startswith(b"#!"):
        return _of_script(head, folders)
    if head.startswith(_PROGRAMS):
        return ""
    if not head:
        return "it is empty"
    return "it is no program of this system, and has no first line that names an interpreter (#!/bin/sh)"


def _of_script(head: bytes, folders: str) -> str:
    line = os.fsdecode(head[2:].split(b"\n")[0])
    words = line.split()
    if not words:
        return "its first line, #!, names no interpreter"
    if line.endswith("\r"):
        return "its first line ends with a carriage return; save it with the line ends of Unix"
    if not os.access(words[0], os.X_OK):
        return f"its first line names {words[0]}, which isn't there"
    name = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), None)
    if Path(words[0]).name == "env" and name is not None and shutil.which(name, path=folders) is None:
        return f"its first line names {name}, which isn't in PATH"
    return ""
