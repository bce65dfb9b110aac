"""Digits: 1,797 real scans of 8×8 (Alpaydin & Kaynak 1998), bundled with scikit-learn. No download."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.data.base import Part, RawSet, Workspace, refuse_any_source
from trainers.core.config import DatasetConfig
from trainers.core.errors import install

SHAPE = (1, 8, 8)
_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"  # of the unpacked table


@dataclass(kw_only=True)
class DigitsConfig(DatasetConfig):
    """Nothing more to set."""

    name: str = "digits"


def local_inputs(config: DatasetConfig) -> list[Path]:
    refuse_any_source(config)
    return []


def load(config: DatasetConfig, work: Workspace) -> RawSet:
    path = _table()
    table = [[int(float(cell)) for cell in line.split(",")] for line in _verified(path).split()]
    # The table's pixels are 0..16; scale them to 0..255 as in the other data sets.
    pixels = bytes((value * 255 + 8) // 16 for row in table for value in row[:-1])
    return RawSet(
        train=Part(count=len(table), blocks=lambda: iter([(pixels, [row[-1] for row in table])])),
        test=None,
        shape=SHAPE,
        classes=tuple("0123456789"),
        source="digits, as bundled with scikit-learn, pixels scaled from 0..16 to 0..255",
        origin=str(path),
        source_files={"digits.csv": _SHA256},
    )


def _table() -> Path:
    """Locate the table without importing scikit-learn, which would cost a second and 100 MB."""
    spec = importlib.util.find_spec("sklearn")
    roots = spec.submodule_search_locations if spec else None
    for root in roots or ():
        path = Path(root, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return path
    raise DataError("dataset=digits: scikit-learn's digits.csv.gz is not there", hint=install("scikit-learn"))


def _verified(path: Path) -> str:
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise DataError(f"{path} is damaged: {error}", hint=install("--force-reinstall scikit-learn")) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256:
        raise DataError(
            f"{path} is altered: expected sha256 {_SHA256} (unpacked), seen {digest}",
            hint=install("--force-reinstall scikit-learn"),
        )
    return content.decode()
