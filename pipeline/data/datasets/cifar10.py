"""CIFAR-10 (Krizhevsky 2009): 60,000 colour images of 32×32 in ten classes, in both published layouts."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import DataError
from pipeline.data.base import Part, RawSet, Workspace, images_per_block
from pipeline.data.sources import official
from pipeline.data.sources.download import DownloadRequest
from pipeline.data.sources.official import Catalogue, OfficialFile, PublishedLayout
from trainers.core.config import DatasetConfig

if TYPE_CHECKING:
    from pipeline.data.base import Block

SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCH = 10_000  # images in each file
_PIXEL_BYTES = 3072
_RECORD_BYTES = 1 + _PIXEL_BYTES


def _files(rows: str) -> tuple[OfficialFile, ...]:
    """Parse lines of file name, size in bytes and sha256."""
    cells = (row.split() for row in rows.strip().splitlines())
    return tuple(OfficialFile(name=name, size_bytes=int(size), sha256=sha) for name, size, sha in cells)


BINARY = PublishedLayout(
    title="binary layout",
    folders=("cifar-10-batches-bin",),
    train=_files("""
        data_batch_1.bin 30730000 cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
        data_batch_2.bin 30730000 a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
        data_batch_3.bin 30730000 bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
        data_batch_4.bin 30730000 014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
        data_batch_5.bin 30730000 755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
    """),
    test=_files("test_batch.bin 30730000 8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
PYTHON = PublishedLayout(
    title="Python layout",
    folders=("cifar-10-batches-py",),
    train=_files("""
        data_batch_1 31035704 54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd
        data_batch_2 31035320 766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8
        data_batch_3 31035999 0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9
        data_batch_4 31035696 3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b
        data_batch_5 31035623 d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154
    """),
    test=_files("test_batch 31035526 f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831"),
)
CATALOGUE = Catalogue(
    layouts=(BINARY, PYTHON),
    downloads=(  # the same archive at each mirror, so that the digest of the data doesn't depend on it
        DownloadRequest(
            name="cifar-10-python.tar.gz",
            urls=(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-python.tar.gz",
                "https://dataset.bj.bcebos.com/cifar/cifar-10-python.tar.gz",
            ),
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    ),
    holdout=5000,
)


@dataclass(kw_only=True)
class Cifar10Config(DatasetConfig):
    """Nothing more to set."""

    name: str = "cifar10"


def local_inputs(config: DatasetConfig) -> list[Path]:
    return official.local_inputs(config, CATALOGUE)


def load(config: DatasetConfig, work: Workspace) -> RawSet:
    collected = official.collect(config, CATALOGUE, work)
    layout = collected.layout
    return RawSet(
        train=_part(layout, collected.paths(layout.train)),
        test=None if config.holdout else _part(layout, collected.paths(layout.test)),
        shape=SHAPE,
        classes=CLASSES,
        source=f"CIFAR-10, official files, {layout.title}",
        origin=collected.origin,
        source_files=collected.source_files,
    )


def _part(layout: PublishedLayout, paths: list[Path]) -> Part:
    read_batch = _read_python if layout.folders == PYTHON.folders else _read_binary
    return Part(count=_BATCH * len(paths), blocks=lambda: (block for path in paths for block in read_batch(path)))


def _read_binary(path: Path) -> Iterator[Block]:
    """Read a .bin batch: records of one label byte and 3072 pixels, red plane first."""
    with path.open("rb") as file:
        while chunk := file.read(_RECORD_BYTES * images_per_block(SHAPE)):
            begins = range(0, len(chunk), _RECORD_BYTES)
            yield b"".join(chunk[at + 1 : at + _RECORD_BYTES] for at in begins), list(chunk[::_RECORD_BYTES])


def _read_python(path: Path) -> Iterator[Block]:
    """Read a pickled batch {"data": uint8 [n, 3072], "labels": list of n}, after its checksum was verified."""
    batch = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
    yield batch["data"].reshape(-1, *SHAPE), [int(label) for label in batch["labels"]]


class _ArrayUnpickler(pickle.Unpickler):
    """Allows only the classes that numpy arrays of numbers are rebuilt from, under their old and new module names."""

    _ALLOWED = (
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise DataError(
                f"a batch of CIFAR-10 is refused: it asks for {module}.{name}, which is not part of an array"
            )
        return super().find_class(module, name)
