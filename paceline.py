"""One line a step from any training script: ``import paceline; paceline.log(step, loss=loss.item())``.

One file, standard library only, Python >= 3.9. Under Paceline the figures are recorded with the run; where the script
runs alone nothing is recorded and nothing has to be changed. Only rank 0 writes.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

LOG, RUN_DIR, OUTPUTS = "PACELINE_LOG", "PACELINE_RUN_DIR", "PACELINE_OUTPUTS"
"""Variables that ``trainers.script.start`` sets: where ``log`` writes, the run folder, the folder for results."""


def log(step: int, **metrics: Any) -> None:
    """Record metrics of one finished step; a value is a number, or what ``float()`` takes (a tensor of one element).

    Ranks other than 0 don't even look at the values: that would wait for the device.

    Args:
        step: counts finished steps.

    Raises:
        TypeError: a value is no number. ValueError: no tracker keeps such a step, or a name is empty.
    """
    number = int(step)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"paceline: step {step} has more than 64 bits")
    _write(metrics, step=number)


def finish(**metrics: Any) -> None:
    """Record the results of the whole run, at the last step that was logged. Raises TypeError, ValueError."""
    _write(metrics, step=None)


def run_dir() -> Path:
    """The folder for what the script leaves, besides checkpoints; alone: the working directory."""
    return Path(os.environ.get(OUTPUTS) or Path.cwd())


def checkpoints() -> Path:
    """The folder for checkpoints, which a later attempt goes on from; alone: ``checkpoints``, made where it isn't."""
    folder = Path(os.environ[RUN_DIR]) / "checkpoints" if os.environ.get(RUN_DIR) else Path("checkpoints")
    folder.mkdir(exist_ok=True)
    return folder


def should_stop() -> bool:
    """Whether the script is asked to save and to end: a search pruned the run, or SIGTERM has come.

    From the first call on SIGTERM only sets this; the host ends whoever is there 3 s later. Ranks may see it one step
    apart: let rank 0 decide and tell the others (a broadcast) before they leave their loop.
    """
    _catch_term()
    folder = os.environ.get(RUN_DIR)
    pruned = bool(folder) and Path(str(folder), "prune").exists()
    if pruned and not _state.told:
        _state.told = True
        _write({}, step=None, stopping=True)
    return pruned or _state.term


class _State:
    term = caught = told = False


_state = _State()


def _catch_term() -> None:
    """A handler can only be set in the main thread; one that the script has set goes on being called."""
    if _state.caught or threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        _state.term = True
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handle)
    _state.caught = True


def _number(name: str, value: Any) -> float:
    if not name.strip():
        raise ValueError(f"paceline: {name!r} is no name of a metric")
    item = getattr(value, "item", None)  # of a tensor or a numpy scalar; float() of a tensor with a gradient warns
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch's is the last one
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"paceline: metric {name} is no number but a {kind}: {error}") from error


def _write(metrics: dict[str, Any], **row: Any) -> None:
    """One whole line by one call, or nothing. What can't be written is said and never ends a training."""
    path = os.environ.get(LOG)
    if not path or os.environ.get("RANK", "0") != "0":
        return
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    line = (json.dumps({"t": round(time.time(), 6), **row, "metrics": numbers}) + "\n").encode()
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(file, line)
            if written < len(line):  # the disk is full: what was written of it would spoil the next line
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
    except OSError as error:
        print(f"paceline: {numbers} could not be recorded: {error}", flush=True)
