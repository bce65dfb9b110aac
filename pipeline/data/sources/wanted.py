"""A file to get, what of it is here already, and why an address didn't give it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.files import write_json
from pipeline.data.sources.source import shown


@dataclass(frozen=True)
class Failure:
    """Why an address did not give the file. ``final``: asking again would not help."""

    url: str
    text: str
    final: bool = False
    absent: bool = False


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One file to get: its name here, its addresses in order of preference, its sha256 where one is known."""

    name: str
    urls: Sequence[str]
    sha256: str | None


class Part:
    """A broken download and what makes it safe to go on with: its address and the server's validator."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached_bytes = 0  # where the longest attempt of this round has ended
        self._note = path.with_name(f"{path.name}.json")

    def resumable(self, url: str) -> tuple[int, str]:
        """(bytes that are there, validator for If-Range); (0, "") where the download must begin anew."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if note["url"] == shown(url) and note["validator"]:
                return self.path.stat().st_size, str(note["validator"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return 0, ""
        return 0, ""

    def begin(self, url: str, headers: Any) -> None:
        """Note the validator: a strong ETag, else the date. Weak ETags don't promise equal bytes."""
        etag = headers.get("ETag", "")
        validator = etag if etag and not etag.startswith("W/") else headers.get("Last-Modified", "")
        write_json(self._note, {"url": shown(url), "validator": validator})

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def move_to(self, path: Path) -> None:
        self.path.replace(path)
        self._note.unlink(missing_ok=True)
