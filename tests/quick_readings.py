"""What is read out of a source, once for all workers of a call of pytest and the commands that they fork.

Each folder of runs remembers it, so the first command in a new one reads sixty sources, half a second each time. A
reading is a function of the source, its path and the code that reads; one that fails is not kept.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from pipeline.core.files import sha256_bytes
from pipeline.keys import readings

_read = readings._parse
_READER = Path(str(readings.__file__)).read_bytes()


def shared_reading(folder: Path, source: bytes, path: str, shown: str) -> dict[str, Any]:
    """``readings._parse``, whose answers lie in ``folder``."""
    kept = folder / f"{sha256_bytes(_READER + path.encode() + source)}.json"
    try:
        found: dict[str, Any] = json.loads(kept.read_text())
    except FileNotFoundError:
        found = _read(source, path, shown)
        folder.mkdir(exist_ok=True)
        own = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        own.write_text(json.dumps(found))
        own.replace(kept)
    return found
