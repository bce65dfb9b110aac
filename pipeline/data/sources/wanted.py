"""State of a download: the requested file, its partial copy, and the failures of its addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core import documents
from pipeline.core.files import write_json
from pipeline.data.sources.source import shown


@dataclass(frozen=True)
class Failure:
    """The reason why an address did not deliver the file. ``final``: a retry would not help."""

    url: str
    text: str
    final: bool = False
    absent: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A file to download: its local name, its addresses in order of preference, its sha256 if known."""

    name: str
    urls: Sequence[str]
    sha256: str | None


class Part:
    """A partial download, with the address and the server's validator that make resuming safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached_bytes = 0  # the furthest position of this round's attempts
        self._note = path.with_name(f"{path.name}.json")

    def resumable(self, url: str) -> tuple[int, str]:
        """Return (existing bytes, validator for If-Range); (0, "") if the download must start again."""
        note = documents.read_or_empty(self._note)
        if note.get("url") == shown(url) and note.get("validator") and self.path.is_file():
            return self.path.stat().st_size, str(note["validator"])
        return 0, ""

    def begin(self, url: str, headers: Any) -> None:
        """Record the validator: a strong ETag, else the date. Weak ETags don't guarantee equal bytes."""
        etag = headers.get("ETag", "")
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        write_json(self._note, {"url": shown(url), "validator": validator})

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def move_to(self, path: Path) -> None:
        self.path.replace(path)
        self._note.unlink(missing_ok=True)
