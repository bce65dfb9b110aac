"""Describe the hardware of a measurement, and its peak FLOP/s by the maker's data sheet."""

from __future__ import annotations

import platform
import re
from typing import Any

import torch

from trainers.distributed.node_hardware import device_name

# Dense peaks in 1e12 FLOP/s from the makers' data sheets: (bf16, TF32, fp32 without tensor cores).
# The first entry contained in a device's name counts, so longer names come first. None: not supported.
_PEAKS: tuple[tuple[str, tuple[float | None, float | None, float]], ...] = (
    ("B200", (2250.0, 1125.0, 75.0)),
    ("H200", (989.4, 494.7, 66.9)),
    ("H100 PCIe", (756.0, 378.0, 51.2)),
    ("H100 NVL", (835.0, 417.5, 60.0)),
    ("H100", (989.4, 494.7, 66.9)),
    ("A100", (312.0, 156.0, 19.5)),
    ("A30", (165.0, 82.0, 10.3)),
    ("A40", (149.7, 74.8, 37.4)),
    ("A10G", (70.0, 35.0, 31.2)),
    ("A10", (125.0, 62.5, 31.2)),
    ("L40S", (362.0, 183.0, 91.6)),
    ("L40", (181.0, 90.5, 90.5)),
    ("L4", (121.0, 60.0, 30.3)),
    ("RTX 4090", (165.2, 82.6, 82.6)),
    ("RTX 3090", (71.0, 35.6, 35.6)),
    ("V100", (None, None, 15.7)),
    ("T4", (None, None, 8.1)),
)


def peak_flop_per_s(name: str, precision: str, *, tf32: bool) -> float | None:
    """Return the dense peak of one device for ``fp32`` or ``bf16``; None if unknown (all CPUs).

    Args:
        name: the device name from ``torch.cuda.get_device_name``.
        tf32: fp32 convolutions may use TF32, which is torch's default.
    """
    if "MIG" in name:  # a slice of a GPU
        return None
    for known, (bf16, tensor32, fp32) in _PEAKS:
        if re.search(rf"\b{known}\b", name):
            peak = bf16 if precision == "bf16" else (tensor32 if tf32 and tensor32 else fp32)
            return None if peak is None else peak * 1e12
    return None


def describe(device: torch.device, precision: str) -> dict[str, Any]:
    """Describe device, versions, threads and peak (FLOP/s of one device or None) of a measurement."""
    cuda = device.type == "cuda"
    name = device_name(device)
    tf32 = cuda and torch.backends.cudnn.allow_tf32
    return {
        "device": device.type,
        "name": name,
        "peak_flop_per_s": peak_flop_per_s(name, precision, tf32=tf32) if cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "python": platform.python_version(),
        "system": platform.platform(),
    }
