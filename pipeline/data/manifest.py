"""The manifest of a data pack, and the check that a pack is complete and unaltered (no numpy here)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from pipeline.core.files import canonical_json, settles_in, sha256_file, sha256_text, stamp, write_json

VERSION = 1
IMAGES = "images.bin"
LABELS = "labels.bin"
PLACES = "places.bin"
NAMES = "names.json"
MANIFEST = "manifest.json"
STAMPS = "stamps.json"
"""Side file {file name: Stamp, "origin": where the images came from}.

Not part of the digest: it only tells which files need no rehashing, so a copied pack works without it.
"""


_OF_ENCODED = ("encoding", "files")


class Manifest(NamedTuple):
    """The content of manifest.json.

    ``splits`` are half-open index ranges; ``mean`` and ``std`` are per channel, in units of 0..1, over the train split
    (a constant channel has std 1). ``digest`` covers all other fields. None of them holds a path or address, so the
    same files give the same digest wherever they came from.

    ``encoding`` and ``files`` are only set for a pack of encoded images: the decoding settings (see
    trainers.data.image_files), and the size of each file in bytes.
    """

    version: int
    name: str
    synthetic: bool
    count: int  # type: ignore[assignment]  # overrides tuple.count
    channels: int
    height: int
    width: int
    num_classes: int
    classes: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: dict[str, str]
    source: str
    source_files: dict[str, str]
    encoding: Mapping[str, int | None] | None = None
    files: Mapping[str, int] | None = None
    digest: str = ""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """The exact size of each file."""
        if self.files is not None:
            return self.files
        image_bytes = self.channels * self.height * self.width
        return {IMAGES: self.count * image_bytes, LABELS: 8 * self.count}

    def seal(self) -> dict[str, Any]:
        """Return the JSON object with its digest filled in."""
        fields = json.loads(json.dumps(self._asdict()))
        for name in ("digest", *(name for name in _OF_ENCODED if fields[name] is None)):
            del fields[name]
        return {**fields, "digest": sha256_text(canonical_json(fields))}


def parse(raw: dict[str, Any]) -> Manifest | None:
    """Parse a manifest; None if its version or digest is wrong."""
    fields = {name: value for name, value in raw.items() if name != "digest"}
    if raw.get("version") != VERSION or raw.get("digest") != sha256_text(canonical_json(fields)):
        return None
    splits = {name: (begin, end) for name, (begin, end) in raw["splits"].items()}
    tuples = {name: tuple(raw[name]) for name in ("classes", "mean", "std")}
    return Manifest(**{**raw, **tuples, "splits": splits})


class Pack(NamedTuple):
    """A complete pack: a folder with images.bin, labels.bin and manifest.json.

    Images are uint8 [N, C, H, W], labels int64 little-endian [N]. For encoded images, images.bin holds the concatenated
    files, places.bin the begin and end of each file (int64 little-endian [N, 2]), and names.json the files' names.
    """

    path: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The manifest's digest, which identifies the data independent of its path."""
        return self.manifest.digest

    @property
    def rank_modules(self) -> tuple[str, ...]:
        """Modules that ranks must import in addition to read this pack."""
        return () if self.manifest.encoding is None else ("trainers.data.encoded",)


def read(folder: Path) -> Pack | None:
    """Return the pack in ``folder``; None if it is absent, incomplete or altered.

    Hashes only files whose stamps differ from those recorded when the files were last verified.
    """
    try:
        manifest = parse(documents.read(folder / MANIFEST))
        if manifest is None or not _unaltered(folder, manifest):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, truncated, or of another structure
        return None
    return Pack(folder, manifest)


def _unaltered(folder: Path, manifest: Manifest) -> bool:
    noted = _stamps(folder)
    seen = {name: list(stamp(folder / name)) for name in manifest.sizes_bytes}
    if any(seen[name][0] != size for name, size in manifest.sizes_bytes.items()):
        return False
    doubtful = [name for name in seen if noted.get(name) != seen[name]]
    if any(sha256_file(folder / name) != manifest.sha256[name] for name in doubtful):
        return False
    if doubtful:  # record the stamps from before hashing, so that a concurrent write causes a new hash
        settled = {name: row for name, row in seen.items() if not settles_in(row[-1])}
        _note(folder, settled, str(noted.get("origin", "unknown")))
    return True


def _stamps(folder: Path) -> dict[str, Any]:
    return documents.read_or_empty(folder / STAMPS)


def origin_of(folder: Path) -> Path | None:
    """Return the recorded origin of the pack in ``folder``; an address gives a path that doesn't exist."""
    origin = _stamps(folder).get("origin")
    return Path(origin) if isinstance(origin, str) else None


def note_stamps(folder: Path, manifest: Manifest, origin: str) -> None:
    """Write the side file of a new pack that no other process knows yet."""
    _note(folder, {name: list(stamp(folder / name)) for name in manifest.sizes_bytes}, origin)


def _note(folder: Path, stamps: Mapping[str, list[int]], origin: str) -> None:
    """Write the side file. On a read-only disk it is skipped, and the pack is hashed on each call."""
    with suppress(OSError):
        write_json(folder / STAMPS, {**stamps, "origin": origin})
