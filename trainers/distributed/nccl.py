"""Read NCCL's log, which names the network in use, and set up torch's flight recorder of collectives.

torch documents the recorder in "Flight Recorder for Debugging Stuck Jobs": it keeps the newest collectives in memory
and writes them to a file when a line is written into a named pipe. The node agent does so.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE

_NETWORK = re.compile(r"NCCL INFO .*?Using network (\S+)")
_SOCKETS = re.compile(r"NET/Socket : Using (.+)")
_REASON = re.compile(r"NET/IB ?: (No device found|No IP interface found|Unable to [^\n]*)|NCCL WARN (.*ibv_[^\n]*)")
_VARIABLES = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": FLIGHT_PIPE, "TORCH_FR_DUMP_TEMP_FILE": FLIGHT_DUMP}
"""Variable → start of the file name; torch appends the rank, and .pipe to the first."""


def record_flights(environment: MutableMapping[str, str] = os.environ) -> None:
    """Configure the flight recorder before the process group is created. A user's own settings are kept."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or any(name in environment for name in (*_VARIABLES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        return
    for variable, name in _VARIABLES.items():
        environment[variable] = str(Path(error_file).with_name(name))


def fallback(text: str) -> str | None:
    """Describe that NCCL uses sockets, which ones and why, as far as known; None if it uses another network.

    Args:
        text: NCCL's log at NCCL_DEBUG=INFO with the subsystem NET or INIT.
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
    """Return a warning if NCCL was given InfiniBand ports and uses sockets. Call it when the process group is up."""
    ports, place = environment.get("NCCL_IB_HCA"), environment.get("NCCL_DEBUG_FILE")
    if ports is None or place is None or environment.get("NCCL_IB_DISABLE") == "1":
        return None
    path = place.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    text = ""
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    reason = fallback(text)
    if reason is None:
        return None
    return (
        f"warning: {reason}, though this host has InfiniBand ({ports.lstrip('=')}), so gradients travel slowly; see "
        "that /dev/infiniband is there and readable, and `ulimit -l` says unlimited (in a container too), or say that "
        "it is meant so: cluster.env.NCCL_IB_DISABLE=1"
    )
