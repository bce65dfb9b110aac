"""Whether a host can start an executable file, told before torchrun tries: its words for it are a traceback."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

_LONGEST = 256  # bytes of a first line that Linux reads
_ELF = b"\x7fELF"
_MACHINES = {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V", 21: "PowerPC64", 22: "s390x"}
_ALSO = (((2, 62), (1, 3)), ((2, 183), (1, 40)))  # which 32 bit programs a 64 bit system starts, too
_FOREIGN = Path("/proc/sys/fs/binfmt_misc")  # where a system names what runs programs of other processors
_MACHO = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")


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
    own = _head(Path(sys.executable))
    if own.startswith(_ELF) and head.startswith(_ELF):
        here, there = _machine(own), _machine(head)
        runs = here == there or (here, there) in _ALSO or any(_FOREIGN.glob("qemu-*"))
        return "" if runs else f"it is made for {_named(there)}, and this host is {_named(here)}"
    if own.startswith(_MACHO) and head.startswith(_MACHO):
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


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LONGEST)


def _machine(head: bytes) -> tuple[int, int]:
    """Class (1: 32 bit, 2: 64 bit) and machine of an ELF header, whose byte order byte 5 says (1: little)."""
    order = "<" if head[5] == 1 else ">"
    return head[4], struct.unpack_from(f"{order}H", head, 18)[0]


def _named(machine: tuple[int, int]) -> str:
    return _MACHINES.get(machine[1], f"machine {machine[1]}") + (" (32 bit)" if machine[0] == 1 else "")
