"""The data pack: raw uint8 images and int64 labels, memory-mapped, on the device if they fit, else read by threads.

A pack is a folder with ``images.bin`` (C-order [N, C, H, W]), ``labels.bin`` (little-endian [N]) and
``manifest.json``. ``doit fetch`` makes it, and the splits are ranges of it. A pack that keeps the image files has
``places.bin`` too, and is read by trainers.data.encoded.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import os
import sys
import warnings
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from trainers.core.errors import TrainerError, install
from trainers.data.manifest import DamagedPackError, Manifest, read_manifest, unreadable
from trainers.data.row_reader import Gatherer, RowReader, Rows, Wanted

_DECODER = "encoded"
_FREE_SHARE = 0.5  # share of the free device memory for resident data


@dataclass(frozen=True, kw_only=True)
class MappedPack:
    """An open data pack. ``images`` uint8 [N, C, H, W] and ``labels`` int64 [N] share one device.

    ``gatherer`` is set if the device has no room for all rows, or if rows must be decoded. For a pack that keeps the
    image files, ``images`` holds their bytes, and ``places`` int64 [N, 2] the start and end of each.
    """

    folder: Path
    manifest: Manifest
    images: Tensor
    labels: Tensor
    gatherer: RowReader | None = None
    places: Tensor | None = None

    def rows(self, index: Tensor, device: torch.device) -> Rows:
        """Return images uint8 [n, C, H, W] and labels [n] on ``device``; ``index`` is on the labels' device."""
        if self.gatherer is not None:
            return self.gatherer.take(Wanted(index))
        return take(self.images, index, device), take(self.labels, index, device)


def open_pack(folder: Path) -> MappedPack:
    """Map a pack into memory (read on demand, shared by the ranks of a node).

    Raises:
        DamagedPackError: a file is missing or differs from the manifest.
        TrainerError: this host can't read it.
    """
    manifest = read_manifest(folder)
    shape: tuple[int, ...] = (manifest.count, manifest.channels, manifest.height, manifest.width)
    places = None
    if manifest.files is not None:
        shape = (manifest.files["images.bin"],)
        places = _map(folder / "places.bin", torch.int64, (manifest.count, 2))
    images = _map(folder / "images.bin", torch.uint8, shape)
    labels = _map(folder / "labels.bin", torch.int64, (manifest.count,))
    if sys.byteorder != "little":
        raise TrainerError(f"{folder}/labels.bin is little-endian; nodes of the other byte order cannot read it")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= manifest.num_classes:
        raise DamagedPackError(
            folder,
            f"{folder}/labels.bin holds labels {low}..{high}, the manifest says 0..{manifest.num_classes - 1}",
        )
    return MappedPack(folder=folder, manifest=manifest, images=images, labels=labels, places=places)


def check_digests(pack: MappedPack) -> None:
    """Hash the pack's files and compare with the manifest. Raises DamagedPackError naming the altered file."""
    for name, wanted in pack.manifest.sha256.items():
        try:
            with (pack.folder / name).open("rb") as file:
                _check_content(pack.folder, name, file, wanted)
        except OSError as error:
            raise DamagedPackError(pack.folder, f"{pack.folder / name} cannot be read ({error.strerror})") from error


def _check_content(folder: Path, name: str, file: BufferedReader, wanted: str) -> None:
    seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != wanted:
        raise DamagedPackError(
            folder,
            f"{folder / name} was altered: its sha256 is {seen[:12]}, the manifest says {wanted[:12]}",
        )


class PackWatch:
    """Detects writes to the files of an open pack, as a running training would see them through its mapping.

    Create it before the digests are checked. It keeps the files open: a replaced file, whose old content the mapping
    keeps, does not count as altered.
    """

    def __init__(self, pack: MappedPack) -> None:
        self._pack = pack
        self._files = {name: os.open(pack.folder / name, os.O_RDONLY) for name in pack.manifest.sha256}
        self._seen = self._stamps()

    def damage(self) -> DamagedPackError | None:
        """Return what was altered, or None. Costs two system calls; files are hashed only if a stamp has changed."""
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        for name, descriptor in self._files.items():
            os.lseek(descriptor, 0, os.SEEK_SET)
            with os.fdopen(os.dup(descriptor), "rb") as file:
                try:
                    _check_content(self._pack.folder, name, file, self._pack.manifest.sha256[name])
                except DamagedPackError as damage:
                    return damage
        self._seen = stamps
        return None

    def _stamps(self) -> list[tuple[int, int, int]]:
        stats = [os.fstat(descriptor) for descriptor in self._files.values()]
        return [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]


def prepare_for(pack: MappedPack, device: torch.device, smallest_crop: float = 0.0) -> MappedPack:
    """Move a pack to the device if it takes at most half of the free memory; else give it a gatherer.

    A pack of image files always gets a gatherer, which decodes them.

    Args:
        smallest_crop: dataset.random_resized_crop, the smallest share of an image's area in a crop; 0: no crops.

    Raises:
        TrainerError: Pillow is missing, or crops need image files and the pack holds pixels.
    """
    if pack.places is not None:
        return replace(pack, gatherer=_decoder(pack, pack.places, device, smallest_crop))
    if smallest_crop:
        raise TrainerError(
            f"dataset.random_resized_crop={smallest_crop} is cut from the files, and {pack.manifest.name} was packed "
            "as pixels; dataset.decoded_limit=0 keeps the files of folder and parquet (others have none)"
        )
    if device.type != "cuda":
        return pack
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if pack.images.nbytes + pack.labels.nbytes > _FREE_SHARE * free_bytes:
        return replace(pack, gatherer=Gatherer(pack.images, pack.labels, device))
    return replace(pack, images=pack.images.to(device), labels=pack.labels.to(device))


def _decoder(pack: MappedPack, places: Tensor, device: torch.device, smallest_crop: float) -> RowReader:
    """Import the decoder and return its reader."""
    # a computed name: a plain import would put Pillow's version into the key of every run
    try:
        module = importlib.import_module(f"{__package__}.{_DECODER}")
    except ModuleNotFoundError as error:
        raise TrainerError(
            f"{pack.manifest.name} was packed as image files, and {error.name} isn't installed here to decode them; "
            f"install it: {install('pillow')}"
        ) from error
    reader: RowReader = module.reader(pack.folder, pack.manifest, places, pack.labels, device, smallest_crop)
    return reader


def take(source: Tensor, index: Tensor, device: torch.device) -> Tensor:
    """Return ``source[index]`` on ``device``; ``index`` is on the device of ``source``."""
    rows = source.index_select(0, index)
    if rows.device == device:
        return rows
    return rows.pin_memory().to(device, non_blocking=True)


def _map(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    wanted_bytes = dtype.itemsize * torch.Size(shape).numel()
    try:
        seen_bytes = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if seen_bytes != wanted_bytes:
        raise DamagedPackError(path.parent, f"{path} has {seen_bytes} bytes, the manifest says {wanted_bytes}")
    if wanted_bytes == 0:
        raise DamagedPackError(path.parent, f"{path} holds no images")
    # not torch.from_file: it maps writable pages, which the system limits to the size of memory and swap
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype).view(shape)
