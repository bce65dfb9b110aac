"""Read a data pack's manifest, and check that the pack is complete and unaltered (no numpy here)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core import documents
from pipeline.core.files import settles_in, sha256_file, stamp, write_json
from trainers.contract.data_pack import VERSION, Manifest, parse
from trainers.contract.run_folder import MANIFEST

STAMPS = "stamps.json"
"""A file in the pack: {file name: Stamp, "origin": where the images came from}.

A file with an unchanged stamp isn't hashed again. It is no part of the digest, so a copied pack works without it.
"""


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

    @property
    def inside(self) -> tuple[str, ...]:
        """Paths in it that arguments of a script stand for, as in ``trees.Tree``."""
        return ()

    def create(self) -> None:
        """Do nothing: it is complete, as ``trees.Tree`` is not before a launch."""


def read(folder: Path) -> Pack | None:
    """Return the pack in ``folder``; None if it is absent or altered. Hashes only files with other stamps."""
    try:
        content = documents.read(folder / MANIFEST)
        manifest = parse(content)
        if content["version"] != VERSION or not _unaltered(folder, manifest):
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
        _write(folder, settled, str(noted.get("origin", "unknown")))
    return True


def _stamps(folder: Path) -> dict[str, Any]:
    return documents.read_or_empty(folder / STAMPS)


def origin_of(folder: Path) -> Path | None:
    """Return the recorded origin of the pack in ``folder``; an address gives a path that doesn't exist."""
    origin = _stamps(folder).get("origin")
    return Path(origin) if isinstance(origin, str) else None


def write_stamps(folder: Path, manifest: Manifest, origin: str) -> None:
    """Write the side file of a new pack that no other process knows yet."""
    _write(folder, {name: list(stamp(folder / name)) for name in manifest.sizes_bytes}, origin)


def _write(folder: Path, stamps: Mapping[str, list[int]], origin: str) -> None:
    """Write the side file. On a read-only disk it is skipped, and the pack is hashed on each call."""
    with suppress(OSError):
        write_json(folder / STAMPS, {**stamps, "origin": origin})
