"""The processors and GPUs that each attempt of a run was computed with, recorded and compared: others round otherwise,
so a repetition may then differ in its last bits.

A run's key doesn't contain the hardware, because the hosts aren't known when the key is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.core.files import write_json
from trainers.contract import run_folder
from trainers.contract.host_facts import Hardware
from trainers.contract.records import FieldError, as_json, from_json

FILE = "hardware.json"
"""The file in the folder of each attempt with the hardware of its hosts, in the order of node ranks."""
_FIELDS = {"cpu": ("cpu_model", "cpu_id", "cpu_flags"), "cuda": ("gpu_models",)}  # that decide how a device rounds
_VECTOR_FLAGS = ("avx", "avx2", "avx512f", "asimd", "sve")  # of these instruction sets only the widest is shown
_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "sve2")  # each is shown
_HERE = ("localhost",)  # the hosts of a run of cluster=local


def record(run_dir: Path, attempt: int, nodes: Sequence[Hardware]) -> None:
    """Record the hardware of an attempt's hosts, in the order of node ranks. Raises OSError."""
    write_json(run_dir / run_folder.ATTEMPTS / str(attempt) / FILE, {"nodes": as_json([*nodes])})


def of_attempts(run_dir: Path, device: str) -> dict[str, Any]:
    """Return the field ``hardware`` of result.json: ``device`` (cpu or cuda), and the nodes of each attempt."""
    hardware_by_attempt = []
    for path in sorted(run_dir.glob(f"attempts/*/{FILE}"), key=lambda path: (len(path.parent.name), path.parent.name)):
        try:
            nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
            hardware_by_attempt.append({"attempt": int(path.parent.name), "nodes": [dict(node) for node in nodes]})
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return {"device": device, "attempts": hardware_by_attempt}


def other_than_here(result: Mapping[str, Any], here: Hardware) -> str | None:
    """Describe how the hardware of a local run differs from this computer's (``here``); None: no known difference.

    The hardware of a run on hosts can't be compared with this computer's: its attempts are compared with each other.
    ``result`` is the content of result.json."""
    attempts, device = _attempts(result)
    if tuple(result.get("hosts") or ()) == _HERE:
        for _, nodes in attempts:
            for node in nodes:
                if _differ(node, here, device):
                    return f"{described(node, device)}, here {described(here, device, compared_with=node)}"
        return None
    for (first, nodes), (second, others) in pairwise(attempts):
        for one, other in zip(nodes, others, strict=False):
            if _differ(one, other, device):
                second_shown = described(other, device, compared_with=one)
                return f"attempt {first} by {described(one, device)}, attempt {second} by {second_shown}"
    return None


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe how the hardware of two results differs, node by node; None: no known difference."""
    attempts, device = _attempts(old)
    new_attempts = [nodes for _, nodes in _attempts(new)[0]]
    newest = new_attempts[-1] if new_attempts else []
    for _, nodes in attempts:
        for one, other in zip(nodes, newest, strict=False):
            if _differ(one, other, device):
                return f"{described(one, device)}, now {described(other, device, compared_with=one)}"
    return None


def described(hardware: Hardware, device: str, *, compared_with: Hardware | None = None) -> str:
    """Return ``AMD EPYC (AuthenticAMD 25/1/1, avx2)``. If ``compared_with`` would read the same, all flags by which the
    processors differ are added (``+avx_vnni``)."""
    if device == "cuda":
        models = hardware.gpu_models
        return ", ".join(f"{models.count(model)}× {model}" for model in dict.fromkeys(models)) or "no NVIDIA GPU"
    flags = (hardware.cpu_flags or "").split()
    widest = [name for name in _VECTOR_FLAGS if name in flags][-1:]
    shown = " ".join([*widest, *(name for name in _BF16_FLAGS if name in flags)])
    text = f"{hardware.cpu_model or 'a processor'} ({hardware.cpu_id}, {shown})"
    if compared_with is not None and text == described(compared_with, device):
        others = (compared_with.cpu_flags or "").split()
        more, less = sorted({*flags} - {*others}), sorted({*others} - {*flags})
        text = f"{text[:-1]}{''.join(f' +{name}' for name in more)}{''.join(f' -{name}' for name in less)})"
    return text


def _differ(one: Hardware, other: Hardware, device: str) -> bool:
    """Return True if a field that matters for the device is known of both and differs."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in _FIELDS.get(device, ())]
    return any(value and other_value and value != other_value for value, other_value in pairs)


def _attempts(result: Mapping[str, Any]) -> tuple[list[tuple[int, list[Hardware]]], str]:
    """Return (attempt number, hardware of its nodes) for each attempt, and the device; nothing if it isn't recorded."""
    try:
        recorded = result["hardware"]
        attempts = [(int(item.get("attempt", 0)), [*map(_node, item["nodes"])]) for item in recorded["attempts"]]
        return attempts, str(recorded["device"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return [], ""


def _node(recorded: Any) -> Hardware:
    try:
        return from_json(Hardware, recorded)
    except FieldError:
        return Hardware()
