"""Read and write the JSON objects of run folders, with or without a seal.

A seal is a last field ``sha256``: the digest of all text before it (trainers/contract/seal.py). A user, a full disk or
another program may have damaged any of these files, so every reader reports damage by DamagedError.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_bytes, write_atomic
from trainers.contract.seal import sealed_text

_LARGEST_BYTES = 1 << 30
_DEEPEST = 64  # nested objects and lists. Paceline's documents have six levels, and its functions recurse over them
_SEAL = re.compile(rb',\n  "sha256": "([0-9a-f]{64})"\n}\n\Z')
_BRACKETS_AND_TEXTS = re.compile(rb'[\[\]{}]|"(?:[^"\\]|\\.)*"', re.DOTALL)
_SEAL_BYTES = 96  # more than a seal and the closing bracket have


class DamagedError(ValueError):
    """The content of a file is not what was written; ``str`` gives the reason in a few words."""


class UnsealedError(DamagedError):
    """The document has no seal."""


def parse(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises DamagedError."""
    if _is_too_deep(data):
        raise DamagedError(f"is nested more than {_DEEPEST} deep")
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedError(f"is not UTF-8 text (byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DamagedError(f"is cut off or no JSON ({error})") from error
    except ValueError as error:  # Python limits the digits of an integer
        raise DamagedError(f"holds a number of more than {sys.get_int_max_str_digits():,} digits") from error
    if not isinstance(value, dict):
        raise DamagedError(f"holds {json.dumps(value)[:40]}, not an object")
    return value


def _is_too_deep(data: bytes) -> bool:
    """Return True if objects and lists are nested too deep. Brackets inside of texts don't count."""
    if data.count(b"{") + data.count(b"[") <= _DEEPEST:  # the fast path: too few brackets
        return False
    depth = 0
    for match in _BRACKETS_AND_TEXTS.finditer(data):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        if depth > _DEEPEST:
            return True
    return False


def content(path: Path) -> bytes:
    """Read a regular file; return b"" for a pipe or device. Raises OSError, DamagedError: a folder, or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise DamagedError("is a directory, not a file")
        if status.st_size > _LARGEST_BYTES:
            raise DamagedError(f"has {status.st_size:,} bytes, more than any file of its kind")
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read() or b"" if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises DamagedError, FileNotFoundError, OSError."""
    return parse(content(path))


def read_or_none(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file is missing, unreadable or damaged."""
    try:
        return read(path)
    except (OSError, DamagedError):
        return None


def read_or_empty(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, unreadable or damaged."""
    return read_or_none(path) or {}


def sealed(value: Mapping[str, Any]) -> str:
    """Return the text of an object with its seal. ``value`` has at least one field, and none named ``sha256``."""
    return sealed_text(value, allow_nan=True)


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object with its seal, atomically. Raises OSError."""
    write_atomic(path, sealed(value))


def read_sealed(path: Path) -> dict[str, Any]:
    """Read an object and remove its seal. Raises DamagedError (UnsealedError: no seal), FileNotFoundError, OSError."""
    return open_sealed(content(path))


def open_sealed(data: bytes) -> dict[str, Any]:
    """Check the seal of ``data`` and return the object without it. Raises DamagedError (UnsealedError if unsealed)."""
    seal = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if seal is None:
        # an unsealed object and a file that was cut off both lack the seal: parsing tells which it is
        if b'"sha256": "' not in data[-_SEAL_BYTES:]:
            parse(data)
        raise UnsealedError("has no sha256 of its own text")
    if sha256_bytes(data[: seal.start()]) != seal[1].decode():
        raise DamagedError("doesn't agree with the sha256 of its own text")
    value = parse(data)
    del value["sha256"]
    return value
