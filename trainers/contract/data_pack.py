"""The manifest and file names of a data pack, a data set as hosts read it: `doit fetch` writes it, ranks check it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainers.contract.seal import digest_of

VERSION = 1
IMAGES = "images.bin"
LABELS = "labels.bin"
PLACES = "places.bin"
NAMES = "names.json"
_OF_ENCODED = ("encoding", "files")  # fields that only a pack of encoded images has


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
    splits: Mapping[str, tuple[int, int]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: Mapping[str, str]
    source: str
    source_files: Mapping[str, str]
    encoding: Mapping[str, int | None] | None = None
    files: Mapping[str, int] | None = None
    digest: str = ""

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """The exact size of each file."""
        if self.files is not None:
            return self.files
        return {IMAGES: self.count * self.channels * self.height * self.width, LABELS: 8 * self.count}

    def size(self, split: str) -> int:
        """Images in a split."""
        start, stop = self.splits[split]
        return stop - start

    def seal(self) -> dict[str, Any]:
        """Return the JSON object with its digest filled in."""
        fields = json.loads(json.dumps(self._asdict()))
        for name in ("digest", *(name for name in _OF_ENCODED if fields[name] is None)):
            del fields[name]
        return {**fields, "digest": digest_of(fields)}


def parse(content: dict[str, Any]) -> Manifest:
    """Read the content of manifest.json. Raises ValueError: it was altered; KeyError, TypeError: a field is wrong."""
    if content["digest"] != digest_of(content):
        raise ValueError("its digest does not match its content")
    splits = {name: (begin, end) for name, (begin, end) in content["splits"].items()}
    tuples = {name: tuple(content[name]) for name in ("classes", "mean", "std")}
    return Manifest(**{**content, **tuples, "splits": splits})
