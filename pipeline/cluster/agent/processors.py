"""CPUs and GPUs that this process may use: asked on hosts by the agent, and here by the controller."""

# ruff: noqa: PTH123, PTH207
from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess


def count_gpus() -> int:
    """GPUs that CUDA may see (``CUDA_VISIBLE_DEVICES``), from device files, else from nvidia-smi's list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")])
    devices = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    if devices or not shutil.which("nvidia-smi"):
        return len(devices)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=5, check=False)
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0


def count_cpus() -> int:
    """CPUs that this process may use: its affinity, and the container's quota where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
        quota, period = file.read().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count
