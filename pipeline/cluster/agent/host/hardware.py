"""CPUs, GPUs, memory and limits of this login. The probe calls these functions, and the controller does for itself."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import shutil
import subprocess

from trainers.contract.host_facts import ControlGroup, Hardware, Limit, Limits

from ..node import control_groups, read_text
from ..wire import free_bytes

_ARITHMETIC = r"(avx|amx|sse4|asimd|sve)\w*|fma|f16c|bf16|i8mm|fphp|sme2?"
"""Instructions that round in their own way, as Linux names what a processor has."""
_OTHER_DEVICES = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-*")  # of AMD, of Windows' subsystem for Linux, of a Jetson


def count_gpus() -> int:
    """Return the number of GPUs visible to CUDA: those in ``CUDA_VISIBLE_DEVICES``, or 0 if the host has none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _gpus_present()
    # a named device may be a part of a GPU (MIG), so there may be more names than GPUs
    named = len([part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")])
    # the devices of AMD, WSL and a Jetson show that there are GPUs, but not how many, so the variable must name them
    present = named and (_gpus_present() or any(map(glob.glob, _OTHER_DEVICES)))
    return named if present else 0


def _gpus_present() -> int:
    """Count NVIDIA's GPUs by their device files, else by nvidia-smi's list."""
    devices = [path for path in glob.glob("/dev/nvidia*") if re.fullmatch(r"/dev/nvidia\d+", path)]
    if devices or not shutil.which("nvidia-smi"):
        return len(devices)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=5, check=False
        )
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0


def count_cpus() -> int:
    """Return the CPUs that this process may use: its affinity, and the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
        quota, period = file.read().split()
        count = min(count, max(1, int(quota) // int(period)))
    return count


def hardware(cpuinfo: str = "/proc/cpuinfo") -> Hardware:
    """Return the models of CPU and GPUs, and the version of the GPU driver."""
    lines = _pairs_in(r"^(.+?)[ \t]*:[ \t]*(.*)$", [cpuinfo])
    cpu = dict(reversed(lines))  # the lines of the first processor win
    # a hypervisor may hide a CPU's name, but not these numbers; of x86, and of ARM
    numbers = [("vendor_id", "cpu family", "model", "stepping"), ("CPU implementer", "CPU part", "CPU variant")]
    names = next((fields for fields in numbers if fields[0] in cpu), ())
    vendor, *others = [cpu.get(name, "?") for name in names] or [""]
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    driver = _pairs_in(r"(Kernel Module)\s+(?:for \S+\s+)?([\d.]+)", ["/proc/driver/nvidia/version"])
    gpus = _pairs_in(r"^(Model):\s*(.+)$", glob.glob("/proc/driver/nvidia/gpus/*/information"))
    return Hardware(
        cpu_model=cpu.get("model name"),
        cpu_id=f"{vendor} {'/'.join(others)}" if vendor else None,
        cpu_flags=" ".join(sorted(flag for flag in flags if re.fullmatch(_ARITHMETIC, flag))) or None,
        gpu_models=tuple(model for _, model in gpus),
        gpu_driver=driver[0][1] if driver else None,
    )


def can_bind_numa(system: str = "/sys") -> bool:
    """Return whether torchrun can bind ranks to the cores near their GPUs: numactl exists, and they may be used."""
    if shutil.which("numactl") is None:
        return False
    try:
        vendors = glob.glob(f"{system}/bus/pci/devices/*/vendor")
        gpus = [os.path.dirname(path) for path in vendors if read_text(path) == "0x10de"]  # NVIDIA
        numa_nodes = {read_text(os.path.join(folder, "numa_node")) for folder in gpus}
        for node in numa_nodes:
            ranges = read_text(f"{system}/devices/system/node/node{node}/cpulist").split(",")  # 0-2,8
            ends = [part.partition("-") for part in ranges]
            cores = {core for low, _, high in ends for core in range(int(low), int(high or low) + 1)}
            if not cores & os.sched_getaffinity(0):  # a scheduler or container gave this login other cores
                return False
    except (AttributeError, ValueError):  # node -1 (unknown) has no folder; macOS has no affinity
        return False
    return bool(numa_nodes)


def _pairs_in(pattern: str, paths: list[str]) -> list[tuple[str, str]]:
    """Return the pattern's two groups (name, value) for each match in these files."""
    fields: list[tuple[str, str]] = []
    for path in sorted(paths):
        fields += re.findall(pattern, read_text(path), re.MULTILINE)
    return fields


def limits() -> Limits:
    def limit(which: int) -> Limit:
        return Limit(*(None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which)))

    return Limits(open_files=limit(resource.RLIMIT_NOFILE), locked_memory_bytes=limit(resource.RLIMIT_MEMLOCK))


def shared_memory_free_bytes(folder: str = "/dev/shm") -> int | None:
    return free_bytes(folder) if os.path.isdir(folder) else None


def memory_available_bytes(table: str = "/proc/meminfo") -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", read_text(table), re.MULTILINE)
    return int(match.group(1)) << 10 if match else None


def control_group(cgroup_file: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> ControlGroup:
    """Return the tightest limits of this process's control groups and of all groups above (Linux, versions 1 and 2)."""
    paths = control_groups(cgroup_file)
    cpus: list[float] = []
    memory: list[tuple[int, int]] = []  # limit and use
    for folder in _ancestors(root, paths.get("")):
        quota, _, period = read_text(f"{folder}/cpu.max").partition(" ")
        cpus += _cpu_limit(quota, period)
        memory += _memory_limit_and_use(folder, "memory.max", "memory.current")
    for folder in _ancestors(f"{root}/cpu", paths.get("cpu")):
        cpus += _cpu_limit(read_text(f"{folder}/cpu.cfs_quota_us"), read_text(f"{folder}/cpu.cfs_period_us"))
    for folder in _ancestors(f"{root}/memory", paths.get("memory")):
        memory += _memory_limit_and_use(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
    # the tightest limit of memory is the one that leaves the least
    limit, used = min(memory, key=lambda pair: pair[0] - pair[1]) if memory else (None, None)
    return ControlGroup(cpus=min(cpus, default=None), memory_bytes=limit, memory_used_bytes=used)


def _ancestors(root: str, path: str | None) -> list[str]:
    """Return the folders of a control group and of all groups above it; none if ``root`` isn't mounted."""
    if path is None or not os.path.isdir(root):
        return []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join([root, *parts[:count]]) for count in range(len(parts), -1, -1)]


def _cpu_limit(quota: str, period: str) -> list[float]:
    """Return [limit in cores]; [] without a limit (``max``, or -1 in version 1)."""
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []


def _memory_limit_and_use(folder: str, limit_file: str, use_file: str) -> list[tuple[int, int]]:
    """Return [(limit, use without caches)] in bytes; [] without a limit (in version 1 a number near 2^63)."""
    limit, used = read_text(f"{folder}/{limit_file}"), read_text(f"{folder}/{use_file}")
    if not (limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60):
        return []
    counters: dict[str, str] = dict(re.findall(r"^(\w+) (\d+)$", read_text(f"{folder}/memory.stat"), re.MULTILINE))
    cached = int(counters.get("total_inactive_file", counters.get("inactive_file", "0")))
    return [(int(limit), max(0, int(used) - cached))]
