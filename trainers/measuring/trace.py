"""Trace training steps with torch.profiler, for ``trainers.measuring.measure``. Only rank 0 is traced."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainers.contract import run_folder
from trainers.core.files import write_json
from trainers.measuring import bandwidth, hardware
from trainers.measuring.throughput import WARM_UP, OwnLoop, prepared

RESULT, TRACE = run_folder.PROFILE, "trace.json.gz"
_STEPS = 5
_SHOWN = 15


def run(path: Path, options: Mapping[str, Any]) -> None:
    """Trace ``steps`` steps with the configuration ``config.json`` at ``path``. Raises ConfigError, TrainerError."""
    steps = int(options.get("steps", _STEPS))
    with prepared(path) as trainer:
        context, loop = trainer.context, OwnLoop(trainer)
        loop.run(WARM_UP[context.device.type])
        bandwidth.settle(context.device)
        trainer.say(f"tracing {steps} steps of rank 0")
        with _tracing(context.device) if context.is_rank_zero else nullcontext() as tracer:
            for _ in range(steps):
                with record_function("paceline step"):
                    loop.run(1)
            bandwidth.settle(context.device)
        if tracer is not None:
            tracer.export_chrome_trace(str(path.parent / TRACE))
            rows = _longest(tracer, context.device, steps)
            trainer.say("\n".join([f"{'operation':<48}{'calls a step':>14}{'ms a step':>12}", *map(_line, rows)]))
            surroundings = hardware.describe(context.device, trainer.precision)
            write_json(path.parent / RESULT, {"version": 1, "steps": steps, "hardware": surroundings, "rows": rows})


def _tracing(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    return profile(activities=activities, record_shapes=True)


def _longest(tracer: profile, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Return the longest operations by their own time (on the GPU if there is one), in seconds per step."""
    rows = [
        {
            "name": item.key,
            "calls_a_step": item.count / steps,
            "self_s": (item.self_device_time_total if device.type == "cuda" else item.self_cpu_time_total)
            / 1e6
            / steps,
        }
        for item in tracer.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["self_s"])[:_SHOWN]


def _line(row: dict[str, Any]) -> str:
    return f"{row['name'][:46]:<48}{row['calls_a_step']:>14,.1f}{row['self_s'] * 1e3:>12,.3f}"
