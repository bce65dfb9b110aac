"""Small files that appear whole or not at all (trainers.core.files does it for torch's, and imports torch)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """By a temporary file beside it, synced and renamed. Raises OSError; nothing is left behind then."""
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
    """``write_text`` of JSON; NaN is refused. Raises OSError, ValueError."""
    write_text(path, json.dumps(value, allow_nan=False, indent=2) + "\n")


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """``write_text`` of sealed JSON. Raises OSError, ValueError."""
    from trainers.contract.seal import sealed_text  # at the end of a run: its beginning waits for none of OpenSSL

    write_text(path, sealed_text(value))


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes, read in blocks. Raises OSError."""
    import hashlib  # at the end of a run: its beginning waits for none of OpenSSL

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
