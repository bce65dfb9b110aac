"""Small files that appear complete or not at all, without torch, which trainers.core.files imports."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a temporary file next to ``path``, sync and rename it. Raises OSError; then no temporary file remains."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with ``write_text``. Raises OSError; ValueError for NaN."""
    write_text(path, json.dumps(value, allow_nan=False, indent=2) + "\n")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Write sealed JSON with ``write_text``. Raises OSError, ValueError."""
    from trainers.contract.seal import sealed_text  # only at the end of a run: OpenSSL would delay its start

    write_text(path, sealed_text(value))


def sha256_file(path: Path) -> str:
    """Return the hex digest of a file's bytes, read in blocks. Raises OSError."""
    import hashlib  # only at the end of a run: OpenSSL would delay its start

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
