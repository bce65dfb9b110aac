"""A host's answer to the probe as NodeFacts, after the type of every field is checked. Pure.

A damaged Python or an altered agent may answer anything. All later code relies on the types, so a wrong one is reported
here, once, with the host and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core.errors import HostError
from pipeline.core.shapes import NUMBER, SWITCH, TEXT, WHOLE, Either, Maybe, matching, whole, wrong
from pipeline.core.specs import NodeFacts

_PORT, _VERSION = whole(1 << 16, "a port"), matching(r"\d{1,9}\.\d{1,9}", "a version")
_TEXTS, _LIMIT = {"*": TEXT}, Maybe(WHOLE)
_CLAIM = {
    **dict.fromkeys(("attempts", "words", "group", "user", "what"), TEXT),
    "resources": [TEXT],
    "since": NUMBER,
}
_LINK = {"state": TEXT, "mtu": _LIMIT, "speed_mbit": _LIMIT}
_INFINIBAND = {
    **dict.fromkeys(("device", "state", "phys_state", "rate", "link_layer", "gid"), TEXT),
    "port": _LIMIT,
    "netdev": Maybe(TEXT),
}
_SYSTEM = {
    "limits": {"open_files": (_LIMIT, _LIMIT), "locked_memory_bytes": (_LIMIT, _LIMIT)},
    "shared_memory": Maybe({"size_bytes": WHOLE, "free_bytes": WHOLE}),
    "memory_available_bytes": _LIMIT,
    "cgroup": {"cpus": Maybe(NUMBER), "memory_bytes": _LIMIT, "memory_used_bytes": _LIMIT},
    "links": {"*": _LINK},
    "infiniband": [_INFINIBAND],
    "gpus": Maybe(_TEXTS),
    "claims": [_CLAIM],
    "own_name": Either(({"addresses": [TEXT]}, {"slow_s": NUMBER})),
}
_HARDWARE = {
    **dict.fromkeys(("cpu_model", "cpu_id", "cpu_flags"), Maybe(TEXT)),
    "gpu_driver": Maybe(_VERSION),
    "gpu_models": [TEXT],
}
_LEFT = {"name": TEXT, "idle_s": NUMBER, "holds_outputs": SWITCH, "bytes": WHOLE}
_ANSWER = {
    **dict.fromkeys(("identity", "hostname", "address", "python", "home"), TEXT),
    **dict.fromkeys(("interface", "pack_path"), Maybe(TEXT)),
    "python_version": _VERSION,
    "torch_version": Maybe(TEXT),
    **dict.fromkeys(("gpus", "cpus", "memory_bytes", "disk_free_bytes"), WHOLE),
    "free_port": _PORT,
    "unix_time": NUMBER,
    "extra": {
        "interfaces": _TEXTS,
        "free_ports": (_PORT,) * 4,
        "ssh_port": WHOLE,
        "ssh_address": TEXT,
        "machine": Maybe(TEXT),
        "torch_cuda": Maybe(TEXT),
        **dict.fromkeys(("env", "left_behind", "packages", "modules"), _TEXTS),
        "certificates": {"*": {"until": Maybe(NUMBER), "error": Maybe(TEXT)}},
        "container": Maybe({**dict.fromkeys(("engine", "image", "digest"), TEXT), "gpus": SWITCH}),
        "hardware": _HARDWARE,
        "left": [_LEFT],
        "numa": SWITCH,
        "system": _SYSTEM,
        "began": NUMBER,
    },
}


def node_facts(host: str, value: Mapping[str, Any]) -> NodeFacts:
    """Return the facts in the answer of ``host``; unknown fields are left out.

    Raises:
        HostError: a field is missing or of another type; names the host, the field and the value.
    """
    if why := wrong(value, _ANSWER):
        raise HostError(
            f"probe: {host} can't take part: its answer has {why}",
            hint=f"run the command again; if it stays so, another interpreter for {host} (cluster.python=) or host",
            hosts=[host],
        )
    fields: dict[str, Any] = {name: value.get(name) for name in _ANSWER}
    return NodeFacts(host=host, **fields)
