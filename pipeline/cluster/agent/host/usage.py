"""Measure a node's load for heartbeats (processor, memory, network, disk, GPUs), and run nvidia-smi for the probe."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time

from trainers.contract import variables
from trainers.contract.beats import Gpu, Usage
from trainers.contract.host_facts import NvidiaSmi

from ..node import read_text, user_name
from ..running.processes import stat_fields
from ..wire import in_thread

EVERY_S = 2.0
GPUS_EVERY_S = 5.0  # nvidia-smi is a program of its own
_GPU_ANSWER_S = 4.0
_QUERY = "--query-gpu=utilization.gpu,memory.used,memory.total"

_SMI_QUERIES = {
    "devices": "--query-gpu=index,uuid,name,memory.total,ecc.errors.uncorrected.volatile.total",
    # two names of one field, as an unknown field fails the whole query
    "throttling, old name": "--query-gpu=index,clocks_throttle_reasons.active",
    "throttling, new name": "--query-gpu=index,clocks_event_reasons.active",
    "processes": "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
}

Counters = tuple[float, float, int, int]
"""(busy, total) processor time of all cores in any unit, then bytes (received, sent), since the node was started."""


class UsageSampler:
    """Samples the load, and that of the disk of ``folder``, at most every EVERY_S."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before, self._at = counters(), time.monotonic()
        self._last: Usage | None = None
        self._gpus: tuple[Gpu, ...] = ()
        self._gpus_at = 0.0
        self._has_gpus = shutil.which("nvidia-smi") is not None
        self._query_lock = threading.Lock()

    def look(self) -> Usage | None:
        """Return the load since the last sample. None: too early, or unknown on this system."""
        now = time.monotonic()
        if self._has_gpus and now - self._gpus_at >= GPUS_EVERY_S:
            self._gpus_at = now
            # in a thread, because nvidia-smi takes up to seconds and would delay the heartbeat
            in_thread(self._query_gpus, on_error=lambda _: None)
        if now - self._at < EVERY_S:
            return self._last
        counted, memory = counters(), memory_bytes()
        if counted is not None and self._before is not None and memory is not None:
            cpu, received_per_s, sent_per_s = rates_between(self._before, counted, now - self._at)
            used, free = disk(self._folder)
            self._last = Usage(
                cpu=cpu,
                memory_bytes=memory[0],
                memory_total_bytes=memory[1],
                received_per_s=received_per_s,
                sent_per_s=sent_per_s,
                received_bytes=counted[2],
                sent_bytes=counted[3],
                disk_bytes=used,
                disk_free_bytes=free,
                gpus=self._gpus,
            )
        self._before, self._at = counted, now
        return self._last

    def _query_gpus(self) -> None:
        if not self._query_lock.acquire(blocking=False):  # the previous query hangs
            return
        try:
            argv = ["nvidia-smi", _QUERY, "--format=csv,noheader,nounits"]
            done = subprocess.run(argv, capture_output=True, timeout=_GPU_ANSWER_S, check=True)
            self._gpus = gpus(done.stdout.decode("ascii", "replace"))
        except (OSError, subprocess.SubprocessError):
            self._gpus = ()
        finally:
            self._query_lock.release()


def rates_between(before: Counters, now: Counters, passed_s: float) -> tuple[float, float, float]:
    """Return the busy share of all cores between two samples (0 to 1), and bytes received and sent per second."""
    busy, total = now[0] - before[0], now[1] - before[1]
    received, sent = (max(0, now[index] - before[index]) / max(passed_s, 1e-3) for index in (2, 3))
    cpu = min(1.0, max(0.0, busy / total)) if total > 0 else 0.0
    return round(cpu, 3), round(received), round(sent)


def counters() -> Counters | None:
    """Return the current counters; None without /proc."""
    with contextlib.suppress(ValueError, IndexError):
        return (*processor_time(read_text("/proc/stat").partition("\n")[0]), *traffic(read_text("/proc/net/dev")))
    return None


def memory_bytes() -> tuple[int, int] | None:
    """Return bytes (in use, in total); None if unknown. Caches count as free, as the system gives them up at once."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        total, free = (1024 * int(rows[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        return total - free, total
    return None


def disk(folder: str) -> tuple[int, int]:
    """Return bytes (in use, free for ordinary users) on the disk of a folder; zeros if unknown."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.used, usage.free


def processor_time(line: str) -> tuple[int, int]:
    """Parse (busy, total) time from the first line of /proc/stat. Times of guests are in user and nice already."""
    user, nice, system, idle, wait, irq, soft, steal = map(int, line.split()[1:9])
    busy = user + nice + system + irq + soft + steal
    return busy, busy + idle + wait


def traffic(text: str) -> tuple[int, int]:
    """Return bytes (received, sent) over all interfaces except the loopback, from /proc/net/dev."""
    received = sent = 0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            fields = numbers.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


def gpus(text: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's lines (percent and MiB); a GPU without figures is left out."""
    samples = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            busy, used, total = (float(word) for word in line.split(","))
            samples.append(Gpu(busy / 100, int(used * 2**20), int(total * 2**20)))
    return tuple(samples)


def nvidia_smi(limit_s: float) -> NvidiaSmi | None:
    """Return nvidia-smi's output, without queries that a hanging driver blocks for ``limit_s``; None without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    # all queries at once: each takes up to seconds
    until, outputs = time.monotonic() + limit_s, dict[str, str]()
    children = {
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
    for name, process in children.items():
        try:
            outputs[name], _ = process.communicate(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    processes = outputs.get("processes", "")
    return NvidiaSmi(
        devices=outputs.get("devices"),
        throttling="\n".join(outputs.get(f"throttling, {which} name", "") for which in ("old", "new")),
        processes=processes,
        owners="\n".join(map(owner, re.findall(r"^[^,]*, *(\d+),", processes, re.MULTILINE))),
    )


def owner(pid: str) -> str:
    """Return ``pid, user, unix seconds of its start, PACELINE_NODE``; '' for a process of another container."""
    try:
        user = os.stat(f"/proc/{pid}").st_uid
        ticks = int(stat_fields(int(pid))[19])
        with open("/proc/stat", encoding="ascii") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return ""
    started = boot + ticks / os.sysconf("SC_CLK_TCK")
    return f"{pid}, {user_name(user)}, {started:.0f}, {variable_of(pid, variables.NODE)}"


def variable_of(pid: int | str, name: str) -> str:
    """Return a variable that a process was started with; '' without it, and for processes of others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        match = re.search(rb"(?:^|\0)" + re.escape(name).encode() + rb"=([^\0]*)", environ.read())
        return match.group(1).decode(errors="replace") if match else ""
    return ""
