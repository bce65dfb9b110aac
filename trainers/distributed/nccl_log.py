"""Which transport NCCL took, as its own log tells: where there is InfiniBand and it takes sockets, that is said."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_NETWORK = re.compile(r"NCCL INFO .*?Using network (\S+)")
_SOCKETS = re.compile(r"NET/Socket : Using (.+)")
_REASON = re.compile(r"NET/IB ?: (No device found|No IP interface found|Unable to [^\n]*)|NCCL WARN (.*ibv_[^\n]*)")


def fallback(text: str) -> str | None:
    """That NCCL sends over sockets, over which, and why as far as it says; None where it takes another network, or
    hasn't said.

    Args:
        text: its log at NCCL_DEBUG=INFO with the subsystem NET or INIT.
    """
    networks = _NETWORK.findall(text)
    if not networks or networks[-1] != "Socket":
        return None
    over = _SOCKETS.findall(text)
    reason = _REASON.search(text)
    where = f" ({over[-1].strip()})" if over else ""
    why = f": {reason[0].strip()}" if reason else ""
    return f"NCCL sends over sockets{where}{why}"


def warning(environment: Mapping[str, str] = os.environ) -> str | None:
    """For a rank whose process group is up: a warning where NCCL was told of InfiniBand ports and takes sockets."""
    ports, place = environment.get("NCCL_IB_HCA"), environment.get("NCCL_DEBUG_FILE")
    if ports is None or place is None or environment.get("NCCL_IB_DISABLE") == "1":
        return None
    path = place.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    text = ""
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    found = fallback(text)
    if found is None:
        return None
    return (
        f"warning: {found}, though this host has InfiniBand ({ports.lstrip('=')}), so gradients travel slowly; see "
        "that /dev/infiniband is there and readable, and `ulimit -l` says unlimited (in a container too), or say that "
        "it is meant so: cluster.env.NCCL_IB_DISABLE=1"
    )
