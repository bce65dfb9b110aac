"""A data pack on disk: reads its manifest, and checks that the pack is complete and unaltered.

Every command that needs a pack calls this, so it must be quick: it doesn't import numpy, and doesn't hash a file again
whose stamp (size, times and inode) is unchanged.
"""

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
"""A side file: {file: its Stamp when it was hashed, "origin": source of the images}. A copied pack works without it."""


class Pack(NamedTuple):
    """A complete pack: a folder with images.bin, labels.bin and manifest.json.

    Images are uint8 [N, C, H, W], labels int64 little-endian [N]. For encoded images, images.bin holds the concatenated
    files, places.bin the begin and end of each file (int64 little-endian [N, 2]), and names.json the files' names.
    ``inside`` and ``create`` are there because a run has either such a pack or the data of a script (``trees.Tree``).
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
        """The paths that a script's {data} stands for: none, as only the built-in trainer reads such a pack."""
        return ()

    def create(self) -> None:
        """Do nothing, because the pack is complete already."""


def read(folder: Path) -> Pack | None:
    """Return the pack in ``folder``; None if it is absent or altered. Hashes only files whose stamp has changed."""
    try:
        content = documents.read(folder / MANIFEST)
        manifest = parse(content)
        if content["version"] != VERSION or not _unaltered(folder, manifest):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, truncated, or of another structure
        return None
    return Pack(folder, manifest)


def _unaltered(folder: Path, manifest: Manifest) -> bool:
    recorded = _stamps(folder)
    current = {name: list(stamp(folder / name)) for name in manifest.sizes_bytes}
    if any(current[name][0] != size_bytes for name, size_bytes in manifest.sizes_bytes.items()):
        return False
    restamped = [name for name in current if recorded.get(name) != current[name]]
    if any(sha256_file(folder / name) != manifest.sha256[name] for name in restamped):
        return False
    if restamped:
        # Record the stamps from before hashing, so that a concurrent write causes a new hash. A stamp that is only
        # moments old is left out: another write within the same tick of the clock would leave the same one.
        settled = {name: row for name, row in current.items() if not settles_in(row[-1])}
        _write(folder, settled, str(recorded.get("origin", "unknown")))
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
