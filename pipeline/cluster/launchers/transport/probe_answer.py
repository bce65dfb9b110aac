"""A host's answer to the probe as NodeFacts, after the type of every field is checked. Pure.

A damaged Python or an altered agent may answer anything. All later code relies on the types, so a wrong one is reported
here, once, with the host and the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pipeline.core.errors import HostError
from pipeline.core.printable import printable
from pipeline.core.specs import NodeFacts

_TEXT, _NUMBER, _WHOLE, _SWITCH, _PORT = "a text", "a number", "a whole number from 0", "true or false", "a port"
_VERSION = "a version"
_LONGEST = 60  # characters of a value that a message shows


class _Maybe:
    """A shape whose field may be null or absent."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class _Either:
    """One of several shapes."""

    def __init__(self, *shapes: Any) -> None:
        self.shapes = shapes


_TEXTS, _LIMIT = {"*": _TEXT}, _Maybe(_WHOLE)
_CLAIM = {
    **dict.fromkeys(("attempts", "words", "group", "user", "what"), _TEXT),
    "resources": [_TEXT],
    "since": _NUMBER,
}
_LINK = {"state": _TEXT, "mtu": _LIMIT, "speed_mbit": _LIMIT}
_INFINIBAND = {
    **dict.fromkeys(("device", "state", "phys_state", "rate", "link_layer", "gid"), _TEXT),
    "port": _LIMIT,
    "netdev": _Maybe(_TEXT),
}
_SYSTEM = {
    "limits": {"open_files": (_LIMIT, _LIMIT), "locked_memory_bytes": (_LIMIT, _LIMIT)},
    "shared_memory": _Maybe({"size_bytes": _WHOLE, "free_bytes": _WHOLE}),
    "memory_available_bytes": _LIMIT,
    "cgroup": {"cpus": _Maybe(_NUMBER), "memory_bytes": _LIMIT, "memory_used_bytes": _LIMIT},
    "links": {"*": _LINK},
    "infiniband": [_INFINIBAND],
    "gpus": _Maybe(_TEXTS),
    "claims": [_CLAIM],
    "own_name": _Either({"addresses": [_TEXT]}, {"slow_s": _NUMBER}),
}
_HARDWARE = {
    **dict.fromkeys(("cpu_model", "cpu_id", "cpu_flags"), _Maybe(_TEXT)),
    "gpu_driver": _Maybe(_VERSION),
    "gpu_models": [_TEXT],
}
_LEFT = {"name": _TEXT, "idle_s": _NUMBER, "holds_outputs": _SWITCH, "bytes": _WHOLE}
_ANSWER = {
    **dict.fromkeys(("identity", "hostname", "address", "python", "home"), _TEXT),
    **dict.fromkeys(("interface", "pack_path"), _Maybe(_TEXT)),
    "python_version": _VERSION,
    "torch_version": _Maybe(_TEXT),
    **dict.fromkeys(("gpus", "cpus", "memory_bytes", "disk_free_bytes"), _WHOLE),
    "free_port": _PORT,
    "unix_time": _NUMBER,
    "extra": {
        "interfaces": _TEXTS,
        "free_ports": (_PORT,) * 4,
        "ssh_port": _WHOLE,
        "ssh_address": _TEXT,
        "machine": _Maybe(_TEXT),
        "torch_cuda": _Maybe(_TEXT),
        **dict.fromkeys(("env", "left_behind", "packages", "modules"), _TEXTS),
        "certificates": {"*": {"until": _Maybe(_NUMBER), "error": _Maybe(_TEXT)}},
        "container": _Maybe({**dict.fromkeys(("engine", "image", "digest"), _TEXT), "gpus": _SWITCH}),
        "hardware": _HARDWARE,
        "left": [_LEFT],
        "numa": _SWITCH,
        "system": _SYSTEM,
        "began": _NUMBER,
    },
}
"""Field → its shape: a word above, ``[shape]`` for a list, ``(shape, shape)`` for one of that length, ``{"*": shape}``
for a mapping with names of its own."""


def node_facts(host: str, value: Mapping[str, Any]) -> NodeFacts:
    """Return the facts in the answer of ``host``; unknown fields are left out.

    Raises:
        HostError: a field is missing or of another type; names the host, the field and the value.
    """
    wrong = _wrong(value, _ANSWER, "")
    if wrong:
        raise HostError(
            f"probe: {host} can't take part: its answer has {wrong}",
            hint=f"run the command again; if it stays so, another interpreter for {host} (cluster.python=) or host",
            hosts=[host],
        )
    fields: dict[str, Any] = {name: value.get(name) for name in _ANSWER}
    return NodeFacts(host=host, **fields)


def _wrong(value: Any, shape: Any, path: str) -> str:
    """Describe the first part of ``value`` that doesn't have the ``shape``; '': all of it has."""
    if isinstance(shape, _Maybe):
        return "" if value is None else _wrong(value, shape.shape, path)
    if isinstance(shape, _Either):
        faults = [_wrong(value, one, path) for one in shape.shapes]
        return "" if "" in faults else faults[0]
    match shape:
        case str():
            return "" if _is(value, shape) else _mismatch(value, path, shape)
        case tuple():
            if not isinstance(value, list) or len(value) != len(shape):
                return _mismatch(value, path, f"a list of {len(shape)}")
            parts = zip(value, shape, range(len(shape)), strict=True)
            return next((why for item, one, at in parts if (why := _wrong(item, one, f"{path}[{at}]"))), "")
        case list():
            if not isinstance(value, list):
                return _mismatch(value, path, "a list")
            return next((why for at, item in enumerate(value) if (why := _wrong(item, shape[0], f"{path}[{at}]"))), "")
    if not isinstance(value, Mapping):
        return _mismatch(value, path, "an object")
    begin = f"{path}." if path else ""
    if "*" in shape:
        return next((why for name, item in value.items() if (why := _wrong(item, shape["*"], f"{begin}{name}"))), "")
    return next((why for name, one in shape.items() if (why := _field(value, name, one, begin))), "")


def _field(value: Mapping[str, Any], name: str, shape: Any, begin: str) -> str:
    if name not in value and not isinstance(shape, _Maybe):
        return f"no {begin}{name}"
    return _wrong(value.get(name), shape, f"{begin}{name}")


def _is(value: Any, word: str) -> bool:
    if word == _TEXT:
        return isinstance(value, str)
    if word == _VERSION:
        return isinstance(value, str) and re.match(r"\d{1,9}\.\d{1,9}", value, re.ASCII) is not None
    if word == _SWITCH:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if word == _NUMBER:
        return abs(value) < 1 << 63 and math.isfinite(value)
    return isinstance(value, int) and 0 <= value < (1 << 16 if word == _PORT else 1 << 63)


def _mismatch(value: Any, path: str, wanted: str) -> str:
    text = printable(repr(value))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"{printable(path)} = {shown} in place of {wanted}"
