"""Where torch's flight recorder writes which NCCL collectives this rank has come to: where the node agent looks for it.

torch documents it in "Flight Recorder for Debugging Stuck Jobs": it keeps the newest collectives in memory, and writes
them to a file when somebody writes a line into a named pipe.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from trainers.contract.beats import FLIGHT_DUMP, FLIGHT_PIPE

_VARIABLES = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": FLIGHT_PIPE, "TORCH_FR_DUMP_TEMP_FILE": FLIGHT_DUMP}
"""torch adds the rank, and .pipe to the first."""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """For a rank that is about to make its process group. What a person has set stays, and is not looked at."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or any(name in environment for name in (*_VARIABLES, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        return
    for variable, name in _VARIABLES.items():
        environment[variable] = str(Path(error_file).with_name(name))
