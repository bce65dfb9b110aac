"""Describe the hardware of each node, as far as it can change the last bits of a result, for summary.json."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainers.distributed.process_group import RankContext

_CPUINFO = Path("/proc/cpuinfo")
_LONGEST_NAME = 120


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's."""
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
    """Return the instruction set that oneDNN uses, such as ``Intel AVX2``, or None if unknown. Takes 5 ms.

    It decides the bits of convolutions and products. torch has no call for it, but oneDNN's verbose log prints it to
    standard output.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    # redirect file descriptor 1, as oneDNN writes its log from C
    sys.stdout.flush()
    ours = os.dup(1)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):  # type: ignore[no-untyped-call]
                torch.relu(torch.ones(4, 4).to_mkldnn())
            ctypes.CDLL(None).fflush(None)
        finally:
            os.dup2(ours, 1)
            os.close(ours)
        log.seek(0)
        text = log.read().decode(errors="replace")
    others = [line for line in text.splitlines(keepends=True) if not line.startswith("onednn_verbose,")]
    print("".join(others), end="", flush=True)  # lines that another thread printed meanwhile
    match = re.search(r",cpu,isa:(.+)", text)
    return match[1].strip() if match else None


def own(context: RankContext) -> dict[str, Any]:
    """Describe this rank's device, its processor, the instruction sets that torch and oneDNN use, and its threads."""
    on_gpu = context.device.type == "cuda"
    return {
        "device": context.device.type,
        "device_name": device_name(context.device)[:_LONGEST_NAME],
        **({"capability": "{}.{}".format(*torch.cuda.get_device_capability(context.device))} if on_gpu else {}),
        "cpu": cpu_name()[:_LONGEST_NAME],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": (onednn_isa() or "")[:_LONGEST_NAME] or None,
        "threads_per_rank": torch.get_num_threads(),
    }


def changes(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe each node whose instructions differ from those of the same node before: "on node 0 by …"."""
    both = zip(then, now, strict=False)  # another number of nodes is reported by the number of ranks
    pairs = [(number, _instructions(old), _instructions(new)) for number, (old, new) in enumerate(both)]
    return [f"on node {number} by {old}, now it is {new}" for number, old, new in pairs if old != new]


def _instructions(node: Mapping[str, Any]) -> str:
    """Return what determines a node's rounding: its GPU, or its processor and the instruction sets in use."""
    if node.get("device") == "cpu":
        sets = [str(node[name]) for name in ("cpu_capability", "onednn_isa") if node.get(name)]
        return f"{node.get('cpu')} with {' and '.join(sets)}"
    return str(node.get("device_name"))


def of_all_nodes(context: RankContext) -> list[dict[str, Any]]:
    """Return the description of each node by its first rank, in node order. Every rank must call it."""
    ranks = context.share({"node": context.ranks.node_rank, "local": context.ranks.local_rank, **own(context)})
    return sorted((item for item in ranks if item.pop("local") == 0), key=lambda item: int(item.pop("node")))
