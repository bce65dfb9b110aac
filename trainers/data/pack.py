"""The reader of the data pack that ``doit fetch`` makes: raw uint8 images (C-order [N, C, H, W]) and int64 labels
(little-endian [N]), memory-mapped. They are copied to the GPU if they fit there; else threads read the rows of each
batch. A pack that keeps the image files has ``places.bin`` too, and is read by ``trainers.data.encoded``."""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trainers.contract import run_folder
from trainers.contract.data_pack import IMAGES, LABELS, PLACES, Manifest, parse
from trainers.core.errors import TrainerError, install

_DECODER = "encoded"
_FREE_SHARE = 0.5  # share of the free device memory for resident data


@dataclass(frozen=True, kw_only=True)
class MappedPack:
    """An open data pack, whose images and labels are on one device."""

    folder: Path
    manifest: Manifest
    images: Tensor  # uint8 [N, C, H, W]; of a pack that keeps the image files, the bytes of all files
    labels: Tensor  # int64 [N]
    row_reader: RowReader | None = None  # set if the GPU has no room for all rows, or if rows must be decoded
    places: Tensor | None = None  # of a pack that keeps the image files: start and end of each, int64 [N, 2]

    def rows(self, index: Tensor, device: torch.device) -> Rows:
        """Return images uint8 [n, C, H, W] and labels [n] on ``device``; ``index`` is on the labels' device."""
        if self.row_reader is not None:
            return self.row_reader.take(RowRequest(index))
        return take(self.images, index, device), take(self.labels, index, device)


def open_pack(folder: Path) -> MappedPack:
    """Map a pack into memory (read on demand, shared by the ranks of a node). Raises DamagedPackError, TrainerError."""
    manifest = read_manifest(folder)
    shape: tuple[int, ...] = (manifest.count, manifest.channels, manifest.height, manifest.width)
    places = None
    if manifest.files is not None:
        shape = (manifest.files[IMAGES],)
        places = _map(folder / PLACES, torch.int64, (manifest.count, 2))
    images = _map(folder / IMAGES, torch.uint8, shape)
    labels = _map(folder / LABELS, torch.int64, (manifest.count,))
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
            folder, f"{folder / name} was altered: its sha256 is {seen[:12]}, the manifest says {wanted[:12]}"
        )


class PackWatch:
    """Detects writes to the files of an open pack; create it before the digests are checked.

    It keeps the files open: a replaced file, whose old content the mapping keeps, does not count as altered.
    """

    def __init__(self, pack: MappedPack) -> None:
        self._pack = pack
        self._files = {name: os.open(pack.folder / name, os.O_RDONLY) for name in pack.manifest.sha256}
        self._seen = self._stamps()

    def damage(self) -> DamagedPackError | None:
        """Return what was altered, or None. Cheap: files are hashed only if a size or time has changed."""
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
    """Return the pack for use on ``device``: copied to the GPU if it takes at most half of the free memory there, else
    with a row reader. A pack of image files always gets a row reader, which decodes them. ``smallest_crop``:
    dataset.random_resized_crop. Raises TrainerError: Pillow is missing, or crops need image files and the pack holds
    pixels.
    """
    if pack.places is not None:
        return replace(pack, row_reader=_decoder(pack, pack.places, device, smallest_crop))
    if smallest_crop:
        raise TrainerError(
            f"dataset.random_resized_crop={smallest_crop} is cut from the files, and {pack.manifest.name} was packed "
            "as pixels; dataset.decoded_limit=0 keeps the files of folder and parquet (others have none)"
        )
    if device.type != "cuda":
        return pack
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if pack.images.nbytes + pack.labels.nbytes > _FREE_SHARE * free_bytes:
        return replace(pack, row_reader=Gatherer(pack.images, pack.labels, device))
    return replace(pack, images=pack.images.to(device), labels=pack.labels.to(device))


def _decoder(pack: MappedPack, places: Tensor, device: torch.device, smallest_crop: float) -> RowReader:
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
    # not torch.from_file, which maps writable pages: of those, the system allows no more than memory and swap hold
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype).view(shape)


_PREFETCHED = 2  # batches: one is copied to the device while the next is gathered

Rows = tuple[Tensor, Tensor]  # images uint8 [n, C, H, W] and labels int64 [n]


class RowRequest(NamedTuple):
    """A request for rows of a pack."""

    samples: Tensor  # their numbers in the pack, int64 [n] on the CPU
    crops: Tensor | None = None  # random numbers of crops that are cut while decoding, int64 [n, 4]

    def equals(self, other: RowRequest) -> bool:
        """Return True if both request the same rows."""
        if self.crops is None or other.crops is None:
            return self.crops is other.crops and torch.equal(self.samples, other.samples)
        return torch.equal(self.samples, other.samples) and torch.equal(self.crops, other.crops)


class RowReader(ABC):
    """Provides images uint8 [n, C, H, W] and labels int64 [n] on ``device``, with a few batches prefetched: threads
    fill pinned buffers, from which a copy to the device runs in parallel with its computation.
    """

    def __init__(self, device: torch.device, workers: int) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="rows")
        self._upcoming: Iterator[RowRequest] = iter(())
        self._begun: deque[tuple[RowRequest, Callable[[], Rows]]] = deque()  # requests, and what waits for their rows

    def expect(self, batches: Iterable[RowRequest]) -> None:
        """Prefetch these batches, which will be taken in this order."""
        self._upcoming = iter(batches)
        self._begun.clear()
        self._prefetch()

    def take(self, wanted: RowRequest) -> Rows:
        """Return the rows; if they aren't those expected next, read them now. Raises TrainerError."""
        if self._begun and self._begun[0][0].equals(wanted):
            rows = self._begun.popleft()[1]()
            self._prefetch()
        else:
            rows = self._begin(wanted)()
        images, labels = (item.to(self._device, non_blocking=True) for item in rows)
        return images, labels

    def close(self) -> None:
        """Cancel reads that have not begun."""
        self._upcoming = iter(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prefetch(self) -> None:
        while len(self._begun) < _PREFETCHED and (wanted := next(self._upcoming, None)) is not None:
            self._begun.append((wanted, self._begin(wanted)))

    @abstractmethod
    def _begin(self, wanted: RowRequest) -> Callable[[], Rows]:
        """Start to read the rows in threads. Returns a function that waits for them."""

    def _empty(self, count: int, like: Tensor) -> Tensor:
        """Return an empty buffer for ``count`` rows of ``like``; for a GPU it is pinned, so that its copy is fast."""
        return torch.empty(count, *like.shape[1:], dtype=like.dtype, pin_memory=self._device.type == "cuda")


class Gatherer(RowReader):
    """Copies rows of ``images`` and ``labels`` that don't fit into a GPU's memory."""

    def __init__(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        super().__init__(device, workers=1)
        self._sources = images, labels

    def _begin(self, wanted: RowRequest) -> Callable[[], Rows]:
        return self._pool.submit(self._gather, wanted.samples).result

    def _gather(self, index: Tensor) -> Rows:
        images, labels = (
            torch.index_select(source, 0, index, out=self._empty(len(index), source)) for source in self._sources
        )
        return images, labels


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``. Raises DamagedPackError naming the file and field."""
    path = folder / run_folder.MANIFEST
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise unreadable(path, error) from error
    except KeyError as error:
        raise DamagedPackError(path.parent, f"{path} has no field {error}") from error
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise DamagedPackError(path.parent, f"{path} was altered, or is no data manifest: {error}") from error


class DamagedPackError(TrainerError):
    """The pack in ``folder`` is damaged: it must be made or sent again."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(text)
        self.folder = folder


def set_aside(damage: DamagedPackError) -> TrainerError:
    """Rename the manifest of a damaged pack, so that no command takes the pack for intact. Returns the error."""
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
