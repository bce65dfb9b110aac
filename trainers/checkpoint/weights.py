"""Plain weights: contiguous tensors on the CPU, which stock torch loads; their file, its .json, and their digest."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from trainers.core.files import HashingFile, write_atomic, write_json


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy a state dict to contiguous CPU tensors, which stock torch loads with load_state_dict."""
    return {
        name: value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
        for name, value in model.state_dict().items()
    }


def write_weights(path: Path, weights: dict[str, Tensor], notes: Mapping[str, Any]) -> tuple[str, str]:
    """Write plain weights, and ``notes`` as the .json beside them; return the sha256 of the file and of the weights.

    Raises:
        TrainerError: they can't be written.
    """
    sha256 = write_tensors(path, weights, needed_bytes=sum(item.nbytes for item in weights.values()))
    digest = weights_digest(weights)
    write_json(path.with_suffix(".json"), with_digest({"sha256": sha256, "weights_sha256": digest, **notes}))
    return sha256, digest


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 (hex) over name, dtype, shape and raw bytes of contiguous CPU tensors, sorted by name."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = weights[name]
        total.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # ctypes, because torch exposes a tensor's bytes only through numpy, which a node need not have
        if value.nbytes:
            total.update((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))
    return total.hexdigest()


def write_tensors(path: Path, content: Any, *, needed_bytes: int) -> str:
    """Write with torch.save, so that torch.load(weights_only=True) can read it; return the sha256 of the file.

    Raises:
        TrainerError: it can't be written.
    """

    def save(file: HashingFile) -> None:
        try:
            torch.save(content, cast("IO[bytes]", file))
        except RuntimeError as error:  # its zip writer hides the OSError of a full disk
            raise file.error or OSError(str(error)) from error

    return write_atomic(path, save, needed_bytes=needed_bytes)


def with_digest(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a .json with the field ``digest`` of all others."""
    return {**notes, "digest": digest_of_notes(notes)}


def digest_of_notes(notes: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of all fields but ``digest``."""
    others = {name: value for name, value in notes.items() if name != "digest"}
    return hashlib.sha256(json.dumps(others, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
