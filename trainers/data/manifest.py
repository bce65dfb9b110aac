"""The manifest of a data pack: its images, splits and digests; what is done with a pack that doesn't fit it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.contract import run_folder
from trainers.core.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of manifest.json.

    Attributes:
        splits: name → the half-open range of its images.
        mean: of each channel over the train split, of images scaled to 0..1; so is ``std``.
        sha256: file of the pack → its digest.
        digest: of all other fields.
        encoding: how the image files are decoded (fields of ``image_files.Geometry``); None: the pack holds pixels.
        files: file of a pack that keeps the image files → its size in bytes.
    """

    name: str
    synthetic: bool
    count: int
    channels: int
    height: int
    width: int
    num_classes: int
    splits: Mapping[str, tuple[int, int]]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: Mapping[str, str]
    digest: str
    encoding: Mapping[str, int | None] | None = None
    files: Mapping[str, int] | None = None

    def size(self, split: str) -> int:
        """Images in a split."""
        start, stop = self.splits[split]
        return stop - start


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``. Raises DamagedPackError naming the file and field."""
    path = folder / run_folder.MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_digest(path, content)
        return Manifest(
            name=str(content["name"]),
            synthetic=bool(content["synthetic"]),
            count=int(content["count"]),
            channels=int(content["channels"]),
            height=int(content["height"]),
            width=int(content["width"]),
            num_classes=int(content["num_classes"]),
            splits={name: _split(path, content, name) for name in ("train", "val", "test")},
            mean=tuple(float(value) for value in content["mean"]),
            std=tuple(float(value) for value in content["std"]),
            sha256=dict(content["sha256"]),
            digest=str(content["digest"]),
            encoding=content.get("encoding"),
            files=content.get("files"),
        )
    except OSError as error:
        raise unreadable(path, error) from error
    except KeyError as error:
        raise DamagedPackError(path.parent, f"{path} has no field {error}") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise DamagedPackError(path.parent, f"{path} is not a data manifest ({error})") from error


def _check_digest(path: Path, content: dict[str, Any]) -> None:
    """Check ``digest``, the sha256 of the canonical JSON of all other fields."""
    others = {name: value for name, value in content.items() if name != "digest"}
    canonical = json.dumps(others, sort_keys=True, separators=(",", ":"), allow_nan=False)
    if hashlib.sha256(canonical.encode()).hexdigest() != content["digest"]:
        raise DamagedPackError(path.parent, f"{path} was altered: its digest does not match its content")


def _split(path: Path, content: dict[str, Any], name: str) -> tuple[int, int]:
    start, stop = (int(value) for value in content["splits"][name])
    if not 0 <= start <= stop <= int(content["count"]):
        raise DamagedPackError(
            path.parent, f"{path}: splits.{name}=[{start}, {stop}] is no range of {content['count']} images"
        )
    return start, stop


class DamagedPackError(TrainerError):
    """The pack in ``folder`` is damaged: it must be made or sent again."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(text)
        self.folder = folder


def set_aside(damage: DamagedPackError) -> TrainerError:
    """Rename the pack's manifest, so that neither this node nor the controller uses the pack. Returns the error.

    Without this, a check of sizes and time stamps alone would accept the damaged pack for ever.
    """
    folder = damage.folder.resolve()
    try:
        with suppress(FileNotFoundError):  # another rank renamed it, or it was missing
            (folder / run_folder.MANIFEST).replace(folder / f"{run_folder.MANIFEST}.bad")
    except OSError as error:
        return TrainerError(
            f"{damage}; remove {folder} there ({error.strerror}), then the same command makes it or sends it again"
        )
    return TrainerError(f"{damage}; {folder} is set aside: the same command makes it or sends it again")


def unreadable(path: Path, error: OSError) -> TrainerError:
    """Return DamagedPackError for a missing file, and TrainerError for one that may be intact but can't be read."""
    text = f"{path} cannot be read ({error.strerror})"
    if path.with_name(f"{path.name}.bad").exists():
        text = f"{path.parent} was found damaged by another rank"
    return DamagedPackError(path.parent, text) if isinstance(error, FileNotFoundError) else TrainerError(text)
