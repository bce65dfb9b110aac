"""CPUs and GPUs that this process may use: asked on hosts by the agent, and here by the controller."""

# ruff: noqa: PTH116, PTH123, PTH207
from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import time

GPU_FIELDS = "index,uuid,name,memory.total,ecc.errors.uncorrected.volatile.total"
_SMI_QUERIES = {
    "list": f"--query-gpu={GPU_FIELDS}",
    "throttling": "--query-gpu=index,clocks_throttle_reasons.active",
    "throttling, new name": "--query-gpu=index,clocks_event_reasons.active",  # an unknown field fails the whole query
    "processes": "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
}
_OTHER_DEVICES = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-*")  # of AMD, of Windows' subsystem for Linux, of a Jetson


def count_gpus() -> int:
    """GPUs that CUDA may see: those of ``CUDA_VISIBLE_DEVICES``, unless there is none at all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _gpus_there()
    named = len([part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")])
    there = named and (_gpus_there() or any(map(glob.glob, _OTHER_DEVICES)))
    return named if there else 0  # parts of one GPU (MIG) have names of their own


def _gpus_there() -> int:
    """From device files, else from nvidia-smi's list."""
    devices = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    if devices or not shutil.which("nvidia-smi"):
        return len(devices)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=5, check=False
        )
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0


def gpu_state(limit_s: float) -> dict[str, str] | None:
    """What nvidia-smi answers to each of _SMI_QUERIES, as it says it (its errors too); None: there is no nvidia-smi.

    A query without an answer within ``limit_s`` is left out. Nobody waits for its end: a driver that hangs lets a
    process end only when it likes.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    until, said = time.monotonic() + limit_s, {}
    running = {
        name: subprocess.Popen(
            [program, query, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        for name, query in _SMI_QUERIES.items()
    }
    for name, process in running.items():
        try:
            said[name], _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    pids = re.findall(r"^[^,]*, *(\d+),", said.get("processes", ""), re.MULTILINE)
    return {**said, "owners": "\n".join(map(owner, pids))} if pids else said


def owner(pid: str) -> str:
    """``pid, user, unix seconds of its start, PACELINE_NODE``; empty where it isn't told (another container's)."""
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return ""
    mark = b""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:  # of one's own processes
        found = re.search(rb"(?:^|\0)PACELINE_NODE=([^\0]*)", environ.read())
        mark = found.group(1) if found else b""
    started = boot + ticks / os.sysconf("SC_CLK_TCK")
    from .claims import user_name  # not before: the controller counts devices with this module

    return f"{pid}, {user_name(user)}, {started:.0f}, {mark.decode(errors='replace')}"


def count_cpus() -> int:
    """CPUs that this process may use: its affinity, and the container's quota where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
        quota, period = file.read().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count
