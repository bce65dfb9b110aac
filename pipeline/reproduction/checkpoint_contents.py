"""What a checkpoint holds: kinds of state by the names in it, and digests of its tensors. Nothing is unpickled."""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

_LARGEST_PICKLE_BYTES = 64 << 20  # that of a checkpoint with a million tensors
_LARGEST_HEADER_BYTES = 64 << 20
_ZIP = b"PK\x03\x04"
OPTIMIZER, RANDOM, SCHEDULE = "optimizer", "random", "schedule"
_KINDS = {
    SCHEDULE: re.compile(r"(?i)sched|^_?last_(?:epoch|lr)$|^_step_count$"),
    OPTIMIZER: re.compile(r"(?i)optim|exp_avg|momentum|max_exp_avg_sq"),
    # not random, train_size_random_mix and random_erase, arguments that a checkpoint holds as well
    RANDOM: re.compile(
        r"(?i)(?<![a-z])rng|rand(?:om)?_?states?(?![a-z])|(?:python|numpy|np|torch|cuda)[_.]?random$|generator|\bseed_state"
    ),
}


def state_kinds(path: Path) -> frozenset[str]:
    """Return those of OPTIMIZER, RANDOM and SCHEDULE that a checkpoint (a file, or a folder of files) names."""
    texts = [*_texts(path)]
    return frozenset(kind for kind, pattern in _KINDS.items() if any(map(pattern.search, texts)))


def tensors_in(path: Path) -> list[tuple[int, int]] | None:
    """Return size and CRC-32 of each tensor's bytes in a file of ``torch.save``, in order; None for another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [(member.file_size, member.CRC) for member in _tensor_files(archive)]
    except (OSError, zipfile.BadZipFile):
        return None


def numbers_in(path: Path) -> list[tuple[int, int]] | None:
    """Return what ``tensors_in`` does without tensors of bytes, which hold random states; None for another file."""
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
            if pickled.file_size > _LARGEST_PICKLE_BYTES:
                return None
            with archive.open(pickled) as file:
                of_bytes = {key for key, kind in _storages(file).items() if kind == "torch ByteStorage"}
            numbers = (item for item in _tensor_files(archive) if item.filename.rpartition("/")[2] not in of_bytes)
            return [(member.file_size, member.CRC) for member in numbers]
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def _tensor_files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [member for member in archive.infolist() if "/data/" in member.filename]


def _storages(file: IO[bytes]) -> dict[str, str]:
    """Return key → type (``torch FloatStorage``) of the storages in a pickle of ``torch.save``. Raises ValueError.

    Each is a persistent id of the type, the key, and more (torch/serialization.py). Either may come from the memo.
    """
    memo, last, kind = dict[int, str](), "", ""
    found = dict[str, str]()
    for opcode, value, _ in pickletools.genops(file):
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[int(value or 0)] = last
            continue
        if opcode.name in ("BINGET", "LONG_BINGET"):
            last = memo.get(int(value or 0), "")
        else:
            last = value if isinstance(value, str) else ""
        if kind and last:
            found[last], kind = kind, ""
        elif last.startswith("torch ") and last.endswith("Storage"):
            kind = last
    return found


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts in a checkpoint that may name a part of it; a torn file or one of unknown form has none."""
    if path.is_dir():
        for inside in sorted(path.rglob("*")):
            yield inside.name
            if inside.is_file():
                yield from _texts(inside)
        return
    with suppress(OSError, ValueError, zipfile.BadZipFile), path.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        if head.startswith(_ZIP):
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    if member.filename.endswith("data.pkl") and member.file_size <= _LARGEST_PICKLE_BYTES:
                        with archive.open(member) as pickled:
                            yield from _texts_of_pickle(pickled)
        elif path.suffix == ".safetensors":
            if (header_bytes := int.from_bytes(file.read(8), "little")) <= _LARGEST_HEADER_BYTES:
                yield from json.loads(file.read(header_bytes))
        elif head.startswith(b"\x80"):
            yield from _texts_of_pickle(file)


def _texts_of_pickle(file: IO[bytes]) -> Iterator[str]:
    """Yield the texts of a pickle from its opcodes, without unpickling. Raises ValueError."""
    for _, value, _ in pickletools.genops(file):
        if isinstance(value, str):
            yield value
