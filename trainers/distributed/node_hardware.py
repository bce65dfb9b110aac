"""The hardware of each node, as far as it can change the last bits of a result. summary.json and each checkpoint record
it, so that a run that goes on elsewhere can warn of the difference."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainers.distributed.process_group import RankContext

_CPUINFO = Path("/proc/cpuinfo")
_LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class NodeHardware:
    """A node's device (cpu or cuda) and processor: names, compute capability, instruction sets, threads of a rank."""

    device: str
    device_name: str = ""
    capability: str | None = None
    cpu: str = ""
    cpu_capability: str = ""
    onednn_isa: str | None = None
    threads_per_rank: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the entry of summary.json and of a checkpoint's .json; without ``capability`` if there is none."""
        return {name: value for name, value in asdict(self).items() if name != "capability" or value is not None}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> NodeHardware:
        """Read such an entry. Raises TypeError: it names no device."""
        return cls(**{item.name: entry[item.name] for item in fields(cls) if item.name in entry})

    @property
    def instructions(self) -> str:
        """The part that determines the node's rounding: its GPU, or its processor and the instruction sets in use."""
        if self.device != "cpu":
            return self.device_name
        sets = [name for name in (self.cpu_capability, self.onednn_isa) if name]
        return f"{self.cpu} with {' and '.join(sets)}"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the processor's model as the system names it."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


@cache
def onednn_isa() -> str | None:
    """Return oneDNN's instruction set, such as ``Intel AVX2``, from its log; it decides bits of convolutions."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    # redirect file descriptor 1, as oneDNN writes its log from C
    sys.stdout.flush()
    real_stdout = os.dup(1)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
                torch.relu(torch.ones(4, 4).to_mkldnn())
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(real_stdout, 1)
            os.close(real_stdout)
        log.seek(0)
        text = log.read().decode(errors="replace")
    others = [line for line in text.splitlines(keepends=True) if not line.startswith("onednn_verbose,")]
    print("".join(others), end="", flush=True)  # lines that another thread printed meanwhile
    match = re.search(r",cpu,isa:(.+)", text)
    return match[1].strip() if match else None


def hardware_of_nodes(context: RankContext) -> list[NodeHardware]:
    """Return the hardware of each node as its first rank sees it, in node order. Every rank must call it."""
    ranks = context.ranks
    rows = context.share([ranks.node_rank, ranks.local_rank, _hardware_here(context).as_json()])
    by_node = {node: hardware for node, local_rank, hardware in rows if local_rank == 0}
    return [NodeHardware.from_json(by_node[node]) for node in sorted(by_node)]


def _hardware_here(context: RankContext) -> NodeHardware:
    on_gpu = context.device.type == "cuda"
    return NodeHardware(
        device=context.device.type,
        device_name=device_name(context.device)[:_LONGEST_NAME],
        capability="{}.{}".format(*torch.cuda.get_device_capability(context.device)) if on_gpu else None,
        cpu=cpu_name()[:_LONGEST_NAME],
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        onednn_isa=(onednn_isa() or "")[:_LONGEST_NAME] or None,
        threads_per_rank=torch.get_num_threads(),
    )


def changes(before: Sequence[NodeHardware], now: Sequence[NodeHardware]) -> list[str]:
    """Describe each node whose instructions have changed, such as "on node 0 by OLD, now it is NEW"."""
    pairs = enumerate(zip(before, now, strict=False))  # another number of nodes shows in the number of ranks
    return [
        f"on node {number} by {old.instructions}, now it is {new.instructions}"
        for number, (old, new) in pairs
        if old.instructions != new.instructions
    ]
