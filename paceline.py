"""API for training scripts: record metrics with ``paceline.log(step, loss=loss.item())``, find folders, stop early.

One file, standard library only, Python >= 3.9. Under Paceline the metrics are recorded with the run; where the script
runs alone, nothing is recorded. Only rank 0 writes.

In a notebook the same name lists, reads and starts runs: ``paceline.runs()``, ``paceline.run(key)``,
``paceline.train("experiment=quickstart")``, ``sweep``, ``compare`` and ``plot`` (the package pipeline.notebook).
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.notebook import CommandError as CommandError
    from pipeline.notebook import Run as Run
    from pipeline.notebook import UsageError as UsageError
    from pipeline.notebook import compare as compare
    from pipeline.notebook import plot as plot
    from pipeline.notebook import run as run
    from pipeline.notebook import runs as runs
    from pipeline.notebook import sweep as sweep
    from pipeline.notebook import train as train

LOG, RUN_DIR, OUTPUTS = "PACELINE_LOG", "PACELINE_RUN_DIR", "PACELINE_OUTPUTS"
"""Environment variables set by Paceline: the file that ``log`` writes, the run folder, the folder for results."""


def log(step: int, **metrics: Any) -> None:
    """Record metrics of one finished step. A value is a number or a one-element tensor (anything ``float()`` takes).

    Ranks other than 0 do not read the values, as reading a GPU tensor would wait for the device.

    Args:
        step: number of finished steps.

    Raises:
        TypeError: a value is not a number.
        ValueError: ``step`` does not fit into 64 bits, or a name is empty.
    """
    number = int(step)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"paceline: step {step} has more than 64 bits")
    _write(metrics, step=number)


def digest(step: int, model: Any, optimizer: Any = None, **inputs: Any) -> None:
    """Record digests of a torch model's weights, gradients and buffers after ``step``, for `doit diff`.

    Every rank must call it at the same steps, as rank 0 gathers the digests of all; each call waits for the device.

    Args:
        step: number of finished steps.
        optimizer: its state counts too.
        inputs: tensors of the step by name.
    """
    folder = os.environ.get(RUN_DIR)
    if not folder:
        return
    # the model's module has imported it; an import statement here would bring torch into the key of every script
    torch = sys.modules["torch"]
    tensors = {("inputs", name): item for name, item in inputs.items()}  # (kind, name) → tensor
    names = {}  # parameter → name: the optimizer's state is stored by parameter
    for name, item in model.named_parameters():
        names[item] = name
        if item.grad is not None:
            tensors["gradients", name] = item.grad
        tensors["weights", name] = item
    tensors.update({("buffers", name): item for name, item in model.named_buffers()})
    for item, state in optimizer.state.items() if optimizer is not None else ():
        held = {key: value for key, value in state.items() if torch.is_tensor(value)}
        tensors.update({("optimizer", f"{names.get(item)} {key}"): value for key, value in held.items()})
    # one stack and one tolist(): a transfer of each digest by itself would wait for the device each time
    device = next(iter(tensors.values())).device
    row = torch.stack([_digest(torch, item).to(device) for item in tensors.values()]).tolist()
    dist, rows = torch.distributed, [row]
    if dist.is_available() and dist.is_initialized():
        rows = [row] * dist.get_world_size()
        dist.all_gather_object(rows, row)
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        # a line with the names of the tensors, then a line per rank
        lines = [{"names": list(tensors)}, *({"step": int(step), "rank": k, "digests": v} for k, v in enumerate(rows))]
        with Path(folder, "digests.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _digest(torch: Any, tensor: Any) -> Any:
    """Return the int64 scalar Σ (2i+1)·bitsᵢ of a tensor, as trainers.training.digests does."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = local.detach().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(getattr(torch, f"int{8 * flat.element_size()}"))
    factors = torch.arange(1, 2 * len(bits), 2, dtype=torch.int64, device=bits.device).to(bits.dtype)
    return (bits * factors).sum(dtype=torch.int64)


def finish(**metrics: Any) -> None:
    """Record the results of the whole run, at the last step that was logged. Raises TypeError, ValueError."""
    _write(metrics, step=None)


def run_dir() -> Path:
    """Return the folder for the script's output other than checkpoints; outside Paceline, the working directory."""
    return Path(os.environ.get(OUTPUTS) or Path.cwd())


def checkpoints() -> Path:
    """Return the folder for checkpoints, from which a later attempt resumes; outside Paceline, ``./checkpoints``.

    Creates the folder if it does not exist.
    """
    folder = Path(os.environ[RUN_DIR]) / "checkpoints" if os.environ.get(RUN_DIR) else Path("checkpoints")
    folder.mkdir(exist_ok=True)
    return folder


def should_stop() -> bool:
    """Return True if the script should save and exit: a search pruned the run, or SIGTERM was received.

    From the first call on, SIGTERM only sets this flag; processes that are still running 3 s later are killed. Ranks
    may see the flag one step apart: let rank 0 decide and broadcast the decision before the ranks leave their loop.
    """
    _catch_term()
    folder = os.environ.get(RUN_DIR)
    pruned = bool(folder) and Path(str(folder), "prune").exists()
    if pruned and not _state.reported:
        _state.reported = True
        _write({}, step=None, stopping=True)
    return pruned or _state.term


class _State:
    term = caught = reported = False  # SIGTERM has come; the handler is installed; the prune was recorded


_state = _State()


def _catch_term() -> None:
    """Install, once, a SIGTERM handler that sets the flag and then calls the script's own handler, if any."""
    # Python allows signal handlers to be set in the main thread only
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
    """Return the value of the metric ``name`` as a float. Raises TypeError, ValueError."""
    if not name.strip():
        raise ValueError(f"paceline: {name!r} is no name of a metric")
    # item() of a tensor or numpy scalar: float() of a tensor with a gradient warns
    item = getattr(value, "item", None)
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises RuntimeError
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"paceline: metric {name} is no number but a {kind}: {error}") from error


def _write(metrics: dict[str, Any], **row: Any) -> None:
    """Append one line with a single write, or nothing. A failed write is printed and never ends the training."""
    path = os.environ.get(LOG)
    if not path or os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return  # ranks that Lightning starts by itself have LOCAL_RANK and no RANK
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    line = (json.dumps({"t": round(time.time(), 6), **row, "metrics": numbers}) + "\n").encode()
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(file, line)
            if written < len(line):  # the disk is full: remove the partial line, else the next line would continue it
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
    except OSError as error:
        print(f"paceline: {numbers} could not be recorded: {error}", flush=True)


# ------------------------------------------------------------------------------------------ in a notebook
_PACKAGE = ("pipeline", "notebook")  # in parts: a whole name would count as an import of every script
_NOTEBOOK = ("CommandError", "Run", "UsageError", "compare", "plot", "run", "runs", "sweep", "train")


def __getattr__(name: str) -> Any:
    """Import a name of pipeline.notebook when it is used: a script in a run doesn't have that package in its key."""
    if name not in _NOTEBOOK:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(".".join(_PACKAGE)), name)
    except ModuleNotFoundError as error:
        where = "in a notebook or a script that starts runs, and not in a training"
        raise AttributeError(f"paceline.{name} is there {where} ({error})") from error


def __dir__() -> list[str]:
    return sorted(["checkpoints", "digest", "finish", "log", "run_dir", "should_stop", *_NOTEBOOK])


if __name__ == "__main__":  # python -m paceline, where the command paceline isn't on PATH
    sys.exit(importlib.import_module(".".join((_PACKAGE[0], "cli", "main"))).main())
